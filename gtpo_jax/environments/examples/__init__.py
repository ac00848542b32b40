"""Environments and tools of the built-in tasks with several turns."""
