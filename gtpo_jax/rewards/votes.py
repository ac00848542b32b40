"""Majority voting (maj@k): maps a completion to a hashable answer.

Completions with equal answers vote together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from gtpo_jax.rewards.math.extraction import MAX_CHARS, extract
from gtpo_jax.rewards.math.normalize import SPACE
from gtpo_jax.rewards.math.values import Composite, Number, Value, read
from gtpo_jax.rewards.plain import choice_vote, exact_vote
from gtpo_jax.rewards.synthetic import forks_digits, last_number


def _math(completion: str) -> Hashable | None:
  """Returns the extracted answer as a value, or as its normalised text if it has no exact value.

  SymPy is not used, so \\sqrt{8} and 2\\sqrt{2} are different answers.
  """
  answer = extract(completion)
  if not answer or not answer.strip() or len(answer) > MAX_CHARS:
    return None
  spelling, value = read(answer.strip())
  return (SPACE.sub("", spelling) or None) if value is None else _canonical(value)


def _canonical(value: Value) -> Value:
  """Returns equal objects for equal values: decimal places are dropped, and sets are sorted."""
  if isinstance(value, Number):
    return Number(value.value, value.percent)
  if isinstance(value, Composite):
    items = [_canonical(item) for item in value.items]
    if value.kind == "named":  # x = 1, y = 2
      pairs = sorted(zip(value.names, items, strict=True), key=repr)
      return Composite("named", tuple(item for _, item in pairs), tuple(name for name, _ in pairs))
    ordered = value.kind not in ("list", "{}", "union")
    return Composite(value.kind, tuple(items if ordered else sorted(items, key=repr)), value.names)
  return value


# By `Problem.kind`: the function that maps a completion to its answer, or to None if it abstains.
# Kinds without an entry have no majority vote. "code" has none, since two programs are rarely equal
# as text, and only tests could show that they behave the same.
VOTES: dict[str, Callable[[str], Hashable | None]] = {
  "last_number": last_number,
  "countdown": lambda completion: completion.strip() or None,
  "forks": forks_digits,
  "exact": exact_vote,
  "choice": choice_vote,
  "math": _math,
}
