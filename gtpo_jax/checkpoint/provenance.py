"""Provenance of a run: the contents of its data and the digests of its frozen policies.

They are not part of the config, but must be the same when a run resumes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gtpo_jax.checkpoint.integrity import DIGEST_DIGITS
from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.runtime.errors import UserError


def provenance_of(
  config: Config, problems: Sequence[tuple[Problems, float]], held_out: Sequence[Problem]
) -> dict[str, str]:
  """Returns a description of the data of a run by its name.

  Every regular checkpoint stores them, and the digests of the frozen policies.

  Synthetic tasks are omitted, because the config defines them completely.

  Args:
    config: the run's config.
    problems: the training problems of each source, with its weight, as returned by
      `training_problems`.
    held_out: the evaluation problems, as returned by `held_out_problems`.
  """
  sources = [
    (f"data.train {name!r}", part)
    for (name, _), (part, _) in zip(config.data.sources, problems, strict=True)
    if isinstance(part, list)
  ]
  if config.data.eval_task is None:
    # With another number of problems, others are evaluated, which a run may change.
    name = f"data.eval {config.data.eval_name!r} (eval.problems = {config.eval.problems})"
    sources.append((name, held_out))
  return {name: f"{len(part)} problems, sha256 {_digest(part)}" for name, part in sources}


def check_provenance(
  saved: Mapping[str, str], current: Mapping[str, str], accept: bool, say: Callable[[str], None]
) -> None:
  """Checks that a run resumes with the data and policies that it began with.

  Args:
    saved: the provenance stored with the checkpoint; empty for a new run.
    current: the provenance now.
    accept: report changes through `say` and continue.
    say: shows a message to the user.
  """
  changes = [
    f"{name} was {saved[name]}, now {value}"
    for name, value in current.items()
    if saved.get(name, value) != value
  ]
  if changes and not accept:
    raise UserError(
      f"the inputs of this run have changed since it began ({'; '.join(changes)}); restore them, "
      f"use another workdir, or set checkpoint.accept_changes to continue anyway"
    )
  for change in changes:
    say(f"changed since this run began: {change}")


def _digest(problems: Sequence[Problem]) -> str:
  """Returns the start of a SHA-256 over all fields of all problems, in order."""
  digest = hashlib.sha256()
  for problem in problems:
    fields: list[Any] = [problem.id, problem.messages, problem.answer, problem.kind, problem.extra]
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode() + b"\n")
  return digest.hexdigest()[:DIGEST_DIGITS]
