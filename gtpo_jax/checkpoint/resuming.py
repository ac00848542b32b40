"""What may change in a config when its run resumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gtpo_jax.config import Config, difference

# Where a run computes, how long it runs and what it writes. These fields do not change what it
# computes, apart from the exceptions in `FIXED`.
MAY_CHANGE = (
  "steps",
  "mesh",
  "eval",
  "checkpoint",
  "guards",
  "log",
  "profile",
  "batch.micro_batches",
  "batch.head_chunk",
  "batch.pack",
  "model.random_weights",
  "model.remat",
  "model.attention",
  "sampling.slots",
  "sampling.chunk",
  "sampling.page_size",
  "sampling.cache_fraction",
  "sampling.warm_up",
  "reward.judge.concurrency",
  "reward.judge.timeout_s",
  "reward.judge.completion_timeout_s",
  "reward.judge.retries",
)


# What to do about a change, for fields that a user may not have changed knowingly.
ADVICE = {"model.compute_dtype": "set it to {old!r} to continue as before"}


class Fixed(NamedTuple):
  """Fields of `MAY_CHANGE` that may not change in some configs.

  Attributes:
    fields: their names.
    applies: whether the results of a run with this config depend on them.
    reason: why they do.
  """

  fields: tuple[str, ...]
  applies: Callable[[Config], bool]
  reason: str


FIXED = (
  Fixed(
    ("steps",),
    lambda config: config.optimizer.schedule != "constant",
    "the schedule of the learning rate depends on it",
  ),
  Fixed(
    ("sampling.slots", "sampling.chunk", "sampling.page_size", "sampling.cache_fraction"),
    lambda config: config.sampling.staleness > 0,
    "with sampling.staleness, it decides which completions end first",
  ),
)


def forbidden_changes(saved: Config, now: Config) -> list[str]:
  """Describes the differences with which `now` would not continue the run of `saved` exactly.

  Returns:
    A text for each field, such as "seed was 0, now 7".
  """
  return [
    f"{key} was {old!r}, now {new!r}{_explain(key, old, reason)}"
    for key, (old, new) in difference(saved, now).items()
    if (reason := _reason(key, saved)) is not None
  ]


def _explain(key: str, old: Any, reason: str) -> str:
  if advice := ADVICE.get(key):
    return f", {advice.format(old=old)}"
  return f", but {reason}" if reason else ""


def _reason(key: str, config: Config) -> str | None:
  """Returns why a field may not change, "" if this needs no reason, or None if it may change."""
  if not any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE):
    return ""
  applying = (fixed.reason for fixed in FIXED if key in fixed.fields and fixed.applies(config))
  return next(applying, None)
