"""Hugging Face folders: reading and writing weights, configs and tokenizers."""
