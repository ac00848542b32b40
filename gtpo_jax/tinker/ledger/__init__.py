"""Who asked for what, and what became of it."""
