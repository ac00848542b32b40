"""Agents that are in flight when a step ends: what they were told, by which policy, and when."""

import asyncio
import dataclasses
import functools
import random

import jax
import numpy as np
import pytest
from experience_cases import NONE, N, coins, config_of, host  # noqa: F401

from gtpo_jax.config import EnvSection
from gtpo_jax.models.params import init_params
from gtpo_jax.rollout.collector import Collector
from gtpo_jax.rollout.problems import training_problems
from gtpo_jax.rollout.sample import sample_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.turns import Turns
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.training.log_probs import make_scorer

DELAY_S = 0.03


async def slow(row, client, seed):
  """Three turns of one conversation; between two, a tool takes an exponential time."""
  messages = list(row["messages"])
  for _ in range(3):
    answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=12)
    await asyncio.sleep(random.expovariate(1 / DELAY_S))
    messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
  return len(answer.choices[0].message.content or "") % 2


def agent_config(staleness, **changes):
  settings = {"sampling.chunk": 4, "sampling.max_tokens": 96, "sampling.slots": 7}
  config = config_of("gtpo", **{**settings, "sampling.staleness": staleness, **changes})
  return dataclasses.replace(config, env=EnvSection(agent="somewhere:run", workers=64))


@functools.cache
def parts(config):
  worker = RolloutWorker(config, agent=slow)
  params = [init_params(worker.model, jax.random.key(seed)) for seed in range(3)]
  return worker, params


def make_collector(config):
  worker, _ = parts(config)
  return Collector(config, worker, RewardManager(config), training_problems(config, worker), NONE)


@pytest.fixture(scope="module")
def stale():
  """Eight steps, each under other parameters."""
  config = agent_config(1)
  collector = make_collector(config)
  _, params = parts(config)
  steps = [collector.collect(params[k % 3], k, print) for k in range(8)]
  kept = list(collector._kept)
  collector.discard()
  return config, steps, kept


@pytest.mark.slow
def test_groups_are_trained_on_once_and_in_time(stale):
  _, steps, kept = stale
  indices = [group.index for batch in steps for group in batch.groups]
  assert len(indices) == len(set(indices)) == 8 * N
  assert not set(indices) & {group.index for group in kept}
  begun = {*indices, *(group.index for group in kept)}
  assert begun == {divmod(k, N) for k in range(len(begun))}  # none was lost
  for version, batch in enumerate(steps):
    assert len(batch.groups) == N
    assert all(version - 1 <= group.version <= version for group in batch.groups)
    assert batch.metrics["staleness/max"] <= 1
    # Episodes are told of in the step that scores them; one may train on what the last has scored.
    assert batch.metrics.get("env/turns", 3) == 3 or batch.metrics["env/stop/max_tokens"] > 0
    assert batch.metrics["time/waiting"] >= batch.metrics["env/idle_share"] >= 0
  assert sum(batch.metrics["groups/unfinished"] for batch in steps) > 0
  assert sum(batch.metrics["tokens/read_again"] for batch in steps) > 0


@pytest.mark.slow
def test_every_token_has_the_policy_that_drew_it(stale):
  """The log-prob of each token is that under the parameters of its version, and no other's."""
  config, steps, _ = stale
  worker, params = parts(config)
  score = make_scorer(worker.model, 1.0, 1, 0)
  both = 0
  for version, batch in enumerate(steps):
    rollouts, _ = host(batch)
    for age in (0, 1):
      drawn = rollouts.mask & (rollouts.versions == version - age)
      log_probs = np.asarray(score(params[(version - age) % 3], batch.rollouts))
      np.testing.assert_allclose(rollouts.log_probs[drawn], log_probs[drawn], atol=2e-4)
    ages = version - rollouts.versions
    of_row = [set(ages[at][rollouts.mask[at]].tolist()) for at in np.ndindex(ages.shape[:2])]
    both += sum(ages == {0, 1} for ages in of_row)
  assert both > 0  # completions that two policies have drawn


def test_agents_begin_again_after_an_interruption(capsys):
  config = agent_config(1)
  collector = make_collector(config)
  _, params = parts(config)
  for version in range(3):
    collector.collect(params[0], version, print)
  saved = {name: np.array(x) for name, x in collector.leftovers().items()}
  kept = {group.index for group in collector._kept if group.rewards is None}
  assert kept and "again" not in capsys.readouterr().out
  collector._turns.discard()
  restored = make_collector(config)
  restored.restore(saved)
  batches = [restored.collect(params[0], version, print) for version in (3, 4)]
  names = ", ".join(f"{batch}/{row}" for batch, row in sorted(kept))
  assert f"their groups begin again: {names}\n" in capsys.readouterr().out
  for version, batch in enumerate(batches, 3):
    for group in batch.groups:
      assert group.version >= 3 or group.index not in kept
      assert version - group.version <= 1
  restored.discard()


@pytest.mark.slow
def test_an_evaluation_has_threads_of_its_own():
  """Agents in flight hold all threads of training, and wait for the policy meanwhile."""
  config = agent_config(1)
  collector = make_collector(config)
  worker, (policy, *_) = parts(config)
  for version in range(2):
    collector.collect(policy, version, print)
  turns = Turns(worker, 2, 0, worker.evaluated_episodes)
  problems = [group.problem for group in collector._kept[:2]]
  of_policy = worker.policy(policy)
  keys = worker.engine.completion_keys(jax.random.key(1), 2, 2)
  rows = sample_problems(turns, of_policy, problems, keys, config.sampling_params)
  assert all(completion.episode.turns for row in rows for completion in row)
  shared = worker.evaluated_episodes.rules
  assert shared.workers is not worker.episodes.rules.workers
  assert shared._endpoint.url != worker.episodes.rules._endpoint.url
  batch = collector.collect(policy, 2, print)  # what was in flight still is
  assert any(group.version < 2 for group in batch.groups)
  collector.discard()
