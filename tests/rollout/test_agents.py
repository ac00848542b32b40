"""Agents in the collector, with a random policy: what they asked for is what is trained on."""

import asyncio
import dataclasses
import functools
import random
import time

import jax
import numpy as np
import pytest
from experience_cases import NONE, N, coins, config_of, host  # noqa: F401

from gtpo_jax import environments
from gtpo_jax.config import EnvSection
from gtpo_jax.models.params import init_params
from gtpo_jax.rollout.collector import Collector
from gtpo_jax.rollout.problems import training_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.training.log_probs import make_scorer

SETTINGS = {"sampling.chunk": 4, "sampling.max_tokens": 160, "sampling.slots": 0}
USER = {"role": "user", "content": "more"}
SEEN: dict[str, list[tuple[list[int], list[int]]]] = {}  # the (prompt, answer) of each request


async def ask(client, messages, name=None, most=6, **settings):
  answer = await client.chat.completions.create(
    model="any",
    messages=messages,
    max_tokens=most,
    extra_body={"return_token_ids": True},
    **settings,
  )
  if name is not None:
    SEEN.setdefault(name, []).append((answer.prompt_token_ids, answer.choices[0].token_ids))
  return answer.choices[0].message


async def talk(row, client, seed, delay_s=0.0):
  """A conversation of two turns, a summary of it, and two sub-agents at the same time."""
  wait = lambda: asyncio.sleep(random.expovariate(1 / delay_s) if delay_s else 0)
  messages = [{"role": "system", "content": "play"}, *row["messages"]]
  first = await ask(client, messages, client.api_key)
  await wait()
  second = await ask(client, [*messages, first, USER], client.api_key)
  text = (first.content or "") + (second.content or "")
  await wait()
  await ask(client, [{"role": "user", "content": f"summary {len(text)}"}], client.api_key)

  async def part(i):
    await wait()
    return await ask(client, [{"role": "user", "content": f"part {i}"}])

  parts = await asyncio.gather(part(1), part(2))
  return environments.Result(len(text) % 3 / 2, info={"parts": len(parts)})


late = functools.partial(talk, delay_s=0.02)


def agent_config(slots=0, **env):
  config = config_of("gtpo", **{**SETTINGS, "sampling.slots": slots})
  env = {"workers": 64, **env}
  return dataclasses.replace(config, env=EnvSection(agent="somewhere:run", **env))


@functools.cache
def params_for(config):
  worker = RolloutWorker(config, agent=talk)
  return init_params(worker.model, jax.random.key(3))


def collect(config, agent, stopping=lambda: False):
  """The batch of one step; the agents are closed."""
  worker = RolloutWorker(config, agent=agent)
  problems = training_problems(config, worker)
  collector = Collector(config, worker, RewardManager(config), problems, NONE)
  try:
    return collector.collect(params_for(config), 0, print, stopping), worker
  finally:
    began = time.monotonic()
    worker.episodes.close(20.0)
    assert time.monotonic() - began < 20


@functools.cache
def expected():
  SEEN.clear()
  batch, worker = collect(agent_config(), talk)
  return batch, worker, dict(SEEN)


def conversations(batch, i, j):
  """The (tokens, mask) of the conversations of a completion, without the prompt."""
  rollouts = host(batch)[0]
  length = int(rollouts.present[i, j].sum())
  begins = [x for x in np.asarray(rollouts.packing.begins)[i, j].tolist() if x < length]
  ends = [*begins[1:], length]
  return [
    (rollouts.tokens[i, j, b:e].tolist(), rollouts.mask[i, j, b:e].tolist())
    for b, e in zip(begins, ends, strict=True)
  ]


@pytest.mark.slow
def test_what_was_sampled_is_trained_on_token_by_token():
  batch, worker, seen = expected()
  rollouts = host(batch)[0]
  by_answer = {tuple(talks[0][1]): talks for talks in seen.values()}
  assert len(by_answer) == len(seen) == rollouts.finished.size
  for i, j in np.ndindex(rollouts.finished.shape):
    found = conversations(batch, i, j)
    assert len(found) == 4
    start = rollouts.prompts.tokens[i, -1:].tolist()
    (whole,) = [tokens for tokens, mask in found if len(answers_of(tokens, mask)) == 2]
    mask = dict(map(hashable, found))[tuple(whole)]
    answers = answers_of(whole, mask)
    first, second, third = by_answer[tuple(answers[0])]
    assert [first[1], second[1]] == answers
    assert second[0] + second[1] == start + whole
    assert second[0][: len(first[0] + first[1])] == first[0] + first[1]
    assert third[0] + third[1] in [start + tokens for tokens, _ in found]
  assert batch.metrics["env/conversations"] == 4 and batch.metrics["env/turns"] == 5
  assert batch.metrics["env/parts"] == 2 and 0 < batch.correct.mean() < 1
  assert worker.episodes.rules.workers.abandoned == 0


def hashable(conversation):
  return tuple(map(tuple, conversation))


