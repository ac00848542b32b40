"""The scores of completions, which are scored as they end while others are being sampled."""

from __future__ import annotations

import collections
import functools
import json
import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
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
  a timeout on one of them would make their states diverge. `key in pending` says whether
  completions of a group were added whose scores were not yet returned to one who asked for this
  group.

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
    self._group = group
    self._decode = decode
    self._evaluates = evaluates
    self._problems: dict[Hashable, Problem] = {}
    self._completions: dict[Hashable, list[Completion | None]] = {}
    self._scores: dict[Hashable, np.ndarray] = {}  # f64[3, g]: verdicts, numbers and grades
    self._function_values: dict[Hashable, dict[str, list[float]]] = {}
    self._missing: dict[Hashable, int] = {}
    self._scored: set[Hashable] = set()  # groups
    self._waiting: collections.deque[Completion] = collections.deque()
    self._work: list[Future[None]] = []
    self._lock = threading.Lock()  # held by a thread that scores, except while it waits for a judge
    self._news = threading.Condition()  # some work is done
    self.open(problems)

  def open(self, problems: Mapping[Hashable, Problem]) -> None:
    """Takes the problems of more groups."""
    for key, problem in problems.items():
      self._problems[key] = problem
      self._completions[key] = [None] * self._group
      self._scores[key] = np.full((3, self._group), np.nan)
      self._function_values[key] = {}
      self._missing[key] = self._group

  def __contains__(self, key: Hashable) -> bool:
    return any(self._completions.get(key, ()))

  def put(self, completions: Sequence[Completion]) -> None:
    """Adds completions that have ended."""
    for completion in completions:
      self._completions[completion.group][completion.index] = completion
    self.ended += len(completions)
    if completions and is_first_process():
      self._waiting.extend(completions)
      work = self._reward_manager.thread.submit(self._score_waiting)
      self._work = [x for x in self._work if not x.done() or _failed(x)] + [work]
      work.add_done_callback(self._tell)

  def result(
    self, stopping: Callable[[], bool] = lambda: False, groups: Sequence[Hashable] | None = None
  ) -> RewardResult:
    """Waits for scores and returns them, the same on every process.

    The completions then have their texts, and their episodes on every process. Re-raises any
    exception from the scoring thread.

    Args:
      stopping: called about every second; True ends the wait.
      groups: the groups whose scores are awaited, returned in this order and forgotten. All their
        completions were added. None for all groups, which are kept.
    """
    keys = list(self._problems if groups is None else groups)
    with jax.profiler.TraceAnnotation("reward"):
      while any_process(not self._wait(keys)):
        if poll(stopping):
          raise Stopped
      shared = broadcast_from_first(functools.partial(self._collect, keys))
    if not is_first_process():
      completions = [x for key in keys for x in self._completions[key]]
      for x, text, episode in zip(completions, shared["texts"], shared["episodes"], strict=True):
        x.text = text
        x.episode = load_episode(json.loads(episode)) if episode else None
    by_group = (self._problems, self._completions, self._scores, self._function_values)
    for key in groups or ():
      for of_groups in (*by_group, self._missing):
        del of_groups[key]
      self._scored.discard(key)
    return RewardResult(**{**shared["result"], "tallies": Tallies(*shared["result"]["tallies"])})

  def _tell(self, _: Future[None] | None = None) -> None:
    with self._news:
      self._news.notify_all()

  def _wait(self, groups: Sequence[Hashable]) -> bool:
    """Waits about a second; returns whether some groups are scored, or some work has failed."""
    ready = lambda: (
      self._scored.issuperset(groups)
      or any(map(_failed, self._work))
      or all(work.done() for work in self._work)
    )
    with self._news:
      return self._news.wait_for(ready, POLL_S)

  def _collect(self, groups: Sequence[Hashable]) -> dict[str, Any]:
    for work in filter(_failed, self._work):
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
    compares = manager.grader.compares and not self._evaluates
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
          if not compares:
            self._scored.add(key)
            self._tell()
    if complete and compares:
      groups = [[x.answer for x in self._completions[key]] for key in complete]
      rates = manager.grader.compare([self._problems[key] for key in complete], groups)
      for key, rate in zip(complete, rates, strict=True):
        self._scores[key][2] = rate
      self._scored.update(complete)

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


def _failed(work: Future[None]) -> bool:
  return work.done() and (work.cancelled() or work.exception() is not None)


def _may_be_correct(completion: Completion) -> bool:
  episode = completion.episode
  return completion.finished and (episode is None or (episode.scored and not episode.failed))
