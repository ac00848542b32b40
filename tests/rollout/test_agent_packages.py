"""Agents of other programs, unchanged, from their packages, play `guess` and train two steps.

Each package is imported if it is installed: openai-agents, smolagents. They leave sockets
open, so run this with `-W ignore`.
"""

import importlib

import pytest

import gtpo_jax
from gtpo_jax.environments import Result
from gtpo_jax.environments.examples.guess import Guess
from gtpo_jax.environments.turns import Turn

pytestmark = [pytest.mark.manual, pytest.mark.filterwarnings("ignore")]


def imported(name):
  try:
    return importlib.import_module(name)
  except ImportError as error:
    pytest.skip(f"{name} is not installed: {error}")


def verdict(number, texts):
  """What the environment says of guesses, and its hint if it goes on."""
  game = Guess()
  game.reset({"answer": number}, 0)
  for text in texts:
    step = game.step(Turn(text.strip()))
  return step


def train(agent):
  """Trains two steps, and compares every verdict with that of the environment."""
  config = gtpo_jax.default_config()
  config.steps = 2
  config.batch.prompts, config.batch.group = 4, 4
  config.sampling.max_tokens = 384
  config.sampling.stop = tuple("0123456789")  # a random policy rarely draws a stop token
  config.eval.every = 0
  config.eval.problems = 1
  config.env.workers = 16
  config.env.max_conversations = 8
  config.log.tensorboard = False
  rows = [{"prompt": "0-31?", "answer": str(i)} for i in range(10)]
  steps = list(gtpo_jax.steps(config, data=rows, agent=agent))
  assert len(steps) == 2
  for step in steps:
    batch = step.batch
    for problem, episodes in zip(batch.problems, batch.episodes, strict=True):
      for episode in episodes:
        assert episode.scored, episode.reason
        if episode.stop == "env_done":
          texts = [turn.text for turn in episode.turns]
          assert episode.correct is verdict(problem.answer, texts).correct
    assert step.metrics["env/stop/env_done"] > 0.5 and step.metrics["env/turns"] > 2
    assert step.metrics["mismatch/max_abs_logp"] < 1e-4
  return steps


def test_openai_agents():
  agents = imported("agents")
  agents.set_tracing_disabled(True)

  async def run(row, client, seed):
    model = agents.OpenAIChatCompletionsModel("policy", client)
    player = agents.Agent(name="player", instructions="Find the number.", model=model)
    items = [{"role": "user", "content": "0-31?"}]
    texts = []
    while True:
      result = await agents.Runner.run(player, items)
      texts.append(result.final_output)
      step = verdict(row["answer"], texts)
      if step.done:
        return Result(step.reward, step.correct)
      items = [*result.to_input_list(), {"role": "user", "content": step.messages}]

  steps = train(run)
  for step in steps:
    for episode in (x for episodes in step.batch.episodes for x in episodes):
      # The package repeats what it has got, except empty answers.
      empty = sum(not turn.text for turn in episode.turns[:-1])
      assert episode.info["conversations"] <= 1 + empty


def test_smolagents():
  smolagents = imported("smolagents")

  def run(row, client, seed):
    model = smolagents.OpenAIServerModel(
      "policy", api_base=str(client.base_url), api_key=client.api_key
    )
    messages = [{"role": "user", "content": [{"type": "text", "text": "0-31?"}]}]
    texts = []
    while True:
      answer = model.generate(messages)
      texts.append(answer.content or "")
      step = verdict(row["answer"], texts)
      if step.done:
        return Result(step.reward, step.correct)
      messages += [
        {"role": "assistant", "content": [{"type": "text", "text": answer.content or ""}]},
        {"role": "user", "content": [{"type": "text", "text": step.messages}]},
      ]

  train(run)