def answers_of(tokens, mask):
  """The runs of drawn tokens."""
  edges = np.flatnonzero(np.diff(np.asarray(mask, int))) + 1
  runs = np.split(np.asarray(tokens), edges)
  return [run.tolist() for run in runs[1::2]]


@pytest.mark.slow
def test_the_trainer_computes_the_log_probs_of_the_sampler():
  batch, worker, _ = expected()
  config = agent_config()
  score = make_scorer(worker.model, 1.0, 1, 0)
  log_probs = np.asarray(score(params_for(config), batch.rollouts))
  rollouts = host(batch)[0]
  np.testing.assert_allclose(log_probs, np.where(rollouts.mask, rollouts.log_probs, 0), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [pytest.param(0, marks=pytest.mark.manual), 5])
def test_the_time_that_agents_take_does_not_matter(slots):
  batch, _ = collect(agent_config(slots), late)
  for name in ("tokens", "mask", "finished"):
    other = getattr(host(expected()[0])[0], name)
    np.testing.assert_array_equal(getattr(host(batch)[0], name), other)
  np.testing.assert_array_equal(batch.correct, expected()[0].correct)


@pytest.mark.slow
def test_a_stopped_step_ends_its_agents():
  polls = iter([False] * 3 + [True])
  with pytest.raises(Stopped):
    collect(agent_config(), talk, lambda: next(polls))


@pytest.mark.slow
def test_agents_that_misbehave_cost_their_episodes_only(capfd):
  """A crash, a hang, a hang that blocks its thread, a flood, and texts that are too long."""

  async def misbehave(row, client, seed):
    number = int(row["id"].rpartition("-")[2]) % 7
    message = await ask(client, [{"role": "system", "content": "play"}, *row["messages"]])
    if number == 0:
      raise RuntimeError("a crash\nof two lines")
    if number == 1:
      await asyncio.sleep(1000)
    if number == 2:
      time.sleep(5)
    if number == 3:
      requests = [ask(client, [{"role": "user", "content": str(i)}]) for i in range(300)]
      await asyncio.gather(*requests, return_exceptions=True)
    if number == 4:
      await ask(client, [*row["messages"], message, {"role": "user", "content": "x " * 200_000}])
    if number == 5:
      return "no number"
    return True

  config = agent_config(step_timeout_s=3.0)
  batch, _ = collect(config, misbehave)
  stops = {}
  for problem, episodes in zip(batch.problems, batch.episodes, strict=True):
    number = int(problem.id.rpartition("-")[2]) % 7
    stops.setdefault(number, set()).update(episode.stop for episode in episodes)
  right = {
    0: {"env_error"},
    1: {"timeout"},
    2: {"timeout"},
    3: {"max_turns", "max_conversations", "timeout"},
    4: {"context"},
    5: {"env_error"},
    6: {"env_done"},
  }
  assert set(stops) > {3, 4}
  for number, found in stops.items():
    assert found <= right[number], (number, found)
  lines = capfd.readouterr().err.strip().splitlines()
  assert all(line.startswith("gtpo: agent misbehave ") for line in lines), lines
  assert len(lines) <= 4


def test_requests_that_the_endpoint_refuses():
  """One policy of a random model answers; what it cannot do is refused as by the server."""
  import openai  # takes a second, which other processes of a parallel run need not spend

  errors = []

  async def wrong(row, client, seed):
    text = [{"role": "user", "content": "a"}]
    for settings in ({"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"presence_penalty": 1}):
      with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model="x", messages=text, **settings)
      errors.append(raised.value.body["param"])
    with pytest.raises(openai.AuthenticationError):
      await ask(client.with_options(api_key="other"), text)
    parts = [part async for part in await ask_stream(client, text)]
    answer = await client.chat.completions.create(
      model="x", messages=text, max_tokens=3, logprobs=True, stop=["a", "e", "i"]
    )
    assert len(answer.choices[0].logprobs.content) <= 3
    assert not set("aei") & set(answer.choices[0].message.content or "")
    assert (await client.models.list()).data[0].id == "policy"
    return len(parts) > 1

  batch, _ = collect(agent_config(workers=5), wrong)  # most agents wait for others to return
  assert set(errors) == {"n", "top_logprobs", "presence_penalty"}
  assert {episode.stop for row in batch.episodes for episode in row} == {"env_done"}
  assert batch.correct.all() and batch.metrics["env/conversations"] == 2
  assert np.asarray(batch.rollouts.mask).any(-1).all()


async def ask_stream(client, text):
  return await client.chat.completions.create(model="x", messages=text, max_tokens=3, stream=True)


def test_a_missing_package_is_named(monkeypatch):
  real = __import__("importlib.util").util.find_spec
  missing = lambda name, *rest: None if name == "openai" else real(name, *rest)
  monkeypatch.setattr("importlib.util.find_spec", missing)
  with pytest.raises(UserError, match=r"env.agent needs openai"):
    RolloutWorker(agent_config(), agent=talk)
