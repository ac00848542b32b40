"""Evaluation on held-out problems, and its estimators."""
