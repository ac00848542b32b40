"""An environment, a tool and an agent that tests of several files use."""

from gtpo_jax import environments


class Echo:
  """An environment that repeats each turn."""

  def reset(self, row, seed):
    return None

  def step(self, turn):
    return environments.Step(turn.text)


def add(a: int, b: int) -> int:
  """Adds two numbers.

  Args:
    a: The first.
    b: The second.
  """
  return a + b


async def asks_twice(row, client, seed):
  """An agent that shows the policy its own answer."""
  messages = list(row["messages"])
  for _ in range(2):
    answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=6)
    messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
