"""Corrections for tokens that the trained policy's parameters have not, or not exactly, drawn.

The sampler's numbers differ from the trainer's; the policy of an earlier step may have drawn a
token; filters change the distribution that is drawn from. All log-probs are f32[n, g, t], in nats.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.ratios import bounded_exp, geometric_sequence_ratio, token_ratio
from gtpo_jax.arrays import masked_sum
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import AT_LEAST_0, Checked, one_of, setting

TIS_LEVELS = ("token", "sequence")
BEHAVIOURS = ("policy", "drawn")


@dataclasses.dataclass(frozen=True)
class Corrections(Checked):
  """Which corrections an algorithm makes.

  pi_trainer is the policy's probability before the update, computed by the trainer, which takes one
  more pass over the batch. pi_sampler is the probability when the token was drawn, computed by the
  sampler.
  """

  prefix: ClassVar[str] = "algorithm."

  tis_cap: float = setting(
    0.0,
    "truncated importance sampling: weights each token by min(pi_trainer / pi_sampler, tis_cap). "
    "pi_trainer is the policy's probability before the update, computed by the trainer; the ratio "
    "of the update is then relative to it (the decoupled objective, 2505.24298). pi_sampler is the "
    "probability when the token was drawn, computed by the sampler. 0 for off, which also saves "
    "the pass over the batch that computes pi_trainer. With sampling.staleness of 2 or more, the "
    "default is 2.",
    AT_LEAST_0,
  )
  tis_level: str = setting(
    "token",
    'the importance weights of "token" (each token\'s probabilities) or "sequence" (those of its '
    "whole completion).",
    one_of(TIS_LEVELS),
  )
  mask_low: float = setting(
    0.0,
    "leave completions out of the loss for which the geometric mean of pi_trainer / pi_sampler "
    "over their tokens is below mask_low; 0 for no bound.",
    AT_LEAST_0,
  )
  mask_high: float = setting(
    0.0,
    "leave completions out of the loss for which the geometric mean of pi_trainer / pi_sampler "
    "over their tokens is above mask_high; 0 for no bound.",
    AT_LEAST_0,
  )
  behaviour: str = setting(
    "policy",
    'what pi_sampler is: "policy" (the sampling policy\'s probability, at its temperature) or '
    '"drawn" (that of the distribution the token was drawn from, after penalty, top-k, top-p and '
    "min-p).",
    one_of(BEHAVIOURS),
  )

  def __post_init__(self):
    super().__post_init__()
    if self.mask_high:
      self._check_order("mask_low", "mask_high")
    if self.tis_level == "sequence" and not self.tis_cap:
      raise UserError(
        "algorithm.tis_level = 'sequence' needs importance weights; set tis_cap, for example to 2"
      )
    if self.behaviour == "drawn" and not self.needs_rescoring:
      raise UserError(
        "algorithm.behaviour = 'drawn' needs a correction; set tis_cap, for example to 2, or "
        "mask_low and mask_high"
      )

  @property
  def masks_completions(self) -> bool:
    """Whether completions that the policy is too far from are left out of the loss."""
    return bool(self.mask_low or self.mask_high)

  @property
  def needs_rescoring(self) -> bool:
    """Whether the trainer's log-probs of the sampled tokens are needed before the update."""
    return bool(self.tis_cap) or self.masks_completions

  def weights(
    self, log_probs_trainer: jax.Array, log_probs_sampler: jax.Array, mask: jax.Array
  ) -> jax.Array | None:
    """Returns the truncated importance weights `min(pi_trainer / pi_sampler, tis_cap)`.

    They are constants (`stop_gradient`), f32[n, g, t]; with "token", min(1, tis_cap) where `mask`
    is False. None if `tis_cap` is 0.

    Args:
      log_probs_trainer: f32[n, g, t], nats, of the policy before the update, by the trainer.
      log_probs_sampler: f32[n, g, t], nats, of the distribution that the tokens were drawn from.
      mask: bool[n, g, t], sampled tokens.
    """
    if not self.tis_cap:
      return None
    if self.tis_level == "token":
      ratio = token_ratio(log_probs_trainer, log_probs_sampler, mask)
    else:
      total = masked_sum(log_probs_trainer - log_probs_sampler, mask, -1, keepdims=True)
      ratio = jnp.broadcast_to(bounded_exp(total), mask.shape)
    return jax.lax.stop_gradient(jnp.minimum(ratio, self.tis_cap))

  def kept(
    self, log_probs_trainer: jax.Array, log_probs_sampler: jax.Array, mask: jax.Array
  ) -> jax.Array | None:
    """Returns the completions whose geometric mean ratio lies in [mask_low, mask_high], bool[n, g].

    None if both bounds are 0. Arguments are as in `weights`.
    """
    if not self.masks_completions:
      return None
    ratio = geometric_sequence_ratio(log_probs_trainer, log_probs_sampler, mask)[..., 0]
    return (ratio >= self.mask_low) & ((ratio <= self.mask_high) if self.mask_high else True)
