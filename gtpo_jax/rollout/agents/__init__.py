"""Episodes that agents play: programs that send requests to the policy in OpenAI's protocol."""
