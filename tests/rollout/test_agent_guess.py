"""The agent of the documentation plays `guess` with the verdicts of the environment, and trains."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gtpo_jax
from gtpo_jax.data.records import user
from gtpo_jax.environments.examples.guess import Guess
from gtpo_jax.environments.turns import Turn

PAGE = Path(__file__).parents[2] / "docs" / "episodes.md"


def documented_agent():
  """The function of the page's section on agents."""
  section = PAGE.read_text().partition("\n## Agents\n")[2]
  (source,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
  namespace = {}
  exec(source, namespace)
  return namespace["guess"]


class Scripted:
  """A client whose answers are known."""

  def __init__(self, texts):
    self.chat = SimpleNamespace(completions=self)
    self.hints = []
    self._texts = iter(texts)

  async def create(self, model, messages):
    self.hints.append(messages[-1]["content"])
    message = SimpleNamespace(content=next(self._texts))
    return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def test_the_verdicts_are_those_of_the_environment():
  agent = documented_agent()
  rng = np.random.default_rng(0)
  found = set()
  for number in range(32):
    texts = [str(x) for x in rng.integers(0, 32, 5)]
    texts[number % 5] = (str(number), "no idea", texts[0])[number % 3]
    game = Guess()
    game.reset({"answer": str(number)}, 0)
    hints = []
    for text in texts:
      step = game.step(Turn(text))
      if step.done:
        break
      hints.append(step.messages)
    client = Scripted(texts)
    result = asyncio.run(agent({"answer": str(number), "messages": user("0-31?")}, client, 0))
    reward = result if isinstance(result, float) else result.reward
    assert (reward > 0.5) == step.correct and reward == step.reward
    assert client.hints[1:] == hints
    found.add(step.correct)
  assert found == {True, False}


@pytest.mark.slow
def test_it_trains():
  config = gtpo_jax.default_config()
  config.steps = 2
  config.batch.prompts, config.batch.group = 4, 4
  config.sampling.max_tokens = 128
  config.sampling.stop = tuple("0123456789")  # a random policy rarely draws a stop token
  config.eval.problems, config.eval.samples, config.eval.batch = 2, 1, 2
  config.env.workers = 16
  config.log.tensorboard = False
  rows = [{"prompt": "0-31?", "answer": str(i)} for i in range(10)]
  steps = list(gtpo_jax.steps(config, data=rows, agent=documented_agent()))
  assert len(steps) == 2
  for step in steps:
    assert step.metrics["mismatch/max_abs_logp"] < 1e-4
    assert step.metrics["env/conversations"] == 1 and step.metrics["env/stop/env_error"] == 0
