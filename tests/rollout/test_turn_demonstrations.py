"""Demonstrations of several turns: the tokens that a model would read and write."""

import time

import numpy as np
import pytest

from gtpo_jax.config import freeze, load
from gtpo_jax.environments.examples.guess import Guess
from gtpo_jax.environments.turns import Step
from gtpo_jax.environments.writers import Recorded
from gtpo_jax.loop import warm_start
from gtpo_jax.loop.warm_start import TurnTeacher, demonstrations
from gtpo_jax.rollout.demonstrations import play
from gtpo_jax.rollout.problems import training_problems
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError


def texts(worker, demonstration):
  """The completion, and what of it is imitated."""
  decode = worker.chat.tokenizer.decode
  pairs = zip(demonstration.completion, demonstration.drawn, strict=True)
  return decode(demonstration.completion), decode([token for token, drawn in pairs if drawn])


def test_an_environment_answers_the_player_and_only_turns_are_imitated():
  config = load("guess")
  worker = RolloutWorker(config)
  guesses = ["16", "24", "20"]
  problem = config.data.train_task.problem(20)
  (played,) = play(worker, [problem], lambda i, turns: guesses[len(turns)], 76)
  whole, own = texts(worker, played)
  answer = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
  assert whole == f"16{answer.format('higher')}24{answer.format('lower')}20<|im_end|>"
  assert own == "16<|im_end|>24<|im_end|>20<|im_end|>"
  assert played.prompt == worker.encode(problem)


def test_a_tool_answers_the_teacher(monkeypatch):
  monkeypatch.setattr(warm_start, "PLAYED", 32)
  config = load("calculator", ["--config.warm_start.slips=0"])
  worker = RolloutWorker(config)
  teacher = TurnTeacher(config, worker)
  rng = np.random.default_rng(0)
  played = teacher.draw(rng, 20)
  assert played == TurnTeacher(config, worker).draw(np.random.default_rng(0), 20)
  for demonstration in played:
    prompt = worker.chat.tokenizer.decode(demonstration.prompt)
    _, own = texts(worker, demonstration)
    question = prompt.split("user\n")[1].split(":")[0]
    call = '<tool_call>{"name":"add","arguments":{"x":"' + question + '"}}</tool_call>'
    assert own == f"{call}<|im_end|>{sum(map(int, question.split('+')))}<|im_end|>"
  (k, b, t) = (2, config.warm_start.batch, config.sampling.max_tokens)
  batch = demonstrations(config, worker, teacher, rng, k)
  assert batch.mask.shape == (k, b, t)
  assert 0 < int(batch.mask.sum()) < int((batch.tokens != worker.chat.pad).sum())


def test_environments_of_demonstrations_may_close_while_others_begin():
  class Closes(Guess):
    def close(self):
      time.sleep(0.02)

  config = load("guess")
  worker = RolloutWorker(config, environment=Closes)
  problem = config.data.train_task.problem(20)
  play(worker, [problem], lambda i, turns: "20", 76)
  worker.episodes.begin((0, 0), problem.row, 0, [Recorded()])
  time.sleep(0.05)  # both calls have returned
  assert worker.episodes.opened() == [((0, 0), "", "")]
  worker.episodes.close()


def test_an_environment_that_fails_is_an_error():
  class Fails:
    def reset(self, row, seed):
      return None

    def step(self, turn):
      return Step(turn.text) if turn.index == 0 else 1 / 0

  config = load("guess")
  worker = RolloutWorker(config, environment=Fails)
  problem = config.data.train_task.problem(20)
  with pytest.raises(UserError, match=r"problem 'guess-20' .*Fails.step raised ZeroDivisionError"):
    play(worker, [problem], lambda i, turns: "1", 76)


def test_a_task_with_turns_needs_its_environment():
  config = freeze({"data": {"train": "guess"}, "warm_start": {"steps": 1}})
  worker = RolloutWorker(config)
  message = r"'guess' has several turns: set env\.make=gtpo_jax\.environments\.examples"
  with pytest.raises(UserError, match=message):
    TurnTeacher(config, worker)
  with pytest.raises(UserError, match=message):
    training_problems(config, worker)
