"""Keys and values in arrays, for XLA's attention."""
