"""What a run depends on besides its config, and must find again when it is taken up: the contents of its data, its frozen policies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.runtime.distributed import broadcast_from_first
from gtpo_jax.runtime.errors import UserError


def identity_of(
  config: Config,
  problems: Sequence[tuple[Problems, float]],
  held_out: Sequence[Problem],
  frozen: Mapping[str, str],
) -> dict[str, str]:
  """By the name of each thing, what it is: kept with each checkpoint. The synthetic tasks are what the config says, and have no part.

  Args:
    config: of the run.
    problems: of `training_problems`.
    held_out: of `held_out_problems`.
    frozen: the digests of the frozen policies, by their paths' names.
  """
  sources = [
    (f"data.train {name!r}", part)
    for (name, _), (part, _) in zip(config.train_sources, problems, strict=True)
    if isinstance(part, list)
  ]
  if config.eval_task is None:
    sources.append((f"data.eval {config.eval_name!r}", held_out))
  return {name: f"{len(part)} problems, sha256 {_digest(part)}" for name, part in sources} | dict(
    frozen
  )


def check_identity(
  then: Mapping[str, str], now: Mapping[str, str], accept: bool, say: Callable[[str], None]
) -> None:
  """Refuses to go on with other data or policies than a run began with; with `accept`, says so and goes on.

  Raises:
    UserError: something has changed, or is not what it is for the first process; the message says what, from what and to what.
  """
  first = broadcast_from_first(lambda: dict(now))
  if differs := [name for name, what in now.items() if first[name] != what]:
    raise UserError(
      f"{differs[0]} is not the same everywhere: the first process has {first[differs[0]]}, this one {now[differs[0]]}"
    )
  changed = [
    f"{name} was {then[name]}, now {what}"
    for name, what in now.items()
    if then.get(name, what) != what
  ]
  if changed and not accept:
    raise UserError(
      f"what this run learns from has changed since it began ({'; '.join(changed)}); give it what it had, name another "
      f"workdir, or set checkpoint.accept_changes to go on all the same"
    )
  for what in changed:
    say(f"changed since this run began: {what}")


def _digest(problems: Sequence[Problem]) -> str:
  """16 hexadecimal digits over all that a problem is, in order."""
  digest = hashlib.sha256()
  for problem in problems:
    fields: list[Any] = [problem.id, problem.messages, problem.answer, problem.kind, problem.extra]
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode() + b"\n")
  return digest.hexdigest()[:16]
