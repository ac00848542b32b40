"""Synthetic reasoning tasks with imperfect teachers that the base model learns to imitate.

A task numbers its problems 0 .. size-1. A hash of the problem assigns about one in eight to the
held-out part, so the problems of training and evaluation are disjoint for every seed.
"""

from __future__ import annotations

import functools

from gtpo_jax.data.tasks.constraints import Constraints
from gtpo_jax.data.tasks.forks import FILLER, ConfidentForks, Forks
from gtpo_jax.data.tasks.multi_turn import Calculator, GuessNumber
from gtpo_jax.data.tasks.sentences import Sentences
from gtpo_jax.data.tasks.sums import Countdown, RunningSums
from gtpo_jax.data.tasks.task import Task, TaskPart
from gtpo_jax.runtime.errors import UserError, did_you_mean

__all__ = ["FILLER", "TASKS", "Forks", "Task", "TaskPart", "make_task"]

TASKS: dict[str, type] = {
  task.name: task
  for task in (
    RunningSums,
    Countdown,
    Forks,
    ConfidentForks,
    Sentences,
    Constraints,
    GuessNumber,
    Calculator,
  )
}
UNREAD = {  # settings without effect
  Sentences: ("terms", "largest"),
  Constraints: ("largest",),
  GuessNumber: ("terms",),
  Calculator: ("terms", "largest"),
}


@functools.lru_cache(maxsize=8)
def make_task(name: str, terms: int = 0, largest: int = 0, filler: int = FILLER) -> Task:
  """Returns a task by name. `terms` or `largest` of 0 selects the task's default.

  Only forks reads `filler`; `UNREAD` has the tasks that do not read the others.

  Raises:
    UserError: the name is unknown, or the task does not have this difficulty.
  """
  if name not in TASKS:
    suggestion = did_you_mean(name, TASKS)
    raise UserError(f"unknown task {name!r}{suggestion}; valid are {', '.join(TASKS)}")
  difficulty = {"terms": terms, "largest": largest}
  settings = {key: value for key, value in difficulty.items() if value}
  if unread := [key for key in UNREAD.get(TASKS[name], ()) if key in settings]:
    raise UserError(f"data.{unread[0]} has no effect with the task {name!r}; leave it at 0")
  if issubclass(TASKS[name], Forks):
    settings["filler"] = filler
  return TASKS[name](**settings)
