"""Monte-Carlo values: prefixes of completions are continued, and their continuations are scored.

The value of a prefix is the mean reward of its continuations by the policy that drew it, scored as
the completions of the run are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from gtpo_jax.algorithms import segment_gains
from gtpo_jax.algorithms.continuations import LineContinuations
from gtpo_jax.data.records import Problem
from gtpo_jax.rollout.groups import Group
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.scoring.pending import PendingRewards
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.sampling.completion import Completion, Prompt
from gtpo_jax.sampling.settings import SamplingParams


class Values(NamedTuple):
  """The values of the prefixes of a batch's completions."""

  # f64[n, g, c], the mean reward of the continuations of each prefix, penalties included; NaN
  # where none has a verdict, and for prefixes that a completion does not have
  mean: np.ndarray
  error: np.ndarray  # f64[n, g, c], its standard error; NaN for fewer than two verdicts
  tokens: int  # the tokens that were drawn


@dataclasses.dataclass(frozen=True)
class ValueEstimator:
  """Measures values of prefixes by continuations."""

  worker: RolloutWorker  # decodes completions
  reward_manager: RewardManager  # scores the continuations. Each prefix is a group of its own
  policy: Policy  # continues the prefixes
  sampling_params: SamplingParams  # how tokens are drawn
  stopping: Callable[[], bool] = lambda: False  # called after each chunk of tokens

  def values(
    self,
    groups: Sequence[Group],
    cuts: Sequence[Sequence[Sequence[int]]],
    count: int,
    keys: np.ndarray,
  ) -> Values:
    """Returns the values of prefixes, from `count` continuations of each.

    An empty prefix is continued once for its group.

    Args:
      groups: n groups, whose completions have ended and are no episodes.
      cuts: [n][g], the lengths of the prefixes of each completion, each below the completion's.
      count: continuations of a prefix.
      keys: u32[n, g, 2], PRNG key data; the number of the prefix and of the continuation are
        folded in.
    """
    widest = max((len(x) for row in cuts for x in row), default=0)
    first: dict[int, int] = {}  # the completion whose keys the empty prefix of a group takes
    having: dict[tuple[int, int, int], list[tuple[int, int]]] = {}  # who has a prefix, as which one
    for i, row in enumerate(cuts):
      for j, lengths in enumerate(row):
        for k, length in enumerate(lengths):
          owner = j if length else first.setdefault(i, j)
          having.setdefault((i, owner, length), []).append((j, k))
    mean = np.full((len(groups), len(cuts[0]) if cuts else 0, widest), np.nan)
    error = mean.copy()
    if not having:
      return Values(mean, error, 0)
    engine = self.policy.engine
    owners = dict.fromkeys((i, j) for i, j, _ in having)
    derive = lambda key: engine.completion_keys(jax.random.wrap_key_data(key), widest, count)
    derived = {place: derive(keys[place]) for place in owners}
    prompts = [Prompt(group.completions[0].prompt.tokens) for group in groups]
    prefixes = []
    for (i, j, length), ((_, k), *_) in having.items():
      completion = groups[i].completions[j]
      prefixes.append(
        [_continuation(completion, prompts[i], length, key) for key in derived[i, j][k]]
      )
    rewards = self._rewards(groups, [groups[i].problem for i, _, _ in having], prefixes, count)
    for row, (i, _, _), places in zip(rewards, having, having.values(), strict=True):
      known = row[~np.isnan(row)]
      for j, k in places:
        mean[i, j, k] = known.mean() if known.size else np.nan
        error[i, j, k] = known.std(ddof=1) / np.sqrt(known.size) if known.size > 1 else np.nan
    drawn = sum(completion.length for row in prefixes for completion in row)
    return Values(mean, error, drawn - count * sum(length for _, _, length in having))

  def _rewards(
    self,
    groups: Sequence[Group],
    problems: Sequence[Problem],
    prefixes: Sequence[Sequence[Completion]],
    count: int,
  ) -> np.ndarray:
    """Samples the continuations of prefixes; returns their rewards f64[prefixes, count].

    Penalties are included; NaN is no verdict.
    """
    session = self.policy.engine.session(
      self.policy.params,
      [group.completions for group in groups],
      self.sampling_params,
      longest_prompt=max(len(group.completions[0].prompt.tokens) for group in groups),
    )
    pending = PendingRewards(
      self.reward_manager, dict(enumerate(problems)), count, self.worker.decode
    )
    rows: dict[Prompt, list[Completion]] = {}
    for number, row in enumerate(prefixes):
      for index, completion in enumerate(row):
        completion.group = number
        completion.index = index
      rows.setdefault(row[0].prompt, []).extend(row)
    with jax.profiler.TraceAnnotation("sample"):
      for prompt, row in rows.items():
        session.submit(prompt, row)
      while session.busy:
        pending.put(session.step())
        if self.stopping():
          raise Stopped
    result = pending.result(self.stopping)
    rewards = (result.reward + result.penalty).astype(np.float64)
    return np.where(result.scored, rewards, np.nan)

  def gains(
    self, part: LineContinuations, groups: Sequence[Group], keys: np.ndarray, t: int
  ) -> tuple[np.ndarray, dict[str, float]]:
    """Returns `Rewards.value_gains` of groups, f32[n, g, t], and metrics.

    The last value of a completion is its own reward.

    Args:
      part: says where completions are cut, and how often each prefix is continued.
      groups, keys: as in `values`.
      t: completion positions.
    """
    cuts = [
      [
        part.cuts(completion.arrays()["log_probs"], self.worker.chat.pieces(completion.tokens))
        for completion in group.completions
      ]
      for group in groups
    ]
    prefixes = [
      [[0, *x] if valid else [] for x, valid in zip(row, group.rewards.valid, strict=True)]
      for row, group in zip(cuts, groups, strict=True)
    ]
    values = self.values(groups, prefixes, part.continuations, keys)
    gains = np.full((*values.mean.shape[:2], t), np.nan, np.float32)
    for i, group in enumerate(groups):
      rewards = group.rewards
      for j, completion in enumerate(group.completions):
        if not rewards.valid[j]:
          continue
        before = values.mean[i, j, : len(prefixes[i][j])]
        last = rewards.reward[j] + rewards.penalty[j]
        m = completion.length
        found = segment_gains([*before, last], cuts[i][j], m)
        gains[i, j, :m] = np.where(part.learned(completion.arrays()["log_probs"]), found, np.nan)
    known = values.error[~np.isnan(values.error)]
    counts = [len(x) - 1 for row in prefixes for x in row if x]
    return gains, {
      "continuations/tokens": float(values.tokens),
      "continuations/cuts": float(np.mean(counts)) if counts else np.nan,
      "continuations/error": float(known.mean()) if known.size else np.nan,
    }


def _continuation(
  completion: Completion, prompt: Prompt, length: int, key: np.ndarray
) -> Completion:
  """Returns a completion that continues the first `length` tokens of another one."""
  continuation = Completion(
    prompt, key, completion.limit, completion.stop, route_shape=completion.route_shape
  )
  if length:
    prefix = {name: x[:length] for name, x in completion.arrays().items()}
    continuation.replace(prefix, finished=False)
  return continuation
