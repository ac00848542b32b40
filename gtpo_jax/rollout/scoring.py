"""Completions to verdicts: the verifier of each problem's kind, and the weighted parts of the reward.

A verdict that cannot be reached is None: its completion takes no part in loss and statistics, and is counted. It never becomes a 0.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import math
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from gtpo_jax.arrays import Rewards
from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem
from gtpo_jax.rewards import PARTS, VERIFIERS, group_relative, soft_overlong
from gtpo_jax.runtime.distributed import broadcast_from_first, is_first_process
from gtpo_jax.runtime.errors import UserError, first_line

OWN = ("correct", "verifier")  # parts made of the verdicts themselves

# prompts, completions, answers, extras -> a number (or None) each
RewardFunction = Callable[
  [Sequence[str], Sequence[str], Sequence[str], Sequence[dict]], Sequence[float | None]
]


@dataclasses.dataclass(frozen=True)
class RewardResult:
  """What was found of one batch, on the host."""

  correct: np.ndarray  # bool[n, g]; False where there is no verdict
  reached: np.ndarray  # bool[n, g]; False where there is no verdict
  reward: np.ndarray  # f32[n, g], the weighted sum; what baselines normalise
  penalty: np.ndarray  # f32[n, g] <= 0
  valid: np.ndarray  # bool[n, g]; reached, and not filtered
  metrics: dict[str, float]  # each part's mean, and how many verdicts were not reached

  @property
  def verdicts(self) -> Rewards:
    """What the update learns from, in host arrays."""
    return Rewards(self.correct, self.reward, self.penalty, self.valid)


class RewardManager:
  """Judges completions as the config says, on a thread of its own, while others are still being sampled.

  `reward.verifier` = module:function, or the function `verifier`, decides right and wrong instead of the problems' kinds: above 0.5 is
  right; the part "verifier" is the number itself. Parts of `reward.parts` may be such functions too. Each is called once for each
  problem, when all its completions are written, as `function(prompts, completions, answers, extras)`, equally long lists of text, text,
  text and dict, and returns one number (or bool) for each completion, or None where it has none. What it raises is shown once; then, as
  with a list of another length, NaN or None, or where it takes longer than `reward.function_timeout_s`, the completions concerned are
  left out and counted.

  Raises:
    UserError: a part that does not exist or a function that cannot be imported.
  """

  def __init__(self, config: Config, verifier: RewardFunction | None = None):
    self._config = config
    section = config.reward
    self._functions = {
      name: PARTS.get(name) or user_function(name)
      for name, _ in section.weighted
      if name not in OWN
    }
    self.verifier = verifier or (user_function(section.verifier) if section.verifier else None)
    self._shown: set[str] = set()
    self.thread = ThreadPoolExecutor(1, "gtpo-reward")

  def __call__(
    self,
    problems: Sequence[Problem],
    texts: Sequence[Sequence[str]],
    lengths: np.ndarray,
    finished: np.ndarray,
  ) -> RewardResult:
    """Judges texts [n][g], with i32[n, g] lengths in tokens and bool[n, g] whether each ended by itself: else it is wrong."""
    verdicts = np.full(finished.shape, np.nan)
    places = [(i, j) for i, row in enumerate(texts) for j in range(len(row))]
    for place, verdict in zip(
      places,
      self.verify([problems[i] for i, _ in places], [texts[i][j] for i, j in places]),
      strict=True,
    ):
      verdicts[place] = verdict
    rows = [self.of_group(problem, row) for problem, row in zip(problems, texts, strict=True)]
    return self.weigh(verdicts, rows, lengths, finished)

  def close(self) -> None:
    """Ends its thread; what waits is not judged any more."""
    self.thread.shutdown(cancel_futures=True)

  def verify(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[float]:
    """The verdict of each completion by its problem's kind, f64, NaN for none; only NaN where a user's function decides."""
    verdicts = [math.nan] * len(texts)
    for kind in (
      set() if self.verifier else {problem.kind for problem in problems}
    ):  # together, so that a verifier may work side by side
      places = [i for i, problem in enumerate(problems) if problem.kind == kind]
      found = VERIFIERS[kind](
        [texts[i] for i in places],
        [problems[i].answer for i in places],
        [problems[i].extra for i in places],
        self._config.reward,
      )
      for i, verdict in zip(places, found, strict=True):
        verdicts[i] = math.nan if verdict is None else float(verdict)
    return verdicts

  def of_group(self, problem: Problem, texts: Sequence[str]) -> dict[str, list[float]]:
    """What the functions say of all completions of a problem: by name the value of each, NaN for none; "" is the user's verifier."""
    functions = self._functions | ({"": self.verifier} if self.verifier else {})
    return {
      name: self._call(name or self._config.reward.verifier, function, problem, texts)
      for name, function in functions.items()
    }

  def weigh(
    self,
    verdicts: np.ndarray,
    rows: Sequence[dict[str, list[float]]],
    lengths: np.ndarray,
    finished: np.ndarray,
  ) -> RewardResult:
    """Puts the verdicts f64[n, g] of `verify` and what `of_group` gave, one a problem, together."""
    s = self._config.algorithm_built.settings
    (wrong, right) = self._config.algorithm_built.recipe.rewards
    table = lambda name: np.asarray([row[name] for row in rows], np.float64).reshape(finished.shape)
    verdicts = table("") if self.verifier else verdicts
    reached = ~np.isnan(verdicts) | ~finished
    correct = finished & (verdicts > 0.5)
    reward = np.zeros(finished.shape)
    metrics = {}
    for name, weight in self._config.reward.weighted:
      part = (
        np.where(correct, right, wrong)
        if name == "correct"
        else verdicts
        if name == "verifier"
        else table(name)
      )
      if name != "correct":
        reached &= ~np.isnan(part)
        metrics[f"reward/part/{name}"] = (
          float(np.nanmean(part)) if not np.isnan(part).all() else math.nan
        )
      reward += weight * np.nan_to_num(part)
    correct &= reached
    metrics["reward/no_verdict"] = float((~reached).sum())
    valid = reached & finished if s.overlong_filter else reached
    if s.length_penalty == "group_relative":
      penalty = group_relative(lengths, correct, valid, s.gamma)
    else:
      penalty = soft_overlong(lengths, self._config.sampling.max_tokens, s.overlong_buffer)
    return RewardResult(correct, reached, reward.astype(np.float32), penalty, valid, metrics)

  def _call(
    self, name: str, function: RewardFunction, problem: Problem, texts: Sequence[str]
  ) -> list[float]:
    """What a function says of each completion of a problem; NaN for all of them where it fails."""
    n = len(texts)
    given = (
      [problem.messages[-1]["content"]] * n,
      list(texts),
      [problem.answer] * n,
      [dict(problem.extra) for _ in texts],
    )
    try:
      values = [
        None if value is None else float(value)
        for value in _within(self._config.reward.function_timeout_s, function, *given)
      ]
      if len(values) != n:
        raise ValueError(f"returned {len(values)} values for {n} completions")
    except (
      Exception,
      SystemExit,
    ):  # whatever the user's own code raises; a reward is no place to end a run from
      self._show_once(name, traceback.format_exc())
      return [math.nan] * n
    if odd := [value for value in values if value is not None and not math.isfinite(value)]:
      self._show_once(name, f"it returned {odd[0]}\n")
    return [math.nan if value is None or not math.isfinite(value) else value for value in values]

  def _show_once(self, name: str, what: str) -> None:
    if name not in self._shown:
      self._shown.add(name)
      print(
        f"gtpo: reward function {name!r} failed; its completions are left out and counted as reward/no_verdict:\n{what}",
        file=sys.stderr,
        end="",
        flush=True,
      )


