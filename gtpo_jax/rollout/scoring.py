"""Scores completions: the verifier for each problem's kind, and the weighted parts of the reward.

If verification fails, a completion has no verdict. Unless it was cut off, which makes it incorrect,
it is then excluded from the loss and the statistics, and counted in `reward/no_verdict`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import numpy as np

from gtpo_jax.arrays import Rewards
from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem
from gtpo_jax.rewards import PARTS, VERIFIERS, group_relative, soft_overlong
from gtpo_jax.rollout.user_functions import (
  BUILTIN_PARTS,
  MAX_VALUE,
  FunctionCaller,
  RewardFunction,
  import_function,
)
from gtpo_jax.runtime.distributed import any_process, broadcast_from_first, is_first_process
from gtpo_jax.runtime.signals import Stopped, poll
from gtpo_jax.sampling.host_arrays import CompletionBuffer

CORRECT_ABOVE = 0.5  # a verifier's score above this counts as correct
POLL_S = 1.0  # seconds between checks for a stop request, while scores are missing
USER_VERIFIER = ""  # the key of a user's verifier in what `call_functions` returns


@dataclasses.dataclass(frozen=True)
class RewardResult:
  """The scores of one batch, in host arrays.

  Attributes:
    correct: bool[n, g]; False if not scored.
    scored: bool[n, g]; whether the completion has a verdict and every part of its reward. A
      completion that was cut off needs no verdict: it is wrong.
    reward: f32[n, g], the weighted sum of the parts.
    added: f32[n, g], the part of `reward` that is added to entropy-shaped rewards: the sum of the
      parts other than "correct"; 0 for algorithms without entropy shaping.
    penalty: f32[n, g] <= 0, the length penalty.
    valid: bool[n, g]; `scored`, and not removed by the overlong filter.
    metrics: the mean of each part other than "correct", and the number of completions that are not
      scored.
  """

  correct: np.ndarray
  scored: np.ndarray
  reward: np.ndarray
  added: np.ndarray
  penalty: np.ndarray
  valid: np.ndarray
  metrics: dict[str, float]

  @property
  def rewards(self) -> Rewards:
    """What the update reads, in host arrays."""
    return Rewards(
      self.correct, self.reward - self.added, self.penalty + self.added, self.valid, self.scored
    )


class EndedCompletion(NamedTuple):
  """A completion that is no longer being sampled."""

  problem: int  # index of its problem in the batch
  index: int  # index within the problem's group
  tokens: np.ndarray  # i32[length]
  finished: bool  # True if a stop token or a stop string ended it, False if it was cut off

  @classmethod
  def of(
    cls, buffer: CompletionBuffer, i: int, j: int, problem: int, first: int = 0
  ) -> EndedCompletion:
    """Returns completion j of row i of a buffer; it has the index `first` + j in its group."""
    return cls(problem, first + j, buffer.completion(i, j), bool(buffer.finished[i, j]))


class RewardManager:
  """Scores completions according to the config.

  `PendingRewards` calls it on `thread` while other completions are still being sampled.

  A user's verifier (the argument `verifier`, or `reward.verifier` = module:function) replaces the
  built-in ones. A score above 0.5 is correct; the reward part "verifier" is the score itself. Parts
  of `reward.parts` may be users' functions too.

  Each function is called once per problem, when all completions of the problem have ended, as
  `function(prompts, completions, answers, extras)` with equally long lists of text, text, text and
  dict. It returns a number or bool for each completion, or None for no verdict. If it raises,
  returns a list of the wrong length or exceeds `reward.function_timeout_s`, the problem's
  completions have no verdict; a completion for which it returns NaN, or a number that is too large
  for statistics in float32, has none either. The first failure of each function is printed.

  Attributes:
    thread: runs the verifiers and functions.

  Raises:
    UserError: a part does not exist, or a function cannot be imported.
  """

  def __init__(self, config: Config, verifier: RewardFunction | None = None):
    section = config.reward
    self._config = config
    self._verifier = verifier
    if verifier is None and section.verifier:
      self._verifier = import_function(section.verifier)
    self._functions = {
      name: PARTS.get(name) or import_function(name)
      for name, _ in section.weighted
      if name not in BUILTIN_PARTS
    }
    self._call = FunctionCaller(section.function_timeout_s)
    self.thread = ThreadPoolExecutor(1, "gtpo-reward")

  @property
  def has_own_verifier(self) -> bool:
    """Whether a user's function decides instead of the built-in verifiers."""
    return self._verifier is not None

  def close(self) -> None:
    """Shuts the thread down and cancels queued scoring."""
    self.thread.shutdown(cancel_futures=True)

  def verify(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[float]:
    """Returns the verdict on each completion by the verifier for its problem's kind.

    1.0 is correct, 0.0 incorrect, NaN no verdict. All are NaN if a user's verifier is set:
    `combine` then uses its scores.
    """
    verdicts = [math.nan] * len(texts)
    if self._verifier:
      return verdicts
    for kind in {problem.kind for problem in problems}:
      # All completions of a kind at once: a verifier may check them in parallel.
      rows = [i for i, problem in enumerate(problems) if problem.kind == kind]
      results = VERIFIERS[kind](
        [texts[i] for i in rows],
        [problems[i].answer for i in rows],
        [problems[i].extra for i in rows],
        self._config.reward,
      )
      for i, verdict in zip(rows, results, strict=True):
        verdicts[i] = math.nan if verdict is None else float(verdict)
    return verdicts

  def call_functions(self, problem: Problem, texts: Sequence[str]) -> dict[str, list[float]]:
    """Calls the users' functions on all completions of a problem.

    Returns, for each function name, one value per completion (NaN for none); the values of a user's
    verifier are under `USER_VERIFIER`.
    """
    values = {
      name: self._call(name, function, problem, texts) for name, function in self._functions.items()
    }
    if self._verifier:
      name = self._config.reward.verifier
      values[USER_VERIFIER] = self._call(name, self._verifier, problem, texts)
    return values

  def combine(
    self,
    verdicts: np.ndarray,
    function_values: Sequence[dict[str, list[float]]],
    lengths: np.ndarray,
    finished: np.ndarray,
  ) -> RewardResult:
    """Combines verdicts and function values into rewards.

    Args:
      verdicts: f64[n, g] from `verify`.
      function_values: n results of `call_functions`.
      lengths: i32[n, g], tokens of each completion.
      finished: bool[n, g]; False if the completion was cut off, which counts as incorrect.
    """
    algorithm = self._config.resolved_algorithm
    settings = algorithm.settings
    wrong, right = algorithm.recipe.rewards

    def column(name: str) -> np.ndarray:
      rows = [values[name] for values in function_values]
      return np.asarray(rows, np.float64).reshape(finished.shape)

    if self._verifier:
      verdicts = column(USER_VERIFIER)
    scored = ~np.isnan(verdicts) | ~finished
    correct = finished & (verdicts > CORRECT_ABOVE)
    reward = np.zeros(finished.shape)
    added = np.zeros(finished.shape)
    terms = {}
    metrics = {}
    for name, weight in self._config.reward.weighted:
      if name == "correct":
        part = np.where(correct, right, wrong)
      else:
        part = verdicts if name == "verifier" else column(name)
        scored &= ~np.isnan(part)
        metrics[f"reward/part/{name}"] = _mean(part)
      with np.errstate(over="ignore", invalid="ignore"):  # sums that are too large: see below
        terms[name] = weight * np.nan_to_num(part)
        reward += terms[name]
        if algorithm.recipe.shaping.by_entropy and name != "correct":
          added += terms[name]
    too_large = ~(np.maximum(np.abs(reward), np.abs(added)) <= MAX_VALUE)
    if too_large.any():
      sizes = {name: np.abs(term[too_large]).max() for name, term in terms.items()}
      self._call.show_sum_once(self._config.reward.parts, sizes)
    reward = np.where(too_large, 0.0, reward)
    added = np.where(too_large, 0.0, added)
    scored &= ~too_large
    correct &= scored
    metrics["reward/no_verdict"] = float((~scored).sum())
    valid = scored & finished if settings.overlong_filter else scored
    if settings.length_penalty == "group_relative":
      penalty = group_relative(lengths, correct, valid, settings.gamma)
    else:
      max_tokens = self._config.sampling.max_tokens
      penalty = soft_overlong(lengths, max_tokens, settings.overlong_buffer)
    reward = reward.astype(np.float32)
    return RewardResult(correct, scored, reward, added.astype(np.float32), penalty, valid, metrics)


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
    self._function_values: list[dict[str, list[float]]] = [{} for _ in range(n)]
    self._missing = np.full(n, group)
    self._waiting: collections.deque[EndedCompletion] = collections.deque()
    self._work: list[Future[None]] = []

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
    completions = [self._waiting.popleft() for _ in range(len(self._waiting))]
    if not completions:
      return
    texts = self._decode([completion.tokens for completion in completions])
    problems = [self._problems[completion.problem] for completion in completions]
    verdicts = self._reward_manager.verify(problems, texts)
    for completion, text, verdict in zip(completions, texts, verdicts, strict=True):
      i, j, tokens, finished = completion
      self.texts[i][j] = text
      self.lengths[i, j] = len(tokens)
      self.finished[i, j] = finished
      self._verdicts[i, j] = verdict
      self._missing[i] -= 1
      if not self._missing[i]:
        self._function_values[i] = self._reward_manager.call_functions(
          self._problems[i], self.texts[i]
        )


def _mean(values: np.ndarray) -> float:
  """Returns the mean of the numbers; NaN if there are none."""
  return math.nan if np.isnan(values).all() else float(np.nanmean(values))
