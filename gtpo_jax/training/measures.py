"""What an update says of the batch it learned from: scalars f32[], computed in the graph."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import Rollouts, Verdicts, masked_mean


def measure(rollouts: Rollouts, verdicts: Verdicts, advantages: jax.Array, loss_mask: jax.Array,
            log_probs: jax.Array) -> dict[str, jax.Array]:
  """The diagnostics of a step.

  Args:
    rollouts, verdicts: the batch.
    advantages: f32[n, g, t].
    loss_mask: bool[n, g, t], tokens that carry signal.
    log_probs: f32[n, g, t], the learner's before the update; against the sampler's they give the mismatch.
  """
  mask, entropy, lengths = rollouts.mask, rollouts.entropy, rollouts.lengths.astype(jnp.float32)
  right = jnp.broadcast_to(verdicts.correct[..., None], mask.shape)
  mean_over = lambda x, where: jnp.where(where.any(), masked_mean(x, where), jnp.nan)  # no such token: no number, not a 0
  gap = jnp.where(mask, log_probs - rollouts.log_probs, 0.0)
  return {
      "entropy/mean": masked_mean(entropy, mask),
      "entropy/correct": mean_over(entropy, mask & right),
      "entropy/incorrect": mean_over(entropy, mask & ~right),
      "length/mean": lengths.mean(),
      "length/min": lengths.min(),
      "length/max": lengths.max(),
      "length/cut_off": 1.0 - rollouts.finished.mean(),
      "reward/mean": (verdicts.reward + verdicts.penalty).mean(),
      "reward/accuracy": verdicts.correct.mean(),
      "groups/all_correct": verdicts.correct.all(1).mean(),
      "groups/all_wrong": (~verdicts.correct).all(1).mean(),
      "advantage/correct": mean_over(advantages, loss_mask & right),
      "advantage/incorrect": mean_over(advantages, loss_mask & ~right),
      "advantage/sign_flips": masked_mean(jnp.where(right, advantages < 0, advantages > 0), loss_mask),
      "mismatch/max_abs_logp": jnp.abs(gap).max(),
      "mismatch/kl": masked_mean(jnp.expm1(gap) - gap, mask),  # k3 estimate of KL(sampler || learner), >= 0
      "tokens/completion": mask.sum(),
      "tokens/trained": loss_mask.sum(),
  }
