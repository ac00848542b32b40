"""Number formats: which one a device computes in, and matrix products in each of them."""
