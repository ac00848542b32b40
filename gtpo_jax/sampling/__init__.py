"""From prompts to completions: filters, the compiled loop, the engine."""
