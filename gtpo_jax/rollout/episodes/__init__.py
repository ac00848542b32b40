"""Completions of several turns: environments answer turns while others are sampled."""
