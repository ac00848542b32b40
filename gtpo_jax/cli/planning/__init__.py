"""Ahead-of-time compilation of a run for hardware that is not attached, and its cost."""
