"""A server that speaks OpenAI's protocol, on one policy."""