class PendingRewards:
  """The judging of one batch, begun before the batch is whole: completions are put in as they end.

  Of several processes the first judges, and tells the others: verdicts that time out on one alone would let them part.
  """

  def __init__(
    self,
    reward_manager: RewardManager,
    problems: Sequence[Problem],
    group: int,
    read: Callable[[Sequence[np.ndarray]], list[str]],
  ):
    """Args:
    judge: says what is right.
    problems: [n].
    group: completions of each problem.
    read: rows of token ids to text.
    """
    self._judge = reward_manager
    self._problems = problems
    self._read = read
    n = len(problems)
    self.texts = [[""] * group for _ in range(n)]
    self.lengths = np.zeros((n, group), np.int32)
    self.finished = np.zeros((n, group), bool)
    self._verdicts = np.full((n, group), np.nan)
    self._rows = [{} for _ in range(n)]
    self._missing = np.full(n, group)
    self._waiting: collections.deque[tuple[tuple[int, int], np.ndarray, bool]] = collections.deque()
    self._work: list[Future[None]] = []

  def put(self, ended: Sequence[tuple[tuple[int, int], np.ndarray, bool]]) -> None:
    """Takes completions that have ended: (problem, number), their tokens i32[:], and whether they ended by themselves."""
    if ended and is_first_process():
      self._waiting.extend(ended)
      self._work.append(self._judge.thread.submit(self._catch_up))

  def result(self) -> RewardResult:
    """What was found, when all is judged, the same on every process. Raises what judging raised."""
    with jax.profiler.TraceAnnotation("reward"):
      told = broadcast_from_first(self._found)
    self.texts = told["texts"]
    self.lengths = told["lengths"]
    self.finished = told["finished"]
    return RewardResult(**told["judgement"])

  def _found(self) -> dict[str, Any]:
    for work in self._work:
      work.result()
    return {
      "judgement": vars(self._judge.weigh(self._verdicts, self._rows, self.lengths, self.finished)),
      "texts": self.texts,
      "lengths": self.lengths,
      "finished": self.finished,
    }

  @functools.partial(jax.profiler.annotate_function, name="reward")
  def _catch_up(self) -> None:
    """Judges all that waits: in one go, so that what ends while the judge is busy is judged side by side."""
    ended = [self._waiting.popleft() for _ in range(len(self._waiting))]
    if not ended:
      return
    texts = self._read([tokens for _, tokens, _ in ended])
    verdicts = self._judge.verify([self._problems[i] for (i, _), *_ in ended], texts)
    for ((i, j), tokens, finished), text, verdict in zip(ended, texts, verdicts, strict=True):
      self.texts[i][j] = text
      self.lengths[i, j] = len(tokens)
      self.finished[i, j] = finished
      self._verdicts[i, j] = verdict
      self._missing[i] -= 1
      if not self._missing[i]:
        self._rows[i] = self._judge.of_group(self._problems[i], self.texts[i])


