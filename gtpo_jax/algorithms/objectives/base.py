"""What all surrogate objectives have in common.

An objective is a frozen dataclass of its settings, with their published values as defaults, and is
maximised. In the formulas, r is the importance ratio, A the advantage, pi and pi_old the
probability of the token under the trained and under the sampling policy, and sg(x) is x without a
gradient.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.objectives.ratios import LOG_RATIO_BOUND, RATIOS
from gtpo_jax.runtime.fields import Checked, one_of, setting

CLIP_RANGE = "the importance ratio is clipped to [1 - eps_low, 1 + eps_high]."
SELECTED = "the fraction of the tokens of a gradient update that are selected."


class ObjectiveInputs(NamedTuple):
  """What an objective is computed from. Values where `mask` is False have no meaning."""

  ratio: jax.Array  # f32[n, g, t], the importance ratio that the algorithm uses
  log_probs: jax.Array  # f32[n, g, t], nats, of the policy being trained
  log_probs_old: jax.Array  # f32[n, g, t], nats, of the policy that sampled the tokens
  advantages: jax.Array  # f32[n, g, t]
  mask: jax.Array  # bool[n, g, t], tokens in the loss
  selected: jax.Array | None = None  # bool[n, g, t], from the objective's `select`
  entropy: jax.Array | None = None  # f32[n, g, t], nats, of the sampling policy, for `select`

  @property
  def log_ratio(self) -> jax.Array:
    """f32[n, g, t], nats: log pi - log pi_old, clamped to +-20."""
    return jnp.clip(self.log_probs - self.log_probs_old, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


# The objective f32[n, g, t], and {metric name: the tokens that it counts, bool[n, g, t]}.
ObjectiveOutputs = tuple[jax.Array, dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Objective(Checked):
  """The base of the objectives that compute their own ratio from the log-probs.

  Attributes:
    name: the objective's name in `OBJECTIVES`.
    paper: the source.
    per_token: whether a token's objective depends only on that token's inputs.
    per_completion: whether all tokens of a completion must have the same advantage.
    select_needs: what `select` needs, of "entropy" and "key"; empty if the objective treats all
      tokens of a gradient update alike.
    ratios: the values of the setting `ratio` that the objective is defined for; empty if it has no
      such setting.
    ratio: the ratio whose diagnostics are logged, and with which a guide's tokens are trained.
  """

  prefix: ClassVar[str] = "algorithm."
  name: ClassVar[str]
  paper: ClassVar[str]
  per_token: ClassVar[bool] = True
  per_completion: ClassVar[bool] = False
  select_needs: ClassVar[tuple[str, ...]] = ()
  ratios: ClassVar[tuple[str, ...]] = ()
  ratio: ClassVar[str] = "token"

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    """Returns the objective of each token, and the tokens that the metrics count."""
    raise NotImplementedError

  def select(self, x: ObjectiveInputs, key: jax.Array | None) -> jax.Array:
    """Returns which tokens of a gradient update are treated differently, bool[n, g, t]."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class RatioObjective(Objective):
  """The base of the objectives of an importance ratio, which can be chosen."""

  ratios: ClassVar[tuple[str, ...]] = tuple(RATIOS)

  ratio: str = setting(
    "token",
    'the importance ratio: "token" (each token\'s own), "arithmetic" or "geometric" (the mean over '
    'the token ratios of a completion; these need one advantage per completion), or "gspo_token" '
    '(the value of "geometric", with a gradient per token).',
    one_of(RATIOS),
  )
