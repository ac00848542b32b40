"""The scores of completions, which are scored as they end while others are being sampled."""

from __future__ import annotations

import collections
import functools
import json
import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np

from gtpo_jax.data.records import Problem
from gtpo_jax.environments.metrics import Tallies
from gtpo_jax.environments.turns import load_episode, save_episode
from gtpo_jax.rollout.groups import RewardResult, episodes_of
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.runtime.distributed import any_process, broadcast_from_first, is_first_process
from gtpo_jax.runtime.signals import Stopped, poll
from gtpo_jax.sampling.completion import Completion

POLL_S = 1.0  # seconds between checks for a stop request, while scores are missing


class PendingRewards:
  """The scores of completions while others are being sampled: they are added as they end.

  With several processes, only the first one scores, and it broadcasts the result. If each scored,
  a timeout on one of them would make their states diverge.

  Attributes:
    ended: how many completions were added so far.
  """

  def __init__(
    self,
    reward_manager: RewardManager,
    problems: Mapping[Hashable, Problem],
    group: int,
    decode: Callable[[Sequence[np.ndarray]], list[str]],
    evaluates: bool = False,
  ):
    """Args:
    reward_manager: scores the completions.
    problems: the problem of each group.
    group: completions per problem.
    decode: turns rows of token ids into texts.
    evaluates: whether a judge that compares does so with the answers, and not within the group.
    """
    self.ended = 0
    self._reward_manager = reward_manager
    self._problems = problems
    self._decode = decode
    self._evaluates = evaluates
    self._completions: dict[Hashable, list[Completion | None]] = {
      key: [None] * group for key in problems
    }
    # For each group, f64[3, g]: verdicts, numbers and grades.
    self._scores = {key: np.full((3, group), np.nan) for key in problems}
    self._function_values: dict[Hashable, dict[str, list[float]]] = {key: {} for key in problems}
    self._missing = dict.fromkeys(problems, group)
    self._waiting: collections.deque[Completion] = collections.deque()
    self._work: list[Future[None]] = []
    self._lock = threading.Lock()  # held by a thread that scores, except while it waits for a judge

  def put(self, completions: Sequence[Completion]) -> None:
    """Adds completions that have ended."""
    for completion in completions:
      self._completions[completion.group][completion.index] = completion
    self.ended += len(completions)
    if completions and is_first_process():
      self._waiting.extend(completions)
      self._work.append(self._reward_manager.thread.submit(self._score_waiting))

  def result(
    self, stopping: Callable[[], bool] = lambda: False, groups: Sequence[Hashable] | None = None
  ) -> RewardResult:
    """Waits for all scores and returns them, the same on every process.

    The completions then have their texts, and their episodes on every process. Re-raises any
    exception from the scoring thread.

    Args:
      stopping: called about every second; True ends the wait.
      groups: the groups whose scores are returned, in this order, all of whose completions were
        added; None for all.

    Raises:
      Stopped: `stopping` returned True.
    """
    groups = list(self._problems if groups is None else groups)
    with jax.profiler.TraceAnnotation("reward"):
      while any_process(bool(wait(self._work, POLL_S).not_done)):
        if poll(stopping):
          raise Stopped
      shared = broadcast_from_first(functools.partial(self._collect, groups))
    if not is_first_process():
      completions = [x for key in groups for x in self._completions[key]]
      for x, text, episode in zip(completions, shared["texts"], shared["episodes"], strict=True):
        x.text = text
        x.episode = load_episode(json.loads(episode)) if episode else None
    return RewardResult(**{**shared["result"], "tallies": Tallies(*shared["result"]["tallies"])})

  def _collect(self, groups: Sequence[Hashable]) -> dict[str, Any]:
    for work in self._work:
      work.result()
    rows = [self._completions[key] for key in groups]
    verdicts, numbers, grades = np.stack([self._scores[key] for key in groups], axis=1)
    episodes = [[completion.episode for completion in row] for row in rows]
    result = self._reward_manager.combine(
      verdicts,
      [self._function_values[key] for key in groups],
      np.asarray([[completion.drawn for completion in row] for row in rows], np.int32),
      np.asarray([[completion.finished for completion in row] for row in rows]),
      grades,
      numbers,
      episodes if any(map(any, episodes)) else None,
    )
    save = lambda episode: json.dumps(save_episode(episode)) if episode else ""
    return {
      "result": {**vars(result), "tallies": list(result.tallies)},
      "texts": [completion.text for row in rows for completion in row],
      "episodes": [save(episode) for row in episodes for episode in row],
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
      for completion, text in zip(completions, texts, strict=True):
        completion.text = text
      problems = [self._problems[completion.group] for completion in completions]
      scores = self._verdicts(completions, problems)
    answers = [completion.answer for completion in completions]
    may_be_correct = [_may_be_correct(completion) for completion in completions]
    grades = manager.grader.grade(problems, answers, may_be_correct, self._evaluates)
    complete = []
    with self._lock:
      for completion, score, grade in zip(completions, scores, grades, strict=True):
        key = completion.group
        self._scores[key][:, completion.index] = (*score, grade)
        self._missing[key] -= 1
        if not self._missing[key]:  # the users' functions get whole groups
          group = self._completions[key]
          self._function_values[key] = manager.call_functions(
            self._problems[key], [x.answer for x in group], episodes_of(group)
          )
          complete.append(key)
    if complete and manager.grader.compares and not self._evaluates:
      groups = [[x.answer for x in self._completions[key]] for key in complete]
      rates = manager.grader.compare([self._problems[key] for key in complete], groups)
      for key, rate in zip(complete, rates, strict=True):
        self._scores[key][2] = rate

  def _verdicts(
    self, completions: Sequence[Completion], problems: Sequence[Problem]
  ) -> list[tuple[float, float]]:
    """Returns verdicts and numbers: the environment's own, otherwise the verifiers'."""
    manager = self._reward_manager
    scores = [(math.nan, math.nan)] * len(completions)
    open_rows = []
    for i, episode in enumerate(completion.episode for completion in completions):
      if episode is None or (episode.scored and episode.correct is None):
        open_rows.append(i)
      elif episode.scored and not manager.has_own_verifier:
        scores[i] = (float(episode.correct), float(episode.correct))
    verified = manager.score(
      [problems[i] for i in open_rows], [completions[i].answer for i in open_rows]
    )
    for i, score in zip(open_rows, verified, strict=True):
      scores[i] = score
    return scores


def _may_be_correct(completion: Completion) -> bool:
  episode = completion.episode
  return completion.finished and (episode is None or (episode.scored and not episode.failed))
