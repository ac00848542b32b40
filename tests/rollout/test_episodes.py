"""Episodes in the collector, with a random policy, and an environment that depends on its turns."""

import dataclasses
import functools
import random
import threading
import time
import zlib

import jax
import numpy as np
import pytest
from experience_cases import NONE, N, assert_equal, coins, config_of, host  # noqa: F401
from toys import TIMING

import gtpo_jax
from gtpo_jax.config import EnvSection
from gtpo_jax.environments.turns import Step
from gtpo_jax.loop.policy import TrainedPolicy
from gtpo_jax.models.params import init_params
from gtpo_jax.rollout import turns
from gtpo_jax.rollout.collector import Collector
from gtpo_jax.rollout.problems import training_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.signals import Stopped

pytestmark = pytest.mark.slow
JAX = tuple(map(int, jax.__version__.split(".")[:2]))
MOST_TURNS = 4
CHUNK = {"sampling.chunk": 4, "sampling.max_tokens": 40, "data.max_prompt_tokens": 32}
CHUNK |= {"sampling.stop": tuple("0123456789")}  # a random policy rarely draws a stop token


class Oracle:
  """Says a number that depends on the turns, and ends after some of them."""

  open = 0
  delay_s = 0.0
  lock = threading.Lock()

  def reset(self, row, seed):
    self.turns = []
    with self.lock:
      type(self).open += 1
    return f" {seed % 7}"

  def step(self, turn):
    if self.delay_s:
      time.sleep(random.expovariate(1 / self.delay_s))
    self.turns.append(turn.text)
    code = zlib.crc32("/".join(self.turns).encode())
    done = code % 4 == 0
    step = {"reward": code % 5 / 4, "done": done, "correct": code % 3 > 0 if done else None}
    return Step(f"{code % 100}", **step)

  def close(self):
    with self.lock:
      type(self).open -= 1


class Slow(Oracle):
  """The same, with exponential times."""

  delay_s = 0.02


class AtOnce(Oracle):
  """Ends after one turn, whose text the problem's verifier judges."""

  def reset(self, row, seed):
    super().reset(row, seed)

  def step(self, turn):
    return Step(done=True)


def env_config(staleness=0, **changes):
  config = config_of("gtpo", **{**CHUNK, "sampling.staleness": staleness, **changes})
  return dataclasses.replace(
    config, env=EnvSection(make="somewhere:Oracle", max_turns=MOST_TURNS, workers=64)
  )


@functools.cache
def worker_for(config, environment):
  """Workers share the compiled programs of equal configs."""
  config = config if environment else dataclasses.replace(config, env=EnvSection())
  worker = RolloutWorker(config, environment=environment)
  return worker, init_params(worker.model, jax.random.key(3))


def make_collector(config, environment=Oracle):
  worker, _ = worker_for(config, environment)
  problems = training_problems(config, worker)
  return Collector(config, worker, RewardManager(config), problems, NONE)


def collect(config, steps, environment=Oracle, collector=None, first=0):
  _, params = worker_for(config, environment)
  collector = collector or make_collector(config, environment)
  batches = [collector.collect(params, step, print) for step in range(first, first + steps)]
  return collector, batches


def rows_of(batch):
  rollouts, rewards = host(batch)
  return {
    problem.id: (rollouts.tokens[i], rollouts.present[i], rollouts.mask[i], rewards.correct[i])
    for i, problem in enumerate(batch.problems)
  }


def wait_until_closed(kind, config):
  """An environment that was called when its group was discarded is closed by the next poll."""
  episodes = worker_for(config, kind)[0].episodes
  until = time.monotonic() + 5
  while kind.open and time.monotonic() < until:
    assert not episodes.poll()
    time.sleep(0.01)
  assert kind.open == 0


@functools.cache
def expected():
  return collect(env_config(), 2)[1]


def test_completions_contain_what_their_environments_have_said():
  config = env_config()
  worker, _ = worker_for(config, Oracle)
  several = 0
  for batch in expected():
    rollouts = host(batch)[0]
    for i, j in np.ndindex(rollouts.finished.shape):
      length = int(rollouts.present[i, j].sum())
      mask = rollouts.mask[i, j, :length]
      runs = np.split(rollouts.tokens[i, j, :length], np.flatnonzero(np.diff(mask.astype(int))) + 1)
      assert mask[0] and mask[-1] and not rollouts.present[i, j, length:].any()
      oracle = Oracle()
      oracle.turns = []
      for turn, observation in zip(runs[::2], runs[1::2], strict=False):
        text = worker.stop_strings.cut(worker.chat.decode([turn])[0]).strip()
        oracle.turns.append(text)
        code = zlib.crc32("/".join(oracle.turns).encode())
        message = {"role": "user", "content": f"{code % 100}"}
        ended = turn[-1] in worker.chat.stop
        tokens = worker.episodes.rules.tokens.observation([message], ended)
        np.testing.assert_array_equal(observation, tokens)
        several += 1
      assert len(runs) <= 2 * MOST_TURNS - 1
    assert 0 < batch.correct.mean() < 1
    assert batch.metrics["tokens/read_again"] > 0 and batch.metrics["env/idle_share"] < 1
  assert several > N
  wait_until_closed(Oracle, config)


