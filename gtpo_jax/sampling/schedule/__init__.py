"""Which completions run in which slots."""
