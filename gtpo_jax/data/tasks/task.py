"""What a task is, and how its problems are numbered and split."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gtpo_jax.data.records import Problem
from gtpo_jax.runtime.errors import UserError

HELD_OUT = 8  # about one problem in this many is held out
MAX_PROBLEMS = 1 << 22  # a task with more possible problems uses a fixed sample of them


class Task(Protocol):
  """The interface of a task, for warm start, training and evaluation."""

  name: str
  terms: int
  largest: int
  train_ids: np.ndarray  # i64[m], problem numbers
  held_out_ids: np.ndarray  # i64[m]

  def problem(self, index: int) -> Problem:
    """Returns the problem with this number."""

  def demonstration(self, index: int, rng: np.random.Generator, slips: float) -> str:
    """Returns the teacher's completion; `slips` scales how often the teacher errs."""


class TurnTask(Task, Protocol):
  """A task with several turns. It has no `demonstration`, but a `turn`."""

  needs: str  # the setting of the environment or the tools that answer turns

  def turn(
    self, index: int, turns: Sequence[tuple[str, str]], rng: np.random.Generator, slips: float
  ) -> str:
    """Returns the teacher's next turn, given the earlier ones and what was answered to each."""


@dataclasses.dataclass(frozen=True, eq=False)
class TaskPart:
  """A subset of a task's problems, by number."""

  task: Task
  ids: np.ndarray  # i64[m], problem numbers
  source: str = ""  # `Problem.source`

  def __len__(self) -> int:
    return len(self.ids)

  def __getitem__(self, index: int) -> Problem:
    problem = self.task.problem(int(self.ids[index]))
    return dataclasses.replace(problem, source=self.source) if self.source else problem


def split(task: Task, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the problem numbers of the training and held-out parts, split by a hash of `codes`."""
  held_out = _hash(codes.astype(np.uint64)) % np.uint64(HELD_OUT) == 0
  if held_out.all() or not held_out.any():
    raise UserError(
      f"data.terms = {task.terms} with data.largest = {task.largest} gives too few different "
      f"{task.name} problems to hold some out; raise one of them"
    )
  return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def sample_codes(space: int) -> np.ndarray:
  """Returns about MAX_PROBLEMS different numbers below `space`, the same in every call."""
  numbers = np.sort(np.random.default_rng(0).integers(space, size=MAX_PROBLEMS))
  return numbers[np.append(True, np.diff(numbers) > 0)]  # np.unique takes 20 times as long


def _hash(x: np.ndarray) -> np.ndarray:
  """Returns SplitMix64's finaliser, which maps neighbouring codes to distant values."""
  x = x + np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))
