"""Objectives that treat some tokens of a gradient update differently."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.objectives.base import (
  CLIP_RANGE,
  SELECTED,
  ObjectiveInputs,
  ObjectiveOutputs,
  RatioObjective,
)
from gtpo_jax.algorithms.objectives.clipped import Clip
from gtpo_jax.algorithms.selection import covariance_band, highest_covariance, top_share
from gtpo_jax.arrays import masked_mean
from gtpo_jax.runtime.fields import ABOVE_0, AT_LEAST_0, FINITE, SHARE, setting

_BAND = "tokens are selected if their covariance term lies between cov_low and cov_high."


@dataclasses.dataclass(frozen=True)
class ClipCov(Clip):
  """The clipped objective, and 0 for the selected tokens (Clip-Cov, 2505.22617).

  These are random tokens that are not clipped and whose covariance term lies in a band.
  """

  name: ClassVar[str] = "clip_cov"
  paper: ClassVar[str] = "2505.22617"
  select_needs: ClassVar[tuple[str, ...]] = ("key",)

  eps_high: float = setting(0.2, CLIP_RANGE, ABOVE_0)
  selected_share: float = setting(2e-4, SELECTED, SHARE)
  cov_low: float = setting(1.0, _BAND, FINITE)
  cov_high: float = setting(5.0, _BAND, FINITE)

  def __post_init__(self):
    super().__post_init__()
    self._check_order("cov_low", "cov_high")

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    objective, metrics = super().__call__(x)
    return jnp.where(x.selected, 0.0, objective), metrics | {"clip/selected": x.selected}

  def select(self, x: ObjectiveInputs, key: jax.Array | None) -> jax.Array:
    _, clipped = super().__call__(x)
    free = x.mask & ~clipped["clip/low"] & ~clipped["clip/high"]
    band = (self.cov_low, self.cov_high)
    return covariance_band(x.advantages, x.log_probs, x.mask, free, band, self.selected_share, key)


@dataclasses.dataclass(frozen=True)
class KlCov(RatioObjective):
  """`r A`, minus `kl_cov_coef |log r|` for the selected tokens (KL-Cov, 2505.22617).

  The selected tokens are those with the largest covariance terms.
  """

  name: ClassVar[str] = "kl_cov"
  paper: ClassVar[str] = "2505.22617"
  select_needs: ClassVar[tuple[str, ...]] = ("key",)

  selected_share: float = setting(2e-3, SELECTED, SHARE)  # of 7B; 2e-4 for 32B
  kl_cov_coef: float = setting(1.0, "the weight of |log r| for the selected tokens.", AT_LEAST_0)

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    # |log r| with the derivative 0 at r = 1, as in PyTorch.
    sign = jax.lax.stop_gradient(jnp.sign(x.log_ratio))
    penalty = self.kl_cov_coef * sign * x.log_ratio
    objective = x.ratio * x.advantages - jnp.where(x.selected, penalty, 0.0)
    return objective, {"clip/selected": x.selected}

  def select(self, x: ObjectiveInputs, key: jax.Array | None) -> jax.Array:
    return highest_covariance(x.advantages, x.log_probs, x.mask, self.selected_share, key)


@dataclasses.dataclass(frozen=True)
class Stare(Clip):
  """The clipped objective, times `surprise_weight` for the selected tokens (STARE, 2606.19236).

  The selected tokens are the most surprising ones of those with a positive advantage.
  """

  name: ClassVar[str] = "stare"
  paper: ClassVar[str] = "2606.19236"
  select_needs: ClassVar[tuple[str, ...]] = ("entropy",)

  selected_share: float = setting(
    0.1, "the fraction of the tokens with a positive advantage that are selected.", SHARE
  )
  surprise_weight: float = setting(1.1, "multiplies the objective of the selected tokens.", ABOVE_0)
  entropy_gate: float = setting(
    0.3, "select tokens only while the mean entropy is below this value, in nats.", AT_LEAST_0
  )

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    objective, metrics = super().__call__(x)
    weight = jnp.where(x.selected, self.surprise_weight, 1.0)
    return weight * objective, metrics | {"clip/selected": x.selected}

  def select(self, x: ObjectiveInputs, key: jax.Array | None) -> jax.Array:
    rewarded = x.mask & (x.advantages > 0)
    chosen = top_share(-x.log_probs, rewarded, self.selected_share)
    return chosen & (masked_mean(x.entropy, x.mask) < self.entropy_gate)
