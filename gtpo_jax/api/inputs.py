"""What a Python program hands over itself: dicts instead of a source's name, a function instead of a verifier's."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from gtpo_jax.config import Config, freeze
from gtpo_jax.data.pipeline import fixed_sample
from gtpo_jax.data.records import Problem
from gtpo_jax.data.sources import RECORDS, Loaded, load_records
from gtpo_jax.rollout.scoring import RewardFunction
from gtpo_jax.runtime.errors import UserError

SHARE = 10  # one problem in so many is held out where no others are named
Records = Iterable[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Inputs:
  """What was handed over, as far as it was."""

  config: Config  # in which names stand for it
  reward: RewardFunction | None
  records: Mapping[str, Loaded]  # by name


def take(
  config: Config | Mapping[str, Any],
  reward: RewardFunction | None = None,
  data: Records | None = None,
  held_out: Records | None = None,
) -> Inputs:
  """Checks what was handed over, and names it in the config: a run's config.json says what it learned from.

  Args:
    config: a `Config`, or what `config.freeze` takes.
    reward: decides right and wrong, as `reward.verifier` names such a function.
    data: rows as a file has them, to learn from instead of `data.train`.
    held_out: rows to evaluate on instead of `data.eval`. Where neither is given, a tenth of `data` is held out.

  Raises:
    UserError: one of them cannot be used, or `data` is too little to hold any of it out.
  """
  if not isinstance(config, Config | ConfigDict | Mapping):
    raise UserError(
      f"config must be a config or nested dicts, got {config!r}; read a file with gtpo_jax.load_config(path)"
    )
  config = config if isinstance(config, Config) else freeze(config)
  section = config.data
  records = {}
  if data is not None:
    train = load_records(data, "data", section.fields, section.bad_rows)
    name = _name(train.problems)
    if held_out is None and (not section.eval or section.eval.startswith(RECORDS)):
      train, kept = _split(train)
      records[f"{name}:held_out"] = kept
      section = dataclasses.replace(section, eval=f"{name}:held_out")
    records[name] = train
    section = dataclasses.replace(section, train=name)
  if held_out is not None:
    kept = load_records(held_out, "held_out", section.fields, section.bad_rows)
    name = f"{_name(kept.problems)}:held_out"
    records[name] = kept
    section = dataclasses.replace(section, eval=name)
  judged = config.reward
  if reward is not None:
    judged = dataclasses.replace(judged, verifier=_check_reward(reward))
  return Inputs(dataclasses.replace(config, data=section, reward=judged), reward, records)


def _check_reward(reward: RewardFunction) -> str:
  """The name of a reward function, as `reward.verifier` writes it."""
  if not callable(reward):
    raise UserError(
      f"reward must be a function of (prompts, completions, answers, extras), got {reward!r}"
    )
  name = f"{getattr(reward, '__module__', '')}:{getattr(reward, '__qualname__', type(reward).__qualname__)}"
  try:
    inspect.signature(reward).bind([], [], [], [])
  except TypeError as error:
    raise UserError(
      f"reward function {name!r} must take (prompts, completions, answers, extras): {error}"
    ) from None
  except ValueError:
    pass  # a builtin that does not tell
  return name


def _name(problems: Sequence[Problem]) -> str:
  """A name that changes with the problems."""
  text = json.dumps(
    [[problem.messages, problem.answer, problem.kind, problem.extra] for problem in problems],
    default=str,
  )
  return f"{RECORDS}{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def _split(loaded: Loaded) -> tuple[Loaded, Loaded]:
  """The problems that are learned from, and the tenth that is held out, the same one every time."""
  count = max(len(loaded.problems) // SHARE, 1)
  if len(loaded.problems) == 1:
    raise UserError(
      "data holds 1 problem, of which none can be held out for evaluation; give more, or others as held_out"
    )
  kept = fixed_sample(loaded.problems, count)
  ids = {id(problem) for problem in kept}
  rest = tuple(problem for problem in loaded.problems if id(problem) not in ids)
  return dataclasses.replace(loaded, problems=rest), Loaded(tuple(kept), count, 0, ())
