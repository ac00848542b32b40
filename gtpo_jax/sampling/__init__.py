"""Sampling: the engine, its scheduler, caches, compiled programs and token filters."""
