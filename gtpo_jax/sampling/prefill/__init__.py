"""How tokens are read into the cache in few batches."""
