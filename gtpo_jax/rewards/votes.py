"""Votes: the answer of a completion as a value. Completions with equal values share one vote."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from gtpo_jax.rewards.extraction import MAX_CHARS, extract
from gtpo_jax.rewards.normalize import SPACE
from gtpo_jax.rewards.synthetic import last_number
from gtpo_jax.rewards.values import Group, Number, Value, read


def _math(completion: str) -> Hashable | None:
  """Returns the extracted answer as a value, or as its spelling if it has no exact value.

  SymPy is not used, so \\sqrt{8} and 2\\sqrt{2} are two different votes.
  """
  answer = extract(completion)
  if not answer or not answer.strip() or len(answer) > MAX_CHARS:
    return None
  spelling, value = read(answer.strip())
  return (SPACE.sub("", spelling) or None) if value is None else _canonical(value)


def _canonical(value: Value) -> Value:
  """Drops what does not distinguish answers: the number of decimals, the order of a set."""
  if isinstance(value, Number):
    return Number(value.value, value.percent)
  if isinstance(value, Group):
    items = [_canonical(item) for item in value.items]
    if value.kind == "named":  # x = 1, y = 2
      pairs = sorted(zip(value.names, items, strict=True), key=repr)
      return Group("named", tuple(item for _, item in pairs), tuple(name for name, _ in pairs))
    ordered = value.kind not in ("list", "{}", "union")
    return Group(value.kind, tuple(items if ordered else sorted(items, key=repr)), value.names)
  return value


def _entire_text(completion: str) -> str | None:
  return completion.strip() or None


# By `Problem.kind`: the vote of a completion, None if it abstains. A kind without an entry has no
# majority vote. Programs have none: two are rarely equal as text, and only tests could tell which
# of them behave the same.
VOTES: dict[str, Callable[[str], Hashable | None]] = {
  "last_number": last_number,
  "countdown": _entire_text,
  "math": _math,
}
