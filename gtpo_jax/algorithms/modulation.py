"""Modulations change the advantages of single tokens after normalisation.

They do so by the tokens' entropies, or by what a teacher thinks of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.ratios import bounded_exp
from gtpo_jax.algorithms.relative_entropy import turn_begins
from gtpo_jax.arrays import masked_mean
from gtpo_jax.runtime.fields import AT_LEAST_0, AT_LEAST_1, SHARE, Checked, number, one_of, setting

STEPS = ("turn", "token")


class ModulationInputs(NamedTuple):
  """The tokens that a modulation reads. Values are 0 where `mask` is False."""

  mask: jax.Array  # bool[n, g, t], the tokens in the loss
  entropy: jax.Array  # f32[n, g, t], nats
  divergence: Any = None  # f32[n, g, t], nats, as in `Signals`; None without a teacher


@dataclasses.dataclass(frozen=True)
class NoModulation(Checked):
  """The advantages stay as they are.

  Attributes:
    per_token: whether the tokens of a completion can get different advantages.
    by_teacher: whether a teacher's log-probs modulate the advantages, instead of being added.
  """

  prefix: ClassVar[str] = "algorithm."
  per_token: ClassVar[bool] = False
  by_teacher: ClassVar[bool] = False

  def __call__(self, advantages: jax.Array, x: ModulationInputs) -> jax.Array:
    """Returns the changed advantages, f32[n, g, t]; 0 where `mask` is False.

    Args:
      advantages: f32[n, g, t], 0 where `mask` is False.
      x: of the same tokens.
    """
    return advantages


_BONUS = (
  "min(bonus_alpha * H, |A| / bonus_kappa) is added to the advantage of each token (2506.14758, "
  "eq. 5)."
)


@dataclasses.dataclass(frozen=True)
class AdvantageBonus(NoModulation):
  """Adds `min(bonus_alpha H, |A| / bonus_kappa)` to each token's advantage (2506.14758, eq. 5).

  With bonus_kappa > 1 the bonus never changes the sign of an advantage.
  """

  per_token: ClassVar[bool] = True

  bonus_alpha: float = setting(0.4, _BONUS, AT_LEAST_0)
  bonus_kappa: float = setting(2.0, _BONUS, AT_LEAST_1)

  def __call__(self, advantages: jax.Array, x: ModulationInputs) -> jax.Array:
    most = jnp.abs(advantages) / self.bonus_kappa
    return advantages + jnp.minimum(self.bonus_alpha * x.entropy, most)


@dataclasses.dataclass(frozen=True)
class ConfidenceModulation(NoModulation):
  """Larger advantages for confident steps, and a bonus for a confident next step (EMPG).

  A step's entropy is the mean over its tokens, scaled to [0, 1] over the steps of the batch: H' is
  0 for the smallest and 1 for the largest. The advantage of a step is

      A exp(-confidence_k H') / mean(exp(-confidence_k H')) + clarity exp(-clarity_k H'_next),

  minus the mean of this over all steps of the batch. The last step of a completion has no next step
  and gets no bonus. The formulas are eqs. 8-12 of 2509.09265. That only the mean is
  subtracted, and the default values, are taken from the authors' public code.
  """

  per_token: ClassVar[bool] = True

  step: str = setting(
    "turn",
    'the step of an agent: "turn" (the tokens that the policy draws until the environment answers; '
    'the whole completion without an environment) or "token" (not in the paper: each token is a '
    "step).",
    one_of(STEPS),
  )
  confidence_k: float = setting(
    1.0, "how much more confident steps count; 0: all steps count alike.", AT_LEAST_0
  )
  clarity: float = setting(0.1, "the weight of the bonus for a confident next step.", AT_LEAST_0)
  clarity_k: float = setting(
    1.0, "how much the bonus depends on the entropy of the next step.", AT_LEAST_0
  )

  def __call__(self, advantages: jax.Array, x: ModulationInputs) -> jax.Array:
    mask, entropy = x.mask, x.entropy
    begins = mask
    if self.step == "turn":
      begins = turn_begins(mask)
      entropy = run_mean(entropy, mask, begins)
    lowest = jnp.where(begins, entropy, jnp.inf).min()
    width = jnp.where(begins, entropy, -jnp.inf).max() - lowest
    scaled = jnp.where(mask & (width > 0), (entropy - lowest) / jnp.where(width > 0, width, 1), 0.0)
    confidence = jnp.exp(-self.confidence_k * scaled)
    modulated = advantages * confidence / jnp.maximum(masked_mean(confidence, begins), 1e-30)
    if self.clarity:
      has_next, following = next_step(scaled, begins)
      bonus = self.clarity * jnp.exp(-self.clarity_k * following)
      modulated += jnp.where(has_next, bonus, 0.0)
    return jnp.where(mask, modulated - masked_mean(modulated, begins), 0.0)


@dataclasses.dataclass(frozen=True)
class TeacherModulation(NoModulation):
  """Larger advantages where a teacher that knows more agrees with their sign (RLSD, 2604.03128).

  With d = log teacher - log pi of the sampled token, when it was sampled, the advantage becomes

      A ((1 - teacher_mix) + teacher_mix clip(exp(sign(A) d), 1 - teacher_clip, 1 + teacher_clip)).

  Its sign never changes.
  """

  per_token: ClassVar[bool] = True
  by_teacher: ClassVar[bool] = True

  teacher_mix: float = setting(
    0.5,
    "how much the teacher changes the advantages; 0: not at all.",
    number(lambda x: 0 <= x <= 1, "in [0, 1]"),
  )
  teacher_clip: float = setting(
    0.2, "the teacher's weights are clipped to [1 - teacher_clip, 1 + teacher_clip].", SHARE
  )

  def __call__(self, advantages: jax.Array, x: ModulationInputs) -> jax.Array:
    weight = bounded_exp(-jnp.sign(advantages) * x.divergence)
    weight = jnp.clip(weight, 1 - self.teacher_clip, 1 + self.teacher_clip)
    return advantages * (1 - self.teacher_mix + self.teacher_mix * weight)


def run_mean(x: jax.Array, mask: jax.Array, begins: jax.Array) -> jax.Array:
  """Returns the mean of x over the run of tokens that a token is in, f32[n, g, t].

  Args:
    x: f32[n, g, t].
    mask: bool[n, g, t]; a run is a sequence of tokens in it.
    begins: bool[n, g, t], the first token of each run.
  """
  ends = mask & ~jnp.pad(mask[..., 1:], [(0, 0), (0, 0), (0, 1)])
  values = jnp.where(mask, x, 0.0), mask.astype(jnp.float32)
  forward = _running_sums(values, begins | ~mask, reverse=False)
  backward = _running_sums(values, ends | ~mask, reverse=True)
  total, count = (f + b - v for f, b, v in zip(forward, backward, values, strict=True))
  return total / jnp.maximum(count, 1.0)


def next_step(x: jax.Array, begins: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns whether a step begins after a token, bool[n, g, t], and its x, f32[n, g, t].

  Args:
    x: f32[n, g, t].
    begins: bool[n, g, t], the first token of each step.
  """
  t = x.shape[-1]
  places = jnp.where(begins, jnp.arange(t), t)
  nearest = jax.lax.cummin(places, axis=x.ndim - 1, reverse=True)
  after = jnp.pad(nearest[..., 1:], [(0, 0), (0, 0), (0, 1)], constant_values=t)
  return after < t, jnp.take_along_axis(x, jnp.minimum(after, t - 1), -1)


def _running_sums(
  values: tuple[jax.Array, ...], resets: jax.Array, reverse: bool
) -> tuple[jax.Array, ...]:
  """Returns the sums along the last axis from the latest reset on."""

  def join(earlier: tuple[jax.Array, ...], later: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    reset_earlier, *sums = earlier
    reset, *added = later
    joined = (jnp.where(reset, b, a + b) for a, b in zip(sums, added, strict=True))
    return reset_earlier | reset, *joined

  return jax.lax.associative_scan(join, (resets, *values), reverse=reverse, axis=resets.ndim - 1)[
    1:
  ]
