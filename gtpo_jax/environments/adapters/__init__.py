"""Environments that were written for other programs, unchanged."""
