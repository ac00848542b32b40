"""A small run with a random policy, for the tests of batches and of frozen policies."""

import jax
import numpy as np
import pytest
from toys import small_run

from gtpo_jax.models.params import init_params
from gtpo_jax.rewards import VERIFIERS
from gtpo_jax.rollout.collector import Collector
from gtpo_jax.rollout.frozen import FrozenPolicies
from gtpo_jax.rollout.problems import training_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker

N = 8
G = 4
T = 14


def config_of(name="dapo", **changes):
  common = {"steps": 3, "checkpoint.every": 1, "checkpoint.keep": 5, "algorithm.name": name}
  common |= {"batch.prompts": N, "batch.group": G, "sampling.max_tokens": T}
  if name == "dapo_mixed":
    common["algorithm.guide_completions"] = 1
  return small_run(**{**common, **changes})


@pytest.fixture(autouse=True)
def coins(monkeypatch):
  """A verifier that a random model passes about half of the time: even lengths are correct.

  Completions that are cut off are wrong in any case.
  """
  monkeypatch.setitem(
    VERIFIERS, "last_number", lambda completions, *_: [len(text) % 2 == 0 for text in completions]
  )


_workers = {}


def random_worker(config=None):
  """Returns a worker and random parameters; some of its completions end by themselves.

  Configs that differ only in what a worker does not read share it, with its compiled programs.
  """
  c = config or config_of()
  read = (c.model, c.mesh, c.data, c.engine_config, c.sampling_demand)
  read += (c.sampling.max_tokens, c.sampling.stop, c.teacher)
  if read not in _workers:
    worker = RolloutWorker(c)
    _workers[read] = worker, init_params(worker.model, jax.random.key(3))
  return _workers[read]


NONE = FrozenPolicies(None, None, {}, {})


def make_collector(config, frozen=NONE, steps=0):
  worker, _ = random_worker(config)
  problems = training_problems(config, worker)
  return Collector(config, worker, RewardManager(config), problems, frozen, steps)


def collect(config, steps, frozen=NONE, collector=None, said=None, first=0):
  _, params = random_worker(config)
  collector = collector or make_collector(config, frozen)
  return collector, [
    collector.collect(params, step, (said if said is not None else []).append)
    for step in range(first, first + steps)
  ]


def contrast(batch):
  return batch.correct.any(1) & ~batch.correct.all(1)


def host(batch):
  return jax.device_get((batch.rollouts, batch.rewards))


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)
