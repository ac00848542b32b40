"""The problems of a run: what it trains on, and what it is evaluated on."""

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
  """Returns the problems of every training source, with the source's weight.

  Args:
    config: names the sources.
    worker: encodes the prompts, to measure their lengths.
    say: receives a line on what each source contains and what was left out.
    records: by name, the sources that a Python program passed as dicts.

  Raises:
    UserError: a source cannot be read, has more malformed rows and too long prompts than
      data.bad_rows, or has problems that nothing here can verify.
  """
  return [
    (_load_problems(config, worker, name, False, say, records), weight)
    for name, weight in config.train_sources
  ]


def held_out_problems(
  config: Config,
  worker: RolloutWorker,
  say: Callable[[str], None] = lambda line: None,
  records: Mapping[str, Loaded] = NO_RECORDS,
) -> list[Problem]:
  """Returns the problems to evaluate on: the same for every seed and every run.

  Takes and raises what `training_problems` does.
  """
  problems = _load_problems(config, worker, config.eval_name, True, say, records)
  if config.eval_task is None and len(problems) > config.eval.problems:
    say(f"{config.eval.problems} of them are evaluated (eval.problems)")
  return fixed_sample(problems, config.eval.problems)


def eval_label(config: Config) -> str:
  """Returns the name of the evaluation in metrics: a task, or a file without folder and ending."""
  name = config.eval_name
  if name.startswith(RECORDS):
    return name.rsplit(":", 1)[-1]
  if name.startswith(("hf:", "tfds:")):
    return name.replace(":", "_").replace("/", "_")
  return Path(name).name.split(".")[0]


def _load_problems(
  config: Config,
  worker: RolloutWorker,
  name: str,
  held_out: bool,
  say: Callable[[str], None],
  records: Mapping[str, Loaded],
) -> Problems:
  data = config.data
  if name in TASKS:
    task = make_task(name, data.terms, data.largest)
    return TaskPart(task, task.held_out_ids if held_out else task.train_ids)
  loaded = records[name] if name in records else _load(name, data.fields, data.bad_rows)
  fits = [len(worker.encode(problem)) <= data.max_prompt_tokens for problem in loaded.problems]
  fitting = list(itertools.compress(loaded.problems, fits))
  too_long = len(loaded.problems) - len(fitting)
  first = f" (first {loaded.problems[fits.index(False)].id})" if too_long else ""
  if len(loaded.bad) + too_long > data.bad_rows:
    raise UserError(
      f"{name!r}: {too_long} of {len(loaded.problems)} prompts{first} are over "
      f"data.max_prompt_tokens = {data.max_prompt_tokens}, and {len(loaded.bad)} rows are "
      f"malformed; data.bad_rows = {data.bad_rows} are allowed; raise one of the two"
    )
  if not config.reward.verifier:
    _check_kinds(config, name, fitting, say)
  if not fitting:
    raise UserError(
      f"{name!r} holds no problem within data.max_prompt_tokens = {data.max_prompt_tokens}"
    )
  say(loaded.summary(name) + (f", {too_long} too long{first}" if too_long else ""))
  return fitting


def _check_kinds(
  config: Config, name: str, problems: Sequence[Problem], say: Callable[[str], None]
) -> None:
  """Refuses problems that nothing here can verify."""
  for problem in problems:
    if problem.kind not in VERIFIERS:
      raise UserError(
        f"{name!r}: problem {problem.id} is of kind {problem.kind!r}, which has no verifier; "
        f"valid are {', '.join(VERIFIERS)}"
      )
  if any(problem.kind == "code" for problem in problems) and (missing := sandbox_problem()):
    if not config.reward.unsandboxed:
      raise UserError(f"{name!r} holds programs to run, and there is no sandbox here: {missing}")
    say(
      "DANGER: reward.unsandboxed is set and there is no sandbox here: "
      "programs of the model run as you, with access to your files and network"
    )


@functools.lru_cache(maxsize=8)
def _load(name: str, fields: str, bad_rows: int) -> Loaded:
  return load_source(name, fields, bad_rows)
