"""What a completion answers, as a value that votes are counted by: completions of equal values give one answer."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from gtpo_jax.rewards.arithmetic import last_number
from gtpo_jax.rewards.math import MAX_CHARS, extract
from gtpo_jax.rewards.values import SPACE, Group, Number, Value, read


def _math(completion: str) -> Hashable | None:
  """The number, group of numbers or words that are boxed or stated; else their spelling. No SymPy: \\sqrt{8} and 2\\sqrt{2} are two."""
  answer = extract(completion)
  if not answer or not answer.strip() or len(answer) > MAX_CHARS:
    return None
  spelling, value = read(answer.strip())
  return (SPACE.sub("", spelling) or None) if value is None else _canonical(value)


def _canonical(value: Value) -> Value:
  """Without what does not matter: how many decimals were written, and the order of a set."""
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


def _whole(completion: str) -> str | None:
  return completion.strip() or None


# By kind. Programs have none: two are seldom the same, and which of them do the same is not known without tests.
VOTES: dict[str, Callable[[str], Hashable | None]] = {
  "last_number": last_number,
  "countdown": _whole,
  "math": _math,
}
