"""The problems of a run: what it trains on, and what it is evaluated on."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gtpo_jax.config import Config
from gtpo_jax.data.layouts import SHOWN_COLUMNS
from gtpo_jax.data.pipeline import fixed_sample
from gtpo_jax.data.readers import RECORDS
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.data.sources import Check, Loaded, hold_out, load_source, needs_of, too_many_bad
from gtpo_jax.data.tasks import TASKS, TaskPart, make_task
from gtpo_jax.rewards import gold_check, sandbox_problem
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError, did_you_mean
from gtpo_jax.runtime.files import printable

ALL = "all"  # the evaluation's name in metrics, if it has several sources
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
    UserError: a source cannot be read, has more malformed rows and overlong prompts than
      data.bad_rows allows, or has problems that cannot be verified here.
  """
  names = [name for name, _ in config.data.sources]
  return [
    (_labelled(_load_problems(config, worker, name, False, say, records), label), weight)
    for (name, weight), label in zip(config.data.sources, source_labels(names), strict=True)
  ]


def held_out_problems(
  config: Config,
  worker: RolloutWorker,
  say: Callable[[str], None] = lambda line: None,
  records: Mapping[str, Loaded] = NO_RECORDS,
) -> list[Problem]:
  """Returns the problems to evaluate on: the same for every seed and every run.

  Arguments and errors are as in `training_problems`.
  """
  names = config.data.eval_names
  if len(names) == 1:
    problems = _load_problems(config, worker, names[0], True, say, records)
    if config.data.eval_task is None and len(problems) > config.eval.problems:
      say(f"{config.eval.problems} of them are evaluated (eval.problems)")
    return fixed_sample(problems, config.eval.problems)
  held_out = []
  for i, (name, label) in enumerate(zip(names, source_labels(names), strict=True)):
    problems = _load_problems(config, worker, name, True, say, records)
    share = config.eval.problems // len(names) + (i < config.eval.problems % len(names))
    held_out += fixed_sample(_labelled(problems, label), share)
  say(f"{len(held_out)} problems of {len(names)} sources are evaluated (eval.problems)")
  return held_out


def eval_label(config: Config) -> str:
  """Returns the evaluation's name in metrics: its source's label, or "all" for several sources."""
  names = config.data.eval_names
  return ALL if len(names) > 1 else source_label(names[0])


def source_labels(names: Sequence[str]) -> list[str]:
  """Returns the label of each source in metrics; "" if there is only one, which needs none.

  Of sources with the same label, such as two difficulties of a task, the later ones are numbered.
  """
  if len(names) == 1:
    return [""]
  labels = [source_label(name) for name in names]
  earlier = [labels[:i].count(label) for i, label in enumerate(labels)]
  return [
    f"{label}-{count + 1}" if count else label for label, count in zip(labels, earlier, strict=True)
  ]


def _labelled(problems: Problems, label: str) -> Problems:
  if not label:
    return problems
  if isinstance(problems, TaskPart):
    return dataclasses.replace(problems, source=label)
  return [dataclasses.replace(problem, source=label) for problem in problems]


def source_label(name: str) -> str:
  """Returns a source's name in metrics: a task, or a file without folder and extension."""
  if name.startswith(RECORDS):
    return name.rsplit(":", 1)[-1]
  if name.startswith("rg:"):
    return name.partition("?")[0]
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
    task = make_task(name, data.terms, data.largest, data.filler)
    if worker.episodes is None and (needs := getattr(task, "needs", "")):
      raise UserError(f"the task {name!r} has several turns: set {needs}")
    return TaskPart(task, task.held_out_ids if held_out else task.train_ids)
  check = None if config.reward.replaces_verifiers else gold_check(config.reward.math_rule)
  needs = needs_of(config.env.opens, config.reward.needs_answer)
  loaded = records.get(name) or _load(name, data.fields, data.bad_rows, check, needs)
  if not data.eval:
    train, rest = hold_out(loaded, repr(name))
    loaded = rest if held_out else train
  fitting, too_long, bad = _measure(config, worker, loaded)
  _say_rendered(worker, name, fitting, say)
  first = f" (first {too_long[0]})" if too_long else ""
  if len(bad) + len(too_long) > data.bad_rows:
    raise UserError(
      f"{name!r}: {len(too_long)} of {len(loaded.problems)} prompts{first} are over "
      f"data.max_prompt_tokens = {data.max_prompt_tokens}, and {len(bad)} rows are "
      f"malformed, but data.bad_rows = {data.bad_rows}; raise one of these limits"
    )
  if not config.reward.replaces_verifiers:
    _check_sandbox(config, name, fitting, say)
  if not fitting:
    raise UserError(
      f"{name!r} has no problem with a prompt within data.max_prompt_tokens = "
      f"{data.max_prompt_tokens}"
    )
  note = "" if config.reward.replaces_verifiers else loaded.note
  unread = () if config.env.opens or config.reward.reads_columns else loaded.unread
  shown = f"{name} (a tenth, held out)" if held_out and not data.eval else name
  if config.reward.verifier and not (held_out or config.env.opens):
    _say_no_answers(name, loaded, say)
  summary = dataclasses.replace(loaded, bad=bad, note=note, unread=unread).summary(shown)
  say(summary + (f", {len(too_long)} too long{first}" if too_long else ""))
  return fitting


