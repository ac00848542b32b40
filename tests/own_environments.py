"""An environment and a tool that tests of several files use."""

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
