"""The scores of a batch while it is being sampled: completions are scored as they end."""

from __future__ import annotations

import collections
import functools
import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np

from gtpo_jax.data.records import Problem
from gtpo_jax.environments.metrics import Tallies
from gtpo_jax.environments.turns import Episode, load_episode, save_episode
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
    episodes: [n][g], the episodes; None if completions are none. Complete after `result`.
    lengths: i32[n, g], tokens of each completion that the policy drew.
    finished: bool[n, g], whether a stop token or a stop string ended each.
    ended: how many completions were added so far.
  """

  def __init__(
    self,
    reward_manager: RewardManager,
    problems: Sequence[Problem],
    group: int,
    decode: Callable[[Sequence[np.ndarray]], list[str]],
    evaluates: bool = False,
  ):
    """Args:
    reward_manager: scores the completions.
    problems: n problems.
    group: completions per problem.
    decode: turns rows of token ids into texts.
    evaluates: whether a judge that compares does so with the answers, and not within the group.
    """
    n = len(problems)
    self._reward_manager = reward_manager
    self._problems = problems
    self._decode = decode
    self._evaluates = evaluates
    self.texts = [[""] * group for _ in range(n)]
    self.episodes: list[list[Episode | None]] | None = None
    self.lengths = np.zeros((n, group), np.int32)
    self.finished = np.zeros((n, group), bool)
    self.ended = 0
    self._answers = [[""] * group for _ in range(n)]  # what is scored
    self._verdicts = np.full((n, group), np.nan)
    self._numbers = np.full((n, group), np.nan)
    self._grades = np.full((n, group), np.nan)
    self._function_values: list[dict[str, list[float]]] = [{} for _ in range(n)]
    self._missing = np.full(n, group)
    self._waiting: collections.deque[EndedCompletion] = collections.deque()
    self._work: list[Future[None]] = []
    self._lock = threading.Lock()  # held by a thread that scores, except while it waits for a judge

  @property
  def answers(self) -> list[list[str]]:
    """What is judged of each completion: its text, or its episode's last turn."""
    if self.episodes is None:
      return self.texts
    return [
      [text if episode is None else episode.text for text, episode in zip(*row, strict=True)]
      for row in zip(self.texts, self.episodes, strict=True)
    ]

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
    if shared["episodes"] is not None:
      self.episodes = [[_loaded(text) for text in row] for row in shared["episodes"]]
    # More completions may follow, and what another process sent is read-only.
    self.lengths = shared["lengths"].copy()
    self.finished = shared["finished"].copy()
    return RewardResult(**{**shared["result"], "tallies": Tallies(*shared["result"]["tallies"])})

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
      [self.episodes[i] for i in rows] if self.episodes else None,
    )
    episodes = self.episodes
    return {
      "result": {**vars(result), "tallies": list(result.tallies)},
      "texts": self.texts,
      "episodes": episodes and [[_saved(episode) for episode in row] for row in episodes],
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
      answers = [
        completion.episode.text if completion.episode else text
        for completion, text in zip(completions, texts, strict=True)
      ]
      problems = [self._problems[completion.problem] for completion in completions]
      scores = self._scores(completions, problems, answers)
    may_be_correct = [_may_be_correct(ended) for ended in completions]
    grades = manager.grader.grade(problems, answers, may_be_correct, self._evaluates)
    complete = []
    with self._lock:
      for ended, text, answer, score, grade in zip(
        completions, texts, answers, scores, grades, strict=True
      ):
        self.texts[ended.problem][ended.index] = text
        self._answers[ended.problem][ended.index] = answer
        if self._keep(ended, *score, grade):
          complete.append(ended.problem)
    if complete and manager.grader.compares and not self._evaluates:
      groups = [self._answers[i] for i in complete]
      rates = manager.grader.compare([self._problems[i] for i in complete], groups)
      self._grades[complete] = rates

  def _scores(
    self, completions: Sequence[EndedCompletion], problems: Sequence[Problem], texts: Sequence[str]
  ) -> list[tuple[float, float]]:
    """Returns verdicts and numbers: the environment's own, otherwise the verifiers'."""
    manager = self._reward_manager
    scores = [(math.nan, math.nan)] * len(texts)
    open_rows = []
    for i, (_, _, _, _, episode) in enumerate(completions):
      if episode is None or (episode.scored and episode.correct is None):
        open_rows.append(i)
      elif episode.scored and not manager.has_own_verifier:
        scores[i] = (float(episode.correct), float(episode.correct))
    verified = manager.score([problems[i] for i in open_rows], [texts[i] for i in open_rows])
    for i, score in zip(open_rows, verified, strict=True):
      scores[i] = score
    return scores

  def _keep(self, ended: EndedCompletion, verdict: float, number: float, grade: float) -> bool:
    """Keeps the scores of a completion; the last one of a problem has users' functions called.

    Returns whether it is the last one of its problem.
    """
    i, j, tokens, finished, episode = ended
    self.lengths[i, j] = len(tokens) if episode is None else episode.tokens
    self.finished[i, j] = finished
    self._verdicts[i, j] = verdict
    self._numbers[i, j] = number
    self._grades[i, j] = grade
    if episode is not None:
      self.episodes = self.episodes or [[None] * len(row) for row in self.texts]
      self.episodes[i][j] = episode
    self._missing[i] -= 1
    if not self._missing[i]:
      self._function_values[i] = self._reward_manager.call_functions(
        self._problems[i], self._answers[i], self.episodes[i] if self.episodes else None
      )
    return not self._missing[i]


def _may_be_correct(ended: EndedCompletion) -> bool:
  episode = ended.episode
  return ended.finished and (episode is None or (episode.scored and not episode.failed))


def _saved(episode: Episode | None) -> str:
  """Returns an episode as text for other processes; "" if it has not ended."""
  return "" if episode is None else json.dumps(save_episode(episode))


def _loaded(text: str) -> Episode | None:
  return load_episode(json.loads(text)) if text else None
