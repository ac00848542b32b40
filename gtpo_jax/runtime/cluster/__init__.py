"""Finds and connects the processes of a run."""
