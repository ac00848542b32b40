"""The texts of judging: the message to the judge, and the grade in its reply."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gtpo_jax.runtime.errors import UserError

_PLACE = re.compile(r"\{(prompt|completion|other|answer|question|mark)\}")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
ROUNDING = 1e-9  # by which a grade may exceed the scale


class Texts(NamedTuple):
  """What a judge reads about one completion; `other` is what it is compared with, "" for none."""

  prompt: str
  completion: str
  answer: str
  other: str = ""


def render(template: str, texts: Texts, question: str) -> str:
  """Returns the message to the judge.

  All places are filled at once, so that a completion that contains "{answer}" stays as it is. The
  mark is a digest of the texts: a completion cannot contain its own.
  """
  content = "\0".join((*texts[:3], question, *filter(None, texts[3:])))
  mark = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]
  values = {**texts._asdict(), "question": question, "mark": mark}
  return _PLACE.sub(lambda match: values[match[1]], template)


def parse_scale(scale: str) -> Callable[[str], float | None]:
  """Parses `reward.judge.scale`.

  Returns:
    A function that maps the text of a grade to a reward in [0, 1], or to None if the scale does not
    have the grade.

  Raises:
    UserError: it is neither two numbers nor words with their rewards.
  """
  words = _words(scale)
  if words:
    return lambda grade: words.get(grade.strip().casefold())
  lowest, _, highest = scale.partition(":")
  ends = (_number(lowest), _number(highest))
  if None in ends or ends[0] == ends[1]:
    raise UserError(
      "reward.judge.scale must be two numbers, such as 0:10, or words with rewards from 0 to 1, "
      f"such as no=0,partly=0.5,yes=1; got {scale!r}"
    )
  return lambda grade: _share(grade, *ends)


def read_grade(reply: str, pattern: re.Pattern[str]) -> str | None:
  """Returns the text of the first group of the last match; None without a match."""
  grade = None
  for match in pattern.finditer(reply):
    grade = next((group for group in match.groups() if group is not None), grade)
  return grade


def _share(grade: str, lowest: float, highest: float) -> float | None:
  value = _number(grade)
  if value is None:
    return None
  share = (value - lowest) / (highest - lowest)
  inside = -ROUNDING <= share <= 1 + ROUNDING
  return min(max(share, 0.0), 1.0) if inside else None


def _words(scale: str) -> Mapping[str, float]:
  """Returns the words with their rewards; {} if the scale is anything else."""
  pairs = [part.rpartition("=") for part in scale.split(",")]
  rewards = [_number(reward) for _, _, reward in pairs]
  names = [name.strip().casefold() for name, _, _ in pairs]
  valid = all(names) and all(reward is not None and 0 <= reward <= 1 for reward in rewards)
  return dict(zip(names, rewards, strict=True)) if valid and len(set(names)) == len(names) else {}


def _number(text: str) -> float | None:
  """Returns a number; a comma before three digits separates thousands, any other one decimals."""
  text = text.strip()
  if _THOUSANDS.fullmatch(text):
    text = text.replace(",", "")
  try:
    value = float(text.replace(",", "."))
  except ValueError:
    return None
  return value if math.isfinite(value) else None


def pairs_of(count: int, opponents: int) -> list[tuple[int, int]]:
  """Returns the comparisons of a group, each as the completion in the first place and the other.

  Completion i is in the first place against each of the next `opponents` ones, of which the first
  follow the last. So each is equally often in the first and in the second place.

  Args:
    count: the number of completions.
    opponents: at most count - 1 are used.
  """
  distances = range(1, min(opponents, count - 1) + 1)
  return [(i, (i + distance) % count) for distance in distances for i in range(count)]


def win_rates(
  count: int, pairs: Sequence[tuple[int, int]], rewards: Sequence[float | None]
) -> list[float | None]:
  """Returns the mean reward of each completion over its comparisons.

  Args:
    count: the number of completions.
    pairs: the comparisons.
    rewards: what the completion in the first place got, from 0 to 1; the other one gets the rest.
      Comparisons with None are left out. A completion without any other has None.
  """
  won: list[list[float]] = [[] for _ in range(count)]
  for (first, second), reward in zip(pairs, rewards, strict=True):
    if reward is not None:
      won[first].append(reward)
      won[second].append(1 - reward)
  return [sum(values) / len(values) if values else None for values in won]
