"""Scores completions: verifiers, users' functions, the judge, and the parts of the reward."""
