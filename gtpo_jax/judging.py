"""Completions to verdicts: the verifier of each problem's kind, and the weighted parts of the reward.

A verdict that cannot be reached is None: its completion takes no part in loss and statistics, and is counted. It never becomes a 0.
"""
from __future__ import annotations

import dataclasses
import importlib
import math
import sys
import traceback
from collections.abc import Callable, Sequence

import numpy as np

from gtpo_jax.arrays import Verdicts
from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem
from gtpo_jax.errors import UserError, first_line
from gtpo_jax.rewards import PARTS, VERIFIERS, group_relative, soft_overlong

# prompts, completions, answers, extras -> a number (or None) each
RewardFunction = Callable[[Sequence[str], Sequence[str], Sequence[str], Sequence[dict]], Sequence[float | None]]


@dataclasses.dataclass(frozen=True)
class Judgement:
  """What was found of one batch, on the host."""

  correct: np.ndarray           # bool[n, g]; False where there is no verdict
  reached: np.ndarray           # bool[n, g]; False where there is no verdict
  reward: np.ndarray            # f32[n, g], the weighted sum; what baselines normalise
  penalty: np.ndarray           # f32[n, g] <= 0
  counted: np.ndarray           # bool[n, g]; reached, and not filtered
  metrics: dict[str, float]     # each part's mean, and how many verdicts were not reached

  @property
  def verdicts(self) -> Verdicts:
    """What the update learns from, in host arrays."""
    return Verdicts(self.correct, self.reward, self.penalty, self.counted)


class Judge:
  """Judges batches as the config says.

  `reward.verifier` = module:function decides right and wrong instead of the problems' kinds; parts of `reward.parts` may be such
  functions too. Each is called as `function(prompts, completions, answers, extras)`, equally long lists of text, text, text and dict,
  and returns one number (or bool) for each completion, or None where it has none. What it raises is shown once; then, as with a list of
  another length, NaN or None, the completions concerned are left out and counted.

  Raises:
    UserError: a part that does not exist or a function that cannot be imported.
  """

  def __init__(self, config: Config):
    self._config, section = config, config.reward
    self._parts = [(name, weight, PARTS.get(name) or (None if name == "correct" else user_function(name)))
                   for name, weight in section.weighted]
    self._verifier = user_function(section.verifier) if section.verifier else None
    self._shown: set[str] = set()

  def __call__(self, problems: Sequence[Problem], texts: Sequence[Sequence[str]], lengths: np.ndarray, finished: np.ndarray) -> Judgement:
    """Judges texts [n][g], with i32[n, g] lengths in tokens and bool[n, g] whether each ended by itself: else it is wrong."""
    s, (wrong, right) = self._config.algorithm_object.settings, self._config.algorithm_object.recipe.rewards
    verdicts = self._table(self._verify(problems, texts), finished.shape)
    reached = ~np.isnan(verdicts) | ~finished
    correct = finished & (verdicts > 0.5)
    reward, metrics = np.zeros(finished.shape), {}
    for name, weight, function in self._parts:
      if function is None:
        part = np.where(correct, right, wrong)
      else:
        part = self._table(self._call(name, function, problems, texts), finished.shape)
        reached &= ~np.isnan(part)
        metrics[f"reward/part/{name}"] = float(np.nanmean(part)) if not np.isnan(part).all() else math.nan
      reward += weight * np.nan_to_num(part)
    correct &= reached
    metrics["reward/no_verdict"] = float((~reached).sum())
    counted = reached & finished if s.overlong_filter else reached
    if s.length_penalty == "group_relative":
      penalty = group_relative(lengths, correct, counted, s.gamma)
    else:
      penalty = soft_overlong(lengths, self._config.sampling.max_tokens, s.overlong_buffer)
    return Judgement(correct, reached, reward.astype(np.float32), penalty, counted, metrics)

  def _verify(self, problems: Sequence[Problem], texts: Sequence[Sequence[str]]) -> list[float | None]:
    """A verdict for each completion, row by row."""
    if self._verifier:
      return self._call(self._config.reward.verifier, self._verifier, problems, texts)
    verdicts: list[float | None] = [None] * sum(map(len, texts))
    flat = [(problem, text) for problem, row in zip(problems, texts, strict=True) for text in row]
    for kind in {problem.kind for problem in problems}:  # each verifier gets its whole batch, so that it may work side by side
      places = [i for i, (problem, _) in enumerate(flat) if problem.kind == kind]
      found = VERIFIERS[kind]([flat[i][1] for i in places], [flat[i][0].answer for i in places], [flat[i][0].extra for i in places],
                              self._config.reward)
      for i, verdict in zip(places, found, strict=True):
        verdicts[i] = verdict
    return verdicts

  def _call(self, name: str, function: RewardFunction, problems: Sequence[Problem], texts: Sequence[Sequence[str]]) -> list[float | None]:
    """What a user's function says of each completion; None for all of them where it fails."""
    prompts, completions, answers, extras = [], [], [], []
    for problem, row in zip(problems, texts, strict=True):
      for text in row:
        prompts.append(problem.messages[-1]["content"])
        completions.append(text)
        answers.append(problem.answer)
        extras.append(dict(problem.extra))
    try:
      values = [None if value is None else float(value) for value in function(prompts, completions, answers, extras)]
      if len(values) != len(completions):
        raise ValueError(f"returned {len(values)} values for {len(completions)} completions")
    except (Exception, SystemExit):  # whatever the user's own code raises; a reward is no place to end a run from
      self._show_once(name, traceback.format_exc())
      return [None] * len(completions)
    if odd := [value for value in values if value is not None and not math.isfinite(value)]:
      self._show_once(name, f"it returned {odd[0]}\n")
    return [None if value is None or not math.isfinite(value) else value for value in values]

  def _show_once(self, name: str, what: str) -> None:
    if name not in self._shown:
      self._shown.add(name)
      print(f"gtpo: reward function {name!r} failed; its completions are left out and counted as reward/no_verdict:\n{what}",
            file=sys.stderr, end="", flush=True)

  def _table(self, values: Sequence[float | None], shape: tuple[int, ...]) -> np.ndarray:
    """Values as f64[n, g], NaN for None."""
    return np.asarray([np.nan if value is None else float(value) for value in values], np.float64).reshape(shape)


def user_function(name: str) -> RewardFunction:
  """The function that `module:function` names.

  Raises:
    UserError: it is not of that form, or cannot be imported.
  """
  module, colon, function = name.partition(":")
  if not (module and colon and function):
    raise UserError(f"reward part {name!r} is none of {', '.join(['correct', *PARTS])}, nor a function named as module:function")
  if "" not in sys.path:
    sys.path.insert(0, "")  # a module beside the config, as `python -m` would find it
  try:
    found = getattr(importlib.import_module(module), function)
  except Exception as error:  # an import runs the user's code
    raise UserError(f"reward function {name!r} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
  if not callable(found):
    raise UserError(f"reward function {name!r} is of type {type(found).__name__} and cannot be called")
  return found
