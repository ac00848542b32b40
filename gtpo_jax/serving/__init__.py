"""OpenAI's protocol: requests, conversations and answers, and a server on one policy."""
