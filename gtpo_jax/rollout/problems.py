"""A run's problems: what it learns from, and what it is evaluated on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gtpo_jax.config import Config
from gtpo_jax.data.pipeline import fixed_sample
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.data.sources import RECORDS, Loaded, load_source
from gtpo_jax.data.tasks import TASKS, TaskPart, make_task
from gtpo_jax.rewards import VERIFIERS, sandbox_problem
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError

NO_RECORDS: Mapping[str, Loaded] = {}


def training_problems(
  config: Config,
  worker: RolloutWorker,
  say: Callable[[str], None] = lambda line: None,
  records: Mapping[str, Loaded] = NO_RECORDS,
) -> list[tuple[Problems, float]]:
  """Every source that is learned from, with its weight; what a source holds, and what was left out of it, is said.

  `records` holds, by name, the sources that were handed over.

  Raises:
    UserError: a source that cannot be read, or with more malformed rows and too long prompts than data.bad_rows; or a reward function
      that cannot be imported.
  """
  return [
    (_problems(config, worker, name, False, say, records), weight)
    for name, weight in config.train_sources
  ]


def held_out_problems(
  config: Config,
  worker: RolloutWorker,
  say: Callable[[str], None] = lambda line: None,
  records: Mapping[str, Loaded] = NO_RECORDS,
) -> list[Problem]:
  """The problems that are evaluated: the same for every seed and every run.

  Raises:
    UserError: as `training_problems`.
  """
  problems = _problems(config, worker, config.eval_name, True, say, records)
  if config.eval_task is None and len(problems) > config.eval.problems:
    say(f"{config.eval.problems} of them are evaluated (eval.problems)")
  return fixed_sample(problems, config.eval.problems)


def eval_label(config: Config) -> str:
  """What is evaluated, as the names of metrics say it: a task, or a file without its folder and ending."""
  name = config.eval_name
  if name.startswith(RECORDS):
    return name.rsplit(":", 1)[-1]
  return (
    name.replace(":", "_").replace("/", "_")
    if name.startswith(("hf:", "tfds:"))
    else Path(name).name.split(".")[0]
  )


def _problems(
  config: Config,
  worker: RolloutWorker,
  name: str,
  held_out: bool,
  say: Callable[[str], None],
  records: Mapping[str, Loaded],
) -> Problems:
  data = config.data
  reward_manager = worker.reward_manager
  if name in TASKS:
    task = make_task(name, data.terms, data.largest)
    return TaskPart(task, task.held_out_ids if held_out else task.train_ids)
  loaded = records[name] if name in records else _load(name, data.fields, data.bad_rows)
  fits = [len(worker.encode(problem)) <= data.max_prompt_tokens for problem in loaded.problems]
  fitting = list(itertools.compress(loaded.problems, fits))
  long = len(loaded.problems) - len(fitting)
  first = f" (first {loaded.problems[fits.index(False)].id})" if long else ""
  if len(loaded.bad) + long > data.bad_rows:
    raise UserError(
      f"{name!r}: {long} of {len(loaded.problems)} prompts{first} are over data.max_prompt_tokens = "
      f"{data.max_prompt_tokens}, and {len(loaded.bad)} rows malformed; data.bad_rows = {data.bad_rows} allowed; "
      f"raise one of the two"
    )
  if not reward_manager.verifier:
    _check_kinds(config, name, fitting, say)
  if not fitting:
    raise UserError(
      f"{name!r} holds no problem within data.max_prompt_tokens = {data.max_prompt_tokens}"
    )
  say(loaded.summary(name) + (f", {long} too long{first}" if long else ""))
  return fitting


def _check_kinds(
  config: Config, name: str, problems: Sequence[Problem], say: Callable[[str], None]
) -> None:
  """Refuses problems that nothing here can judge."""
  for problem in problems:
    if problem.kind not in VERIFIERS:
      raise UserError(
        f"{name!r}: problem {problem.id} is of kind {problem.kind!r}, for which there is no verifier; valid are "
        f"{', '.join(VERIFIERS)}"
      )
  if any(problem.kind == "code" for problem in problems) and (missing := sandbox_problem()):
    if not config.reward.unsandboxed:
      raise UserError(f"{name!r} holds programs to be run, and there is no sandbox here: {missing}")
    say(
      "DANGER: reward.unsandboxed is set and there is no sandbox here: programs of the model run as you, on your files and network"
    )


@functools.lru_cache(maxsize=8)
def _load(name: str, fields: str, bad_rows: int) -> Loaded:
  return load_source(name, fields, bad_rows)
