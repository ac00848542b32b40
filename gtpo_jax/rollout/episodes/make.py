"""Makes the driver of what runs the episodes of a worker."""

from __future__ import annotations

from gtpo_jax.environments.runner import EpisodeRunner
from gtpo_jax.rollout.episodes.driver import EpisodeDriver
from gtpo_jax.rollout.worker import RolloutWorker


def make_driver(worker: RolloutWorker, size: int) -> EpisodeDriver:
  """Returns a driver for the environments of a worker, or for its agent.

  Args:
    worker: has the runner.
    size: completions of a group.
  """
  if isinstance(worker.runner, EpisodeRunner):
    return EpisodeDriver(worker.runner, size)
  from gtpo_jax.rollout.agents.driver import AgentDriver  # needs optional packages

  return AgentDriver(worker, size)
