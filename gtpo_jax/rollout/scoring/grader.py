"""Grades completions by the judge of a run, alone or against each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from gtpo_jax.config.data_sections import RewardSection
from gtpo_jax.data.records import Problem
from gtpo_jax.rewards.judge.judge import Judge, pairs_of, win_rates
from gtpo_jax.runtime.distributed import broadcast_from_first, is_first_process
from gtpo_jax.runtime.errors import UserError


class Grader:
  """The judge of a run, or none."""

  def __init__(self, section: RewardSection):
    self._section = section
    self._judge = Judge(section.judge) if section.judge.base_url else None

  @property
  def has_judge(self) -> bool:
    """Whether there is a judge."""
    return self._judge is not None

  def probe(self, say: Callable[[str], None]) -> None:
    """Checks that the judge, if there is one, can be asked, and says so; otherwise closes it."""
    if self._judge:
      try:
        seconds = broadcast_from_first(self._judge.probe)
      except UserError:
        self.close()
        raise
      section = self._section.judge
      say(f"judge: {section.model} at {section.base_url} has replied in {seconds:.2f} s")

  def use_cache(self, folder: Path) -> None:
    """Keeps the judge's grades in a folder, and takes what it has already."""
    if self._judge and is_first_process():
      self._judge.use_cache(folder)

  @property
  def compares(self) -> bool:
    """Whether a judge compares the completions of a group with each other."""
    return bool(self._judge and self._section.judge.opponents)

  def grade(
    self,
    problems: Sequence[Problem],
    texts: Sequence[str],
    finished: Sequence[bool],
    evaluates: bool = False,
  ) -> list[float]:
    """Returns the judge's reward for each completion; NaN for none, and without a judge.

    A completion that was cut off is wrong, so it is only graded if the reward contains the grade.
    A judge that compares has rewards here only in an evaluation, whose completions it compares with
    the answers; a problem without an answer has none.
    """
    rewards = [math.nan] * len(texts)
    if not self._judge or (self.compares and not evaluates):
      return rewards
    rows = [i for i, ended in enumerate(finished) if ended or self._section.reads_grades]
    if self.compares:
      rows = [i for i in rows if problems[i].answer]
    prompts = [problems[i].messages[-1]["content"] for i in rows]
    answers = [problems[i].answer for i in rows]
    graded = [texts[i] for i in rows]
    if self.compares:  # in both orders
      both = self._judge.compare(prompts * 2, graded + answers, answers + graded)
      pairs = [(i, len(rows) + i) for i in range(len(rows))]
      pairs += [(second, first) for first, second in pairs]
      grades = win_rates(2 * len(rows), pairs, both)[: len(rows)]
    else:
      grades = self._judge.grade(prompts, graded, answers)
    for i, grade in zip(rows, grades, strict=True):
      rewards[i] = math.nan if grade is None else grade
    return rewards

  def compare(
    self, problems: Sequence[Problem], groups: Sequence[Sequence[str]]
  ) -> list[list[float]]:
    """Returns the win rate of each completion in its group; NaN for none.

    Args:
      problems: n problems.
      groups: [n][g], all completions of each.
    """
    opponents = self._section.judge.opponents
    pairs = [pairs_of(len(group), opponents) for group in groups]
    rows = [(k, *pair) for k, group_pairs in enumerate(pairs) for pair in group_pairs]
    rewards = iter(
      self._judge.compare(
        [problems[k].messages[-1]["content"] for k, _, _ in rows],
        [groups[k][first] for k, first, _ in rows],
        [groups[k][second] for k, _, second in rows],
      )
    )
    rates = []
    for group, group_pairs in zip(groups, pairs, strict=True):
      found = win_rates(len(group), group_pairs, [next(rewards) for _ in group_pairs])
      rates.append([math.nan if rate is None else rate for rate in found])
    return rates

  def take_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
    """Returns what the judge has measured since the last call; see `Judge.take_metrics`."""
    return self._judge.take_metrics()

  def close(self) -> None:
    """Ends requests to the judge."""
    if self._judge:
      self._judge.close()
