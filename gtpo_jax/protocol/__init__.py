"""OpenAI's protocol: requests, conversations, answers and errors, on any source of tokens."""