@pytest.mark.parametrize("slots", [pytest.param(0, marks=pytest.mark.manual), 3])
def test_the_time_that_tools_take_does_not_matter(slots):
  config = env_config(**{"sampling.slots": slots})
  _, batches = collect(config, 2, Slow)
  for batch, other in zip(batches, expected(), strict=True):
    for name, row in rows_of(batch).items():
      for x, y in zip(row, rows_of(other)[name], strict=True):
        np.testing.assert_array_equal(x, y)
  wait_until_closed(Slow, config)


def test_an_environment_that_ends_at_once_changes_nothing():
  config = env_config()
  plain = dataclasses.replace(config, env=EnvSection())
  _, (batch,) = collect(config, 1, AtOnce)
  _, (other,) = collect(plain, 1, None)
  assert_equal(host(batch)[0].replace(gaps=False), host(other)[0])
  cut = worker_for(plain, None)[0].stop_strings.cut  # a transcript has what has ended turns
  assert [[cut(text) for text in row] for row in batch.texts] == other.texts


def even(prompts, completions, answers, extras):
  return [len(text.strip()) % 2 == 0 for text in completions]


@pytest.mark.parametrize(
  "algorithm",
  [
    pytest.param("grpo", marks=pytest.mark.manual),
    # With environments, the update of gtpo is another program, which also looks for gaps.
    pytest.param(
      "gtpo",
      marks=[
        pytest.mark.manual,
        pytest.mark.skipif(JAX >= (0, 12), reason="jax 0.12 rounds it otherwise"),
      ],
    ),
  ],
)
def test_a_run_whose_environments_end_at_once_is_the_same(algorithm):
  config = config_of(algorithm, **CHUNK, steps=2)
  run = gtpo_jax.train(config, environment=AtOnce, reward=even)
  other = gtpo_jax.train(config, reward=even)
  jax.tree.map(np.testing.assert_array_equal, run.policy.params, other.policy.params)
  assert len(run.history) == len(other.history)
  for row, expected in zip(run.history, other.history, strict=True):
    for name, value in expected.items():
      if not name.startswith(TIMING):
        np.testing.assert_equal(row[name], value, err_msg=name)
    assert expected["step"] == 0 or 0 < row["reward/mean"] < 1


def test_a_policy_plays_episodes():
  worker, params = worker_for(env_config(), Oracle)
  texts = TrainedPolicy(worker, params).sample("1+2:", n=3, seed=1, row={"answer": "3"})
  assert len(texts) == 3 and any("user" in text and "assistant" in text for text in texts)
  assert texts == TrainedPolicy(worker, params).sample("1+2:", n=3, seed=1, row={"answer": "3"})
  plain = TrainedPolicy(*worker_for(env_config(), None))
  with pytest.raises(UserError, match="row is for an environment"):
    plain.sample("1+2:", row={"answer": "3"})
  wait_until_closed(Oracle, env_config())


def test_a_stopped_step_is_sampled_again_and_closes_its_environments():
  config = env_config()
  collector = make_collector(config)
  _, params = worker_for(config, Oracle)
  polls = iter([False] * 3 + [True])
  with pytest.raises(Stopped):
    collector.collect(params, 0, print, lambda: next(polls))
  wait_until_closed(Oracle, config)
  (batch,) = collect(config, 1, collector=collector)[1]
  for name, row in rows_of(batch).items():
    np.testing.assert_array_equal(row[0], rows_of(expected()[0])[name][0])


# --- groups that are sampled over several steps ---


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_restored_collector_goes_on_alike(monkeypatch, staleness):
  """The environments of unfinished groups are made again, and repeat their turns.

  Dynamic sampling keeps complete groups, with their episodes.
  """
  monkeypatch.setattr(turns, "GRACE_S", 5.0)  # turns are answered at the same time in all runs
  dynamic = {"algorithm.dynamic_sampling": not staleness}
  config = env_config(staleness, **{"sampling.slots": 7}, **dynamic)
  collector, _ = collect(config, 3)
  saved = {name: np.array(x) for name, x in collector.leftovers().items()}
  complete = saved["complete"][: saved["count"]]
  assert len(complete) and (complete == (not staleness)).all()
  snapshots = saved["snapshots"].tobytes().replace(b"\\", b"")
  assert (b'"turns": [[[' if staleness else b'"states": [') in snapshots
  _, batches = collect(config, 2, collector=collector, first=3)
  collector._turns.discard()
  restored = make_collector(config)
  restored.restore(saved)
  _, others = collect(config, 2, collector=restored, first=3)
  for batch, other in zip(batches, others, strict=True):
    assert_equal(host(batch), host(other))
    assert batch.texts == other.texts
    played = lambda x: [
      [dataclasses.replace(y, seconds=0.0) for y in group] for group in x.episodes
    ]
    assert played(batch) == played(other)
  restored._turns.discard()
  wait_until_closed(Oracle, config)


def test_a_group_whose_environments_differ_begins_again(monkeypatch, capsys):
  config = env_config(1, **{"sampling.slots": 7})
  collector, _ = collect(config, 2)
  saved = {name: np.array(x) for name, x in collector.leftovers().items()}
  unfinished = int((~saved["complete"][: saved["count"]]).sum())
  assert unfinished
  collector._turns.discard()
  said = Oracle.reset
  monkeypatch.setattr(Oracle, "reset", lambda self, row, seed: said(self, row, seed) + " ")
  restored = make_collector(config)
  restored.restore(saved)
  _, (batch,) = collect(config, 1, collector=restored, first=2)
  assert capsys.readouterr().out.count("returned something else") == unfinished
  assert np.asarray(batch.rollouts.present).any(-1).all()
  restored._turns.discard()
