"""Validates the inputs of a run and loads its problems, before anything is written or compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gtpo_jax.api.inputs import Inputs
from gtpo_jax.config.mesh_choice import check_divisible, proposing_mesh
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.trackers import check_trackers
from gtpo_jax.rollout.frozen import check_frozen
from gtpo_jax.rollout.policies import check_weights
from gtpo_jax.rollout.problems import held_out_problems, training_problems
from gtpo_jax.rollout.scoring import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.warm_start import Teacher, check_prompts, make_teacher


class Parts(NamedTuple):
  """What a run works with.

  Attributes:
    worker: samples completions.
    reward_manager: scores them.
    teacher: what the warm start imitates; None if there is none.
    problems: the sources to train on, with their mixing weights.
    held_out: the problems to evaluate on.
  """

  worker: RolloutWorker
  reward_manager: RewardManager
  teacher: Teacher | None
  problems: Sequence[tuple[Problems, float]]
  held_out: Sequence[Problem]


def prepare(inputs: Inputs, display: Display) -> Parts:
  """Returns the parts of a run.

  Raises:
    UserError: the config cannot run here, or one of the inputs cannot be used.
  """
  config = inputs.config
  config.check_training()
  with proposing_mesh(config):
    worker = RolloutWorker(config)
    check_divisible(config, worker.model)
  reward_manager = RewardManager(config, inputs.reward)
  teacher = make_teacher(config, worker, display.say, inputs.records)
  check_prompts(config, worker, teacher)
  check_frozen(config, worker)
  check_weights(worker)
  check_trackers(config)
  reward_manager.probe_judge(display.say)
  problems = training_problems(config, worker, display.say, inputs.records)
  held_out = held_out_problems(config, worker, display.say, inputs.records)
  return Parts(worker, reward_manager, teacher, problems, held_out)
