"""From problems to scored completions: the batch that one step learns from."""
