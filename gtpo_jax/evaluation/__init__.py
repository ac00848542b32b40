"""Held-out evaluation and its estimators."""
