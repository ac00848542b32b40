"""Keys and values in pages, for the attention kernels of TPUs and GPUs."""
