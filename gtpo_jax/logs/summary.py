"""One-line summaries of a run for the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gtpo_jax.config import Config
from gtpo_jax.config.roofline import Expected, expected_seconds
from gtpo_jax.config.updates import describe_update
from gtpo_jax.logs.display import duration
from gtpo_jax.logs.profile import describe_compile_cache
from gtpo_jax.models.attention.causal import attention_kind
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.chips import Chip, chip_of

Row = Mapping[str, Any]  # one object of metrics.jsonl
FEW_MIXED = 0.1  # share of mixed groups below which a run is warned
MUCH = 0.2  # by which greedy completions are more accurate than sampled ones; share cut off
EASIER = (
  "use easier problems, a larger batch.group, another data.template or data.system, or a "
  "longer warm start from demonstrations (warm_start.steps)"
)
HARDER = "use harder problems, or a larger batch.group"


def describe_run(config: Config, worker: RolloutWorker) -> list[str]:
  """Returns the lines printed when a run begins."""
  model = worker.model
  devices = model.mesh.devices
  return [
    f"{devices.size} x {devices.flat[0].device_kind} in {jax.process_count()} process(es)",
    f"{config.algorithm.name} on {config.data.train}: {config.steps} steps of "
    f"{config.batch.prompts} prompts x {config.batch.group} completions, "
    f"model {config.model.path or config.model.preset}, mesh {dict(model.mesh.shape)}, "
    f"attention by {attention_kind(model.config, model.mesh)}",
    f"computing in {model.config.compute_dtype}, because {worker.compute_dtype_reason}; "
    f"weights in {model.config.param_dtype}",
    describe_update(config),
    f"sampling {worker.engine.describe()}",
    "each program is compiled when it is first needed: "
    "the first evaluation and the first steps take longest",
    describe_compile_cache(),
    *_cost_of_continuations(config),
    *_short_warm_up(config),
  ]


def expected_of(config: Config, worker: RolloutWorker, held_out: int) -> Expected | None:
  """Returns what the run is expected to take on its devices; None if they are not known.

  `held_out` is the number of problems that are evaluated.
  """
  device = worker.model.mesh.devices.flat[0]
  chip = Chip(0) if device.platform == "cpu" else chip_of(device)
  if chip is None:
    return None
  slots = worker.engine.programs.sizes.longest_at_once
  mesh = dict(worker.engine.model.mesh.shape)
  evaluation = dataclasses.replace(config.eval, problems=held_out)
  config = dataclasses.replace(config, eval=evaluation)
  return expected_seconds(config, worker.model.config, chip, mesh, slots)


def describe_expected(expected: Expected, config: Config, done: int = 0) -> str:
  """Returns one line about how long a run takes of which `done` steps are complete."""
  rest = "for the run" if done == 0 else "for the rest"
  return (
    f"expected: about {expected.step:.2g} s a step (sampling {expected.sample:.2g}, update "
    f"{expected.update:.2g}) and {duration(expected.rest(config, done))} {rest}, beside compiling, "
    f"from {expected.basis}; it may be off by a factor of {expected.factor:g}"
  )


def corrected(expected: Expected, config: Config, done: int, step_s: float) -> str:
  """Returns the same line for the time of a step that was measured, after some steps."""
  rest = expected.rest(config, done) * step_s / expected.step
  return f"measured: {step_s:.2g} s a step, so about {duration(rest)} for the rest of the run"


def _cost_of_continuations(config: Config) -> list[str]:
  """Says how many tokens continuations cost, if there are any, with cuts evenly spaced."""
  part = config.resolved_algorithm.recipe.continuations
  if not part:
    return []
  times = lambda cuts: 1 + part.continuations * (1 / config.batch.group + cuts / 2)
  return [
    f"{config.algorithm.name} draws {part.continuations} continuations of each prompt and at each "
    f"cut: about {times(1):.3g} times the tokens of grpo with one cut of each completion, "
    f"{times(4):.3g} times with four; continuations/tokens says how many it draws"
  ]


def _short_warm_up(config: Config) -> list[str]:
  """Says which learning rate is reached if the run or its warm start ends before the peak."""
  lines = []
  for name, section in (("", config), ("warm_start.", config.warm_start)):
    peak = section.optimizer.learning_rate
    warm_up = section.optimizer.warmup_steps
    if 0 < section.steps <= warm_up:
      reached = peak * (section.steps - 1) / warm_up
      lines.append(
        f"the learning rate only reaches {reached:.3g} of {name}optimizer.learning_rate = "
        f"{peak:g}, because {name}optimizer.warmup_steps = {warm_up} is not below {name}steps = "
        f"{section.steps}"
      )
  return lines


def base_model_name(config: Config) -> str:
  """Returns a name for the policy at step 0."""
  if config.warm_start.steps:
    return "warm-started base model"
  return "base model" if config.model.path else "random base model"


def evaluated_accuracy(row: Row) -> float | None:
  """Returns the mean@n of a row, for any n, or None if its step was not evaluated."""
  for key, value in row.items():
    if key.startswith("eval/") and "/mean@" in key:
      return value
  return None


def describe_evaluation(
  config: Config, step: int, metrics: Mapping[str, float], label: str, problems: int, seconds: float
) -> str:
  """Returns one line about an evaluation after `step` steps, of as many problems.

  `metrics` is from `Evaluation.metrics`, where the evaluation has the name `label`.
  """
  samples = config.eval.samples
  value = lambda key: metrics[f"eval/{label}/{key}"]
  policy = f"step {step}" if step else base_model_name(config)
  missing = value("no_verdict")
  no_verdict = f"{missing:.0f} without a verdict, " if missing else ""
  return (
    f"{policy}: held-out pass@1 {value(f'mean@{samples}'):.1%}, greedy {value('greedy'):.1%}, "
    f"pass@{samples} {value(f'pass@{samples}'):.1%} "
    f"({problems} problems x {samples} samples, {no_verdict}{seconds:.1f} s)"
  )


def describe_forecast(
  config: Config, share: float, most: float, accuracy: float, greedy: float, cut_off: float
) -> str:
  """Returns one line about how many groups will be mixed; a warning with advice if they are few.

  Args:
    config: the run's config.
    share: from `expected_mixed_share`.
    most: from `most_mixed`.
    accuracy: mean@n of the same evaluation.
    greedy: the accuracy of its greedy completions.
    cut_off: the share of its completions that were cut off.
  """
  group = config.batch.group
  if share >= FEW_MIXED:
    return (
      f"about {share:.0%} of the groups of {group} will have both correct and wrong completions"
    )
  advice = HARDER if accuracy > 0.5 else EASIER
  if greedy - accuracy > MUCH:
    advice = f"greedy decoding is right in {greedy:.0%}, so lower sampling.temperature, or {advice}"
  if cut_off > MUCH:
    advice = f"{cut_off:.0%} are cut off, so raise sampling.max_tokens, or {advice}"
  return (
    f"warning: about {share:.1%} of the groups of {group} (at most {most:.0%}) will have both "
    f"correct and wrong completions, and the others have nothing to compare: {advice}"
  )


def summarize(
  config: Config, rows: Sequence[Row], settings: Mapping[int, Mapping[str, Any] | None]
) -> str:
  """Returns one line with the time that a run took and, if evaluated, its gain in accuracy.

  Only evaluations with equal settings, which are given by step, are compared.
  """
  name = config.algorithm.name
  seconds = sum(row.get("time/step", 0.0) for row in rows)
  spent = f"{seconds:.0f} s of sampling, reward and update"
  accuracies = {row["step"]: evaluated_accuracy(row) for row in rows}
  evaluated = [(step, value) for step, value in accuracies.items() if value is not None]
  if not evaluated or evaluated[0][0] != 0:
    return f"{name}: {rows[-1]['step'] if rows else 0} steps; {spent}"
  _, before = evaluated[0]
  step, after = evaluated[-1]
  if settings.get(0) != settings.get(step):
    return (
      f"{name}: held-out pass@1 {after:.1%} after {step} steps, which cannot be compared with the "
      f"{base_model_name(config)}: {_changes(settings.get(0), settings.get(step))}; {spent}"
    )
  return (
    f"{name}: held-out pass@1 {before:.1%} ({base_model_name(config)}) -> {after:.1%} after {step} "
    f"steps, {100 * (after - before):+.1f} points; {spent}"
  )


def without_other_evaluations(
  rows: Sequence[Row], settings: Mapping[int, Mapping[str, Any] | None]
) -> list[Row]:
  """Returns rows without the evaluations whose settings, by step, differ from the last one's."""
  last = settings.get(max(settings, default=0))
  others = {step for step, of_step in settings.items() if of_step != last}
  is_kept = lambda row, key: row["step"] not in others or not key.startswith("eval/")
  return [{key: value for key, value in row.items() if is_kept(row, key)} for row in rows]


def _changes(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
  """Describes the difference between the settings of two evaluations."""
  if old is None or new is None:
    return "the settings of an evaluation are lost"
  changed = [key for key in new if old.get(key) != new[key]]
  return ", ".join(f"{key} was {old.get(key)!r}, then {new[key]!r}" for key in changed)
