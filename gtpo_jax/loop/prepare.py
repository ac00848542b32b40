"""Validates the inputs of a run and loads its problems, before anything is written or compiled."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from gtpo_jax.checkpoint.provenance import provenance_of
from gtpo_jax.checkpoint.workdir import recorded_date
from gtpo_jax.config import Config, with_date
from gtpo_jax.config.mesh_choice import check_divisible, proposing_mesh
from gtpo_jax.config.updates import fit_update
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.trackers import check_trackers
from gtpo_jax.loop.inputs import Inputs
from gtpo_jax.loop.warm_start import Teacher, check_prompts, make_teacher
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.rollout.frozen import check_frozen
from gtpo_jax.rollout.policies import check_weights
from gtpo_jax.rollout.problems import held_out_problems, training_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.chips import chip_of, usable_memory
from gtpo_jax.runtime.distributed import broadcast_from_first, least_of_processes
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.paths import storage_path

MAX_RANDOM_WIDTH = 512  # of presets that may start from random weights; wider ones learn nothing


class Parts(NamedTuple):
  """What a run works with."""

  worker: RolloutWorker  # samples completions
  reward_manager: RewardManager  # scores them
  teacher: Teacher | None  # what the warm start imitates; None if there is none
  problems: Sequence[tuple[Problems, float]]  # the sources to train on, with their mixing weights
  held_out: Sequence[Problem]  # the problems to evaluate on
  provenance: Mapping[str, str]  # what the data is, from `provenance_of`


def prepare(inputs: Inputs, display: Display) -> Parts:
  """Returns the parts of a run.

  Raises:
    UserError: the config cannot run here, or one of the inputs cannot be used.
  """
  config = inputs.config
  check_training(config)
  with proposing_mesh(config):
    worker = RolloutWorker(
      config, environment=inputs.environment, tools=inputs.tools, agent=inputs.agent
    )
    check_divisible(config, worker.model)
  if worker.episodes and (
    config.resolved_algorithm.recipe.continuations or config.log.continuations
  ):
    raise UserError(
      f"algorithm {config.algorithm.name!r} with log.continuations = {config.log.continuations} "
      "continues completions, which does not work with episodes; use another algorithm, or leave "
      "log.continuations out"
    )
  reward_manager = RewardManager(config, inputs.reward)
  teacher = make_teacher(config, worker, display.say, inputs.records)
  check_prompts(config, worker, teacher)
  check_frozen(config, worker)
  check_weights(worker)
  check_trackers(config)
  reward_manager.grader.probe(display.say)
  problems = training_problems(config, worker, display.say, inputs.records)
  held_out = held_out_problems(config, worker, display.say, inputs.records)
  provenance = provenance_of(config, problems, held_out)
  return Parts(worker, reward_manager, teacher, problems, held_out, provenance)


def fit_here(config: Config) -> Config:
  """Returns the config with the settings of the update that follow the memory of the devices."""
  devices = jax.local_devices()
  memory = least_of_processes(usable_memory(devices[0], len(devices)))
  with proposing_mesh(config):
    return fit_update(config, jax.devices(), chip_of(devices[0]), memory)


def dated(config: Config, workdir: str | Path | None) -> tuple[Config, bool]:
  """Returns the config with the day on which the run started, and whether that is today."""
  if config.data.date or not config.data.chat:
    return config, False
  folder = workdir and storage_path(workdir)
  recorded = broadcast_from_first(lambda: recorded_date(folder) if folder else "")
  today = broadcast_from_first(lambda: datetime.date.today().isoformat())
  return with_date(config, recorded or today), not recorded


def check_training(config: Config) -> None:
  """Raises UserError if a run could be evaluated with these settings, but not trained."""
  _check_start(config)
  _check_parts(config)


def _check_start(config: Config) -> None:
  m = config.model
  if m.path or m.random_weights or config.warm_start.steps:
    return
  if PRESETS[m.preset].width > MAX_RANDOM_WIDTH:
    raise UserError(
      f"model.preset = {m.preset!r} would start from random weights, which answer nothing "
      "correctly: set model.path to a Hugging Face folder or hub id with weights, or "
      "model.random_weights=True to measure the speed only"
    )


def _check_parts(config: Config) -> None:
  """Checks the reward of algorithms with entropy shaping, which shape `correct` themselves."""
  weights = dict(config.reward.weighted)
  if not config.resolved_algorithm.recipe.shaping.from_verdict or weights.get("correct") == 1:
    return
  name = config.algorithm.name
  parts = config.reward.parts
  if not weights.get("correct"):
    raise UserError(
      f"algorithm {name!r} shapes the reward part 'correct', which reward.parts = {parts!r} "
      f"lacks: use reward.parts=correct,{parts}, which adds the other parts to the shaped "
      "reward, or an algorithm without entropy shaping, such as grpo or dapo"
    )
  scaled = [f"{part}*{weight / weights['correct']:g}" for part, weight in weights.items()]
  raise UserError(
    f"algorithm {name!r} needs the reward part 'correct' to have weight 1, got {parts!r}; scale "
    f"the other parts instead: reward.parts={','.join(scaled)}"
  )
