"""Scores completions: the verifier for each problem's kind, and the weighted parts of the reward.

If verification fails, a completion has no verdict. Unless it was cut off, which makes it incorrect,
it is then excluded from the loss and the statistics, and counted in `reward/no_verdict`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem
from gtpo_jax.environments.metrics import Tallies, episode_tallies
from gtpo_jax.environments.turns import MAX_NUMBER, Episode
from gtpo_jax.rewards import PARTS, group_relative, score, soft_overlong
from gtpo_jax.rollout.groups import RewardResult
from gtpo_jax.rollout.scoring.functions import (
  BUILTIN_PARTS,
  FunctionCaller,
  RewardFunction,
  checked_function,
  import_function,
)
from gtpo_jax.rollout.scoring.grader import Grader

CORRECT_ABOVE = 0.5  # a verifier's score above this counts as correct
MAX_THREADS = 64  # that wait for a judge
USER_VERIFIER = ""  # the key of a user's verifier in what `call_functions` returns


class RewardManager:
  """Scores completions according to the config.

  `PendingRewards` calls it on `thread` while other completions are still being sampled.

  A user's verifier (the argument `verifier`, or `reward.verifier` = module:function) replaces the
  built-in ones. A score above 0.5 is correct; the reward part "verifier" is the score itself. Parts
  of `reward.parts` may be users' functions too. A judge (`reward.judge`) replaces the verifiers in
  the same way, or is a part of the reward.

  Each function is called once per problem, when all completions of the problem have ended, as
  `function(prompts, completions, answers, extras)` with equally long lists of text, text, text and
  dict. It returns a number or bool for each completion, or None for no verdict. If it raises,
  returns a list of the wrong length or exceeds `reward.function_timeout_s`, the problem's
  completions have no verdict; a completion for which it returns NaN, or a number that is too large
  for statistics in float32, has none either. The first failure of each function is printed.

  Of an episode, the text of its last turn is scored, and a function with a parameter `episodes`
  gets them. Without a user's verifier and a judge, the environment's own verdict comes first. An
  episode that reached a limit of the model is incorrect, and one whose environment failed has no
  verdict, whatever else is said about it.

  Attributes:
    thread: runs the verifiers and functions. With a judge, there are several: each waits for the
      grades of some completions.
    grader: grades completions, if there is a judge.

  Raises:
    UserError: a part does not exist, a function cannot be imported, or the judge cannot be used.
  """

  def __init__(self, config: Config, verifier: RewardFunction | None = None):
    section = config.reward
    self._config = config
    self._verifier = None
    if verifier is not None:
      self._verifier = checked_function(verifier, section.verifier or "reward")
    elif section.verifier:
      self._verifier = import_function(section.verifier, "reward.verifier =")
    self._functions = {
      name: PARTS.get(name) or import_function(name)
      for name, _ in section.weighted
      if name not in BUILTIN_PARTS
    }
    self._call = FunctionCaller(section.function_timeout_s)
    self.grader = Grader(section)
    threads = min(section.judge.concurrency, MAX_THREADS) if self.grader.has_judge else 1
    self.thread = ThreadPoolExecutor(threads, "gtpo-reward")

  @property
  def has_own_verifier(self) -> bool:
    """Whether a user's function or the judge decides instead of the built-in verifiers."""
    return self._verifier is not None or self._config.reward.judge_decides

  def close(self) -> None:
    """Ends requests to the judge, shuts the thread down and cancels queued scoring."""
    self.grader.close()
    self.thread.shutdown(cancel_futures=True)

  def verify(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[float]:
    """Returns the verdict on each completion by the verifier for its problem's kind.

    1.0 is correct, 0.0 incorrect, NaN no verdict. All are NaN if a user's verifier is set or the
    judge decides: `combine` then uses their scores.
    """
    return [verdict for verdict, _ in self.score(problems, texts)]

  def score(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[tuple[float, float]]:
    """Returns the verdicts of `verify`, each with the value of the reward part "verifier"."""
    scores = [(math.nan, math.nan)] * len(texts)
    if self.has_own_verifier:
      return scores
    for kind in {problem.kind for problem in problems}:
      # All completions of a kind at once: a verifier may check them in parallel.
      rows = [i for i, problem in enumerate(problems) if problem.kind == kind]
      results = score(
        kind,
        [texts[i] for i in rows],
        [problems[i].answer for i in rows],
        [problems[i].extra for i in rows],
        self._config.reward,
      )
      for i, result in zip(rows, results, strict=True):
        if result is not None:
          scores[i] = (float(result.correct), result.number)
    return scores

  def call_functions(
    self, problem: Problem, texts: Sequence[str], episodes: Sequence[Episode] | None = None
  ) -> dict[str, list[float]]:
    """Calls the users' functions on all completions of a problem, and their episodes if any.

    Returns, for each function name, one value per completion (NaN for none); the values of a user's
    verifier are under `USER_VERIFIER`.
    """
    values = {
      name: self._call(name, function, problem, texts, episodes)
      for name, function in self._functions.items()
    }
    if self._verifier:
      name = self._config.reward.verifier
      values[USER_VERIFIER] = self._call(name, self._verifier, problem, texts, episodes)
    return values

  def combine(
    self,
    verdicts: np.ndarray,
    function_values: Sequence[dict[str, list[float]]],
    lengths: np.ndarray,
    finished: np.ndarray,
    grades: np.ndarray | None = None,
    numbers: np.ndarray | None = None,
    episodes: Sequence[Sequence[Episode]] | None = None,
  ) -> RewardResult:
    """Combines verdicts, grades and function values into rewards.

    Args:
      verdicts: f64[n, g] from `score`.
      function_values: n results of `call_functions`.
      lengths: i32[n, g], tokens of each completion that the policy drew.
      finished: bool[n, g]; False if the completion was cut off, which counts as incorrect.
      grades: f64[n, g] from `Grader.grade`, if there is a judge.
      numbers: f64[n, g] from `score`; None for the verdicts as numbers.
      episodes: [n][g]; None if completions are none.
    """
    section = self._config.reward
    algorithm = self._config.resolved_algorithm
    settings = algorithm.settings
    wrong, right = algorithm.recipe.rewards

    def column(name: str) -> np.ndarray:
      rows = [values[name] for values in function_values]
      return np.asarray(rows, np.float64).reshape(finished.shape)

    if self._verifier:
      verdicts = column(USER_VERIFIER)
      graded = verdicts[(verdicts > 0) & (verdicts < 1)]
      if graded.size and "verifier" not in dict(section.weighted):
        self._call.show_once(
          "graded rewards",
          f"the reward function returns numbers such as {graded[0]:g}, but reward.parts = "
          f"{section.parts!r} counts only whether they are above {CORRECT_ABOVE}; "
          "reward.parts=verifier learns from the numbers, with an algorithm such as grpo",
        )
    is_correct = verdicts > CORRECT_ABOVE
    if section.judge_decides:
      verdicts = grades
      is_correct = grades >= section.judge.threshold
    if self.has_own_verifier or numbers is None:
      numbers = verdicts
    of_episodes = functools.partial(_of_episodes, episodes, finished.shape)
    failed = ~finished | of_episodes(lambda episode: episode.failed)
    without_fault = of_episodes(lambda episode: episode.scored, True)
    scored = (~np.isnan(verdicts) | failed) & without_fault
    correct = is_correct & ~failed & without_fault
    reward = np.zeros(finished.shape)
    added = np.zeros(finished.shape)
    parts = []
    terms = {}
    tallies = []
    if episodes:
      played = [episode for row in episodes for episode in row]
      tallies.append(episode_tallies(played))
      own = self._verifier or self._functions  # functions may read the episodes' rewards
      if not own and "env" not in dict(section.weighted):
        says_more = [
          x for x in played if x.scored and x.reward not in (0.0, float(bool(x.correct)))
        ]
        if says_more:
          self._call.show_once(
            "rewards of the environment",
            f"the environment's rewards, such as {says_more[0].reward:g}, are not part of "
            f"reward.parts = {section.parts!r}, which counts only `correct`; add env",
          )
    if self.grader.has_judge:
      tallies += [Tallies.mean("judge/grade", grades), Tallies(*self.grader.take_metrics())]
    for name, weight in section.weighted:
      if name == "correct":
        part = np.where(correct, right, wrong)
      else:
        known = {"verifier": numbers, "judge": grades}
        if name == "env":
          known[name] = of_episodes(lambda episode: episode.reward, math.nan)
        part = known[name] if name in known else column(name)
        scored &= ~np.isnan(part)
        tallies.append(Tallies.mean(f"reward/part/{name}", part))
      with np.errstate(over="ignore", invalid="ignore"):  # sums that are too large: see below
        parts.append(np.nan_to_num(part))
        terms[name] = weight * parts[-1]
        reward += terms[name]
        if algorithm.recipe.shaping.from_verdict and name != "correct":
          added += terms[name]
    too_large = ~(np.maximum(np.abs(reward), np.abs(added)) <= MAX_NUMBER)
    if too_large.any():
      sizes = {name: np.abs(term[too_large]).max() for name, term in terms.items()}
      self._call.show_sum_once(section.parts, sizes)
    reward = np.where(too_large, 0.0, reward)
    added = np.where(too_large, 0.0, added)
    scored &= ~too_large
    correct &= scored
    tallies.append(Tallies({"reward/no_verdict": float((~scored).sum())}, {}))
    valid = scored & finished if settings.overlong_filter else scored
    if settings.length_penalty == "group_relative":
      penalty = group_relative(lengths, correct, valid, settings.gamma)
    else:
      max_tokens = self._config.sampling.max_tokens
      penalty = soft_overlong(lengths, max_tokens, settings.overlong_buffer)
    reward = reward.astype(np.float32)
    added = added.astype(np.float32)
    result = RewardResult(correct, scored, reward, added, penalty, valid, Tallies.total(tallies))
    if "parts" in algorithm.recipe.needs:
      weights = [[weight for _, weight in section.weighted]] * len(finished)
      return dataclasses.replace(
        result,
        parts=np.stack(parts, -1).astype(np.float32),
        part_weights=np.asarray(weights, np.float32),
      )
    if not algorithm.recipe.shaping.from_verdict:
      parts_differ = np.any([_differs(x, valid) for x in terms.values()], axis=0)
      if (parts_differ & ~_differs(reward + penalty, valid)).any():
        self._call.show_once(
          f"the parts {section.parts}",
          f"the parts of reward.parts = {section.parts!r} differ in a group whose sums are all "
          "equal, so the group teaches nothing; change a weight, or normalise each part with "
          "algorithm.name=gdpo",
        )
    return result


def _differs(x: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """Returns the groups of x [n, g] whose values are not all equal but for rounding, bool[n]."""
  low = np.where(valid, x, np.inf).min(1, initial=np.inf)
  high = np.where(valid, x, -np.inf).max(1, initial=-np.inf)
  return high - low > 1e-6 * np.maximum(np.abs(low), np.abs(high))


def _of_episodes(
  episodes: Sequence[Sequence[Episode]] | None,
  shape: tuple[int, ...],
  value: Callable[[Episode], float | bool],
  without: float | bool = False,
) -> np.ndarray:
  """Returns the value of each episode, [n, g]; `without` if there are none."""
  if episodes is None:
    return np.full(shape, without)
  return np.asarray([[value(episode) for episode in row] for row in episodes]).reshape(shape)