def _measure(
  config: Config, worker: RolloutWorker, loaded: Loaded
) -> tuple[list[Problem], list[str], tuple[str, ...]]:
  """Encodes the prompts of a source.

  Returns:
    The problems whose prompts are short enough, the locations of the others, and the
    malformed rows. A conversation that the chat template does not accept is a malformed row.
  """
  fitting = []
  too_long = []
  bad = list(loaded.bad)
  for problem in loaded.problems:
    if config.env.opens and not problem.messages[-1]["content"]:  # it comes later
      fitting.append(problem)
      continue
    try:
      length = len(worker.encode(problem))
      if config.teacher.prompt:
        worker.encode_for_teacher(problem)
    except UserError as error:
      bad.append(f"{problem.location}: {error}")
      if len(bad) > config.data.bad_rows:
        raise too_many_bad(bad, config.data.bad_rows) from error
      continue
    if length > config.data.max_prompt_tokens:
      too_long.append(problem.location)
    else:
      fitting.append(problem)
  return fitting, too_long, tuple(bad)


def _say_no_answers(name: str, loaded: Loaded, say: Callable[[str], None]) -> None:
  """Says that a function of the user gets no answers, which many functions accept in silence."""
  if not any(problem.answer for problem in loaded.problems):
    columns = ", ".join(map(printable, loaded.columns))[:SHOWN_COLUMNS]
    say(
      f"warning: {name}: no row has an answer, so the reward function gets empty ones (columns: "
      f"{columns}{did_you_mean('answer', loaded.columns)}); "
      "data.fields=prompt=COLUMN,answer=COLUMN names another column"
    )


def _say_rendered(
  worker: RolloutWorker, name: str, problems: Sequence[Problem], say: Callable[[str], None]
) -> None:
  """Says that prompts contain control tokens, as prompts do that were rendered beforehand."""
  tokens = re.compile("|".join(map(re.escape, worker.chat.template_tokens())) or "(?!)")
  rendered = [
    (problem.location, found[0])
    for problem in problems
    if (found := tokens.search(problem.messages[-1]["content"]))
  ]
  if rendered:
    location, token = rendered[0]
    say(
      f"{name}: {len(rendered)} prompt(s) contain control tokens, which stay plain characters "
      f"(first {location}: {token!r}); if they were rendered with a chat template, pass the "
      "messages instead, with data.chat=True"
    )


def _check_sandbox(
  config: Config, name: str, problems: Sequence[Problem], say: Callable[[str], None]
) -> None:
  """Rejects programs if they cannot be run safely here, unless the config allows it."""
  if any(problem.kind == "code" for problem in problems) and (missing := sandbox_problem()):
    if not config.reward.unsandboxed:
      raise UserError(f"{name!r} has programs to run, but there is no sandbox here: {missing}")
    say(
      "DANGER: reward.unsandboxed is set and there is no sandbox here: "
      "programs written by the model run as you, with access to your files and network"
    )


@functools.lru_cache(maxsize=8)
def _load(
  name: str, fields: str, bad_rows: int, check: Check | None, needs: tuple[str, ...]
) -> Loaded:
  return load_source(name, fields, bad_rows, check, needs)
