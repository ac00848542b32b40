"""FIPO, an objective that weights each token by what happens to the tokens after it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.objectives.base import ObjectiveInputs, ObjectiveOutputs
from gtpo_jax.algorithms.objectives.clipped import Clip, dual_clip_setting
from gtpo_jax.algorithms.objectives.ratios import bounded_exp
from gtpo_jax.runtime.fields import ABOVE_0, AT_LEAST_1, BELOW_1, setting


@dataclasses.dataclass(frozen=True)
class Fipo(Clip):
  """The clipped objective with the advantage A f, where f is the token's influence (2603.19835).

  `f_t = sg(clip(exp(F_t), 1 - influence_low, 1 + influence_high))`. F_t is the sum of the
  log-ratios of the token and of those after it, with a discount that halves over `half_life`
  tokens: it is positive if the update makes the rest of the completion more likely. Only tokens
  that the policy has drawn count, also in the discount.

  As in the public code of the authors, a token whose ratio is above `dual_clip` does not enter F,
  and f is at most 1 for a token with a negative advantage whose ratio is above `safe_ratio`. That
  code also ignores completions with several tokens beyond the dual clip; this is left out here. At
  the first gradient update on a batch all ratios are 1, and so is f.
  """

  name: ClassVar[str] = "fipo"
  paper: ClassVar[str] = "2603.19835"
  per_token: ClassVar[bool] = False
  ratios: ClassVar[tuple[str, ...]] = ("token",)

  dual_clip: float = dual_clip_setting(10.0)
  half_life: float = setting(
    32.0, "the tokens over which the discount of the log-ratios after a token halves.", ABOVE_0
  )
  influence_low: float = setting(
    0.0, "the influence of a token is at least 1 - influence_low; 0: it only adds.", BELOW_1
  )
  influence_high: float = setting(
    0.2, "the influence of a token is at most 1 + influence_high.", ABOVE_0
  )
  safe_ratio: float = setting(
    4.0,
    "the influence is at most 1 for tokens with a negative advantage and a larger ratio than this.",
    AT_LEAST_1,
  )

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    influence, clipped = self._influence(x)
    objective, metrics = super().__call__(x._replace(advantages=influence * x.advantages))
    return objective, metrics | {"clip/influence": clipped}

  def _influence(self, x: ObjectiveInputs) -> tuple[jax.Array, jax.Array]:
    """Returns the influence of each token f32[n, g, t], and whether it was clipped."""
    log_ratio = jax.lax.stop_gradient(jnp.where(x.mask, x.log_ratio, 0.0))
    if self.dual_clip:
      log_ratio = jnp.where(x.ratio > self.dual_clip, 0.0, log_ratio)
    raw = bounded_exp(discounted_future(log_ratio, x.mask, 2 ** (-1 / self.half_life)))
    influence = jnp.clip(raw, 1 - self.influence_low, 1 + self.influence_high)
    unsafe = (x.advantages < 0) & (x.ratio > self.safe_ratio)
    influence = jnp.where(unsafe, jnp.minimum(influence, 1.0), influence)
    return jax.lax.stop_gradient(influence), x.mask & (influence != raw)


def discounted_future(x: jax.Array, mask: jax.Array, discount: float) -> jax.Array:
  """Returns `sum_k discount^(k - t) x_k` over the tokens k >= t of each completion, f32[n, g, t].

  Tokens are counted without those that are not in the mask, whose x does not count either.

  Args:
    x: f32[n, g, t].
    mask: bool[n, g, t].
    discount: in (0, 1].
  """

  def join(
    later: tuple[jax.Array, jax.Array], earlier: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    factor_later, sum_later = later
    factor, total = earlier
    return factor_later * factor, total + factor * sum_later

  steps = jnp.where(mask, discount, 1.0), jnp.where(mask, x, 0.0)
  return jax.lax.associative_scan(join, steps, reverse=True, axis=x.ndim - 1)[1]
