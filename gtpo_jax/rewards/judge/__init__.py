"""A judge: a language model behind an OpenAI-compatible endpoint that grades completions."""