def _within(limit_s: float, function: Callable[..., Any], *given: Any) -> Any:
  """What a function gives or raises, on a thread that is left to itself where it takes longer. Raises TimeoutError there."""
  answer: Future[Any] = Future()

  def work() -> None:
    try:
      answer.set_result(function(*given))
    except BaseException as error:  # SystemExit would end this thread without a word
      answer.set_exception(error)

  threading.Thread(
    target=work, name="gtpo reward function", daemon=True
  ).start()  # one that hangs must not keep the program from ending
  try:
    return answer.result(limit_s)
  except TimeoutError:
    if answer.done():  # the function's own
      raise
    raise TimeoutError(f"it took longer than {limit_s:g} s (reward.function_timeout_s)") from None


def user_function(name: str) -> RewardFunction:
  """The function that `module:function` names.

  Raises:
    UserError: it is not of that form, or cannot be imported.
  """
  module, colon, function = name.partition(":")
  if not (module and colon and function):
    raise UserError(
      f"reward part {name!r} is none of {', '.join([*OWN, *PARTS])}, nor a function named as module:function"
    )
  if "" not in sys.path:
    sys.path.insert(0, "")  # a module beside the config, as `python -m` would find it
  try:
    found = getattr(importlib.import_module(module), function)
  except Exception as error:  # an import runs the user's code
    raise UserError(
      f"reward function {name!r} cannot be imported: {type(error).__name__}: {first_line(error)}"
    ) from error
  if not callable(found):
    raise UserError(
      f"reward function {name!r} is of type {type(found).__name__} and cannot be called"
    )
  return found
