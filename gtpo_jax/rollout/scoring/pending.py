"""The scores of a batch while it is being sampled: completions are scored as they end."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np

from gtpo_jax.data.records import Problem
from gtpo_jax.rollout.groups import EndedCompletion, RewardResult
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.runtime.distributed import any_process, broadcast_from_first, is_first_process
from gtpo_jax.runtime.signals import Stopped, poll

POLL_S = 1.0  # seconds between checks for a stop request, while scores are missing


class PendingRewards:
  """The scores of one batch while it is being sampled: completions are added as they end.

  With several processes, only the first one scores, and it broadcasts the result. If each scored,
  a timeout on one of them would make their states diverge.

  Attributes:
    texts: [n][g], the decoded completions; complete after `result`.
    lengths: i32[n, g], tokens of each completion.
    finished: bool[n, g], whether a stop token or a stop string ended each.
    ended: how many completions were added so far.
  """

  def __init__(
    self,
    reward_manager: RewardManager,
    problems: Sequence[Problem],
    group: int,
    decode: Callable[[Sequence[np.ndarray]], list[str]],
  ):
    """Args:
    reward_manager: scores the completions.
    problems: n problems.
    group: completions per problem.
    decode: turns rows of token ids into texts.
    """
    n = len(problems)
    self._reward_manager = reward_manager
    self._problems = problems
    self._decode = decode
    self.texts = [[""] * group for _ in range(n)]
    self.lengths = np.zeros((n, group), np.int32)
    self.finished = np.zeros((n, group), bool)
    self.ended = 0
    self._verdicts = np.full((n, group), np.nan)
    self._numbers = np.full((n, group), np.nan)
    self._grades = np.full((n, group), np.nan)
    self._function_values: list[dict[str, list[float]]] = [{} for _ in range(n)]
    self._missing = np.full(n, group)
    self._waiting: collections.deque[EndedCompletion] = collections.deque()
    self._work: list[Future[None]] = []
    self._lock = threading.Lock()  # held by a thread that scores, except while it waits for a judge

  def put(self, completions: Sequence[EndedCompletion]) -> None:
    """Adds completions that have ended."""
    self.ended += len(completions)
    if completions and is_first_process():
      self._waiting.extend(completions)
      self._work.append(self._reward_manager.thread.submit(self._score_waiting))

  def result(
    self, stopping: Callable[[], bool] = lambda: False, rows: Sequence[int] | None = None
  ) -> RewardResult:
    """Waits for all scores and returns them, the same on every process.

    Re-raises any exception from the scoring thread.

    Args:
      stopping: called about every second; True ends the wait.
      rows: the problems whose scores are returned, in this order, all of whose completions were
        added; None for all problems.

    Raises:
      Stopped: `stopping` returned True.
    """
    with jax.profiler.TraceAnnotation("reward"):
      while any_process(bool(wait(self._work, POLL_S).not_done)):
        if poll(stopping):
          raise Stopped
      shared = broadcast_from_first(functools.partial(self._collect, rows))
    self.texts = shared["texts"]
    # More completions may follow, and what another process sent is read-only.
    self.lengths = shared["lengths"].copy()
    self.finished = shared["finished"].copy()
    return RewardResult(**shared["result"])

  def _collect(self, rows: Sequence[int] | None) -> dict[str, Any]:
    for work in self._work:
      work.result()
    rows = np.arange(len(self.texts)) if rows is None else np.asarray(rows)
    result = self._reward_manager.combine(
      self._verdicts[rows],
      [self._function_values[i] for i in rows],
      self.lengths[rows],
      self.finished[rows],
      self._grades[rows],
      self._numbers[rows],
    )
    return {
      "result": vars(result),
      "texts": self.texts,
      "lengths": self.lengths,
      "finished": self.finished,
    }

  @functools.partial(jax.profiler.annotate_function, name="reward")
  def _score_waiting(self) -> None:
    """Scores all waiting completions at once: verifiers may check them in parallel."""
    manager = self._reward_manager
    with self._lock:
      completions = [self._waiting.popleft() for _ in range(len(self._waiting))]
      if not completions:
        return
      texts = self._decode([completion.tokens for completion in completions])
      problems = [self._problems[completion.problem] for completion in completions]
      scores = manager.score(problems, texts)
    grades = manager.grade(problems, texts, [completion.finished for completion in completions])
    with self._lock:
      for completion, text, score, grade in zip(completions, texts, scores, grades, strict=True):
        self._keep(completion, text, *score, grade)

  def _keep(
    self, completion: EndedCompletion, text: str, verdict: float, number: float, grade: float
  ) -> None:
    """Keeps the scores of a completion; the last one of a problem has users' functions called."""
    i, j, tokens, finished, _ = completion
    self.texts[i][j] = text
    self.lengths[i, j] = len(tokens)
    self.finished[i, j] = finished
    self._verdicts[i, j] = verdict
    self._numbers[i, j] = number
    self._grades[i, j] = grade
    self._missing[i] -= 1
    if not self._missing[i]:
      self._function_values[i] = self._reward_manager.call_functions(
        self._problems[i], self.texts[i]
      )
