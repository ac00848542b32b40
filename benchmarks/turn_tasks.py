"""The tasks of benchmarks/credit_turns.py: their configs, and sums that take three calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_jax.config import Config, load
from gtpo_jax.data.records import Problem, user
from gtpo_jax.data.tasks import TASKS
from gtpo_jax.data.tasks.task import split
from gtpo_jax.environments.turns import Step, Turn

CONFIG = str(Path(__file__).parents[1] / "configs" / "guess.py")
TERMS = 4
SLIP = 0.35  # how often the teacher adds another number of the question
PROBLEMS = 1 << 14
CALL_REWARD = 0.2  # for a call that is right, beside 1 for the right total


class ThreeCalls:
  """A calculator that adds two numbers in a turn; it knows which turn called rightly.

  A call such as `46+37` is right if both numbers are left to add; their sum then takes their place.
  `=163` is the answer. There is no turn to spare, so a wrong call loses the sum for a player who
  cannot add by himself. Its truth is -1, as is that of a wrong answer to a sum that is not lost
  yet; the truth of all other turns is 0. The row has the numbers.
  """

  def reset(self, row: Mapping[str, Any], seed: int) -> None:
    """Begins a sum; see `Environment`."""
    self._left = [int(number) for number in row["numbers"]]
    self._total = int(row["answer"])
    self._turns_left = len(self._left)

  def step(self, turn: Turn) -> Step:
    """Answers a call, or ends the sum; see `Environment`."""
    lost = len(self._left) > self._turns_left
    self._turns_left -= 1
    call = re.fullmatch(r"(\d{1,4})\+(\d{1,4})", turn.text)
    if call is None:
      correct = turn.text == f"={self._total}"
      return Step(done=True, correct=correct, truth=0.0 if lost or correct else -1.0)
    numbers = [int(number) for number in call.groups()]
    rest = list(self._left)
    right = True
    for number in numbers:
      right = right and number in rest
      if right:
        rest.remove(number)
    if right:
      self._left = sorted([*rest, sum(numbers)])
    truth = 0.0 if lost or len(self._left) <= self._turns_left else -1.0
    if not self._turns_left:
      return Step(reward=float(right), done=True, correct=False, truth=truth)
    state = f"{' '.join(map(str, self._left))} in {self._turns_left} turns"
    return Step(str(sum(numbers)), reward=float(right), state=state, truth=truth)


class Chain:
  """Sums of four numbers such as `46+37+12+25:`, to be added with `ThreeCalls`.

  The teacher adds the next number to what it was told last. In each call, it adds another number of
  the question instead with the probability `SLIP`.
  """

  name = "chain"
  needs = "env.make=turn_tasks:ThreeCalls"
  terms = TERMS
  largest = 99

  def __init__(self):
    self.size = PROBLEMS
    numbers = np.random.default_rng(0).integers(10, 100, (2 * PROBLEMS, TERMS))
    distinct = (np.diff(np.sort(numbers, axis=1), axis=1) > 0).all(1)
    self._numbers = numbers[distinct][:PROBLEMS]  # i64[size, TERMS]
    self.train_ids, self.held_out_ids = split(self, self._numbers @ 100 ** np.arange(TERMS))

  def problem(self, index: int) -> Problem:
    """Returns the sum as a question."""
    numbers = self._numbers[index].tolist()
    question = user("+".join(map(str, numbers)) + ":")
    extra = {"numbers": numbers}
    return Problem(f"chain-{index}", question, str(sum(numbers)), "last_number", extra)

  def turn(
    self, index: int, turns: Sequence[tuple[str, str]], rng: np.random.Generator, slips: float
  ) -> str:
    """Returns the teacher's next call, or the last sum that it was told."""
    numbers = self._numbers[index].tolist()
    told = re.search(r"\d+", turns[-1][1]).group() if turns else str(numbers[0])
    place = len(turns) + 1
    if place == TERMS:
      return f"={told}"
    if rng.random() < slips * SLIP:
      place = rng.choice([i for i in range(TERMS) if i != place])
    return f"{told}+{numbers[place]}"


TASKS[Chain.name] = Chain  # so that a config may name it

# By name: what differs from configs/guess.py.
TURN_TASKS: dict[str, dict[str, Any]] = {
  "guess31": {},
  "guess127": {"data.largest": 127, "sampling.max_tokens": 112},
  "chain": {
    "data.train": "chain",
    "data.max_prompt_tokens": 24,
    "sampling.max_tokens": 84,
    "sampling.temperature": 1.0,
    "env.make": "turn_tasks:ThreeCalls",
    "reward.parts": f"correct,env*{CALL_REWARD}",
  },
}


def config_of(task: str, algorithm: Mapping[str, Any], seed: int = 0, **changes: Any) -> Config:
  """Returns the config of a task.

  Args:
    task: a key of `TURN_TASKS`.
    algorithm: settings of the section `algorithm`.
    seed: of problems and sampling.
    **changes: other fields, with two underscores for each dot.
  """
  fields = {
    "seed": seed,
    "log.tensorboard": False,
    "batch.pack": False,  # packing would compile many shapes
    "batch.prompts": 16,
    "env.step_timeout_s": 600.0,  # a busy machine must not leave episodes out
    **TURN_TASKS[task],
    **{f"algorithm.{key}": value for key, value in algorithm.items()},
    **{key.replace("__", "."): value for key, value in changes.items()},
  }
  return load(CONFIG, [f"--config.{key}={value}" for key, value in fields.items()])
