"""Compiles the programs of a run before its first step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from gtpo_jax.config import Config
from gtpo_jax.config.workloads import GUIDE, run_workloads
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.profile import describe_compiles
from gtpo_jax.models.params import Params
from gtpo_jax.rollout.batch import Placement
from gtpo_jax.rollout.worker import Policy
from gtpo_jax.runtime.compiling import compile_all
from gtpo_jax.sampling.inventory import reachable, warm_up
from gtpo_jax.training.state import TrainState


def warm_up_sampling(
  config: Config, policies: tuple[Policy, Policy | None], held_out: int, display: Display
) -> None:
  """Compiles every program that sampling and evaluation may need.

  Args:
    config: the run's config.
    policies: the policy, and the guide if there is one.
    held_out: how many problems are evaluated.
    display: shows the progress.
  """
  policy, guide = policies
  workloads = run_workloads(config, held_out)
  guided = [workloads.pop(GUIDE)] if GUIDE in workloads else []
  sampled = [(policy, list(workloads.values()))]
  if guide:
    sampled.append((guide, guided))
  total = sum(len(reachable(policy.engine.programs, works)) for policy, works in sampled)
  numbers = itertools.count(1)
  with display.counting("programs of sampling and evaluation compiled", total) as count:
    for policy, of_policy in sampled:
      warm_up(policy.engine.programs, policy.params, of_policy, lambda: count(next(numbers)))
  display.say(describe_compiles())


def warm_up_training(
  update: Any, placement: Placement, state: TrainState, teacher: Sequence[Params], display: Display
) -> None:
  """Compiles the update, and the programs that score a batch before it, for every packing.

  Args:
    update: the jitted update.
    placement: places the batches.
    state: the state that the run starts from.
    teacher: further arguments of the update.
    display: shows the progress.
  """
  lowerings = placement.scoring_programs(state.params)
  lowerings += [functools.partial(update.lower, state, *x, *teacher) for x in placement.batches()]
  numbers = itertools.count(1)
  with display.counting("programs of the update compiled", len(lowerings)) as count:
    compile_all(lowerings, lambda: count(next(numbers)))
  display.say(describe_compiles())
