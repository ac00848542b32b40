"""Attention kernels and rotary position embeddings."""
