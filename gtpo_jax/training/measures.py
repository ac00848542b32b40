"""What an update says of the batch it learned from: scalars f32[], computed in the graph."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import Rewards, Rollouts, masked_mean


def measure(
  rollouts: Rollouts, verdicts: Rewards, advantages: jax.Array, loss_mask: jax.Array
) -> dict[str, jax.Array]:
  """The diagnostics of a step, of the policy's own completions but for `guide/*`, `tokens/*` and `completions/*`.

  Args:
    rollouts, verdicts: the batch.
    advantages: f32[n, g, t].
    loss_mask: bool[n, g, t], tokens that carry signal.
  """
  none = jnp.zeros(verdicts.correct.shape, bool)
  guided, stale = (none if x is None else x for x in (rollouts.guided, rollouts.stale))
  own = ~guided
  correct = verdicts.correct
  mask = rollouts.mask & own[..., None]
  entropy = rollouts.entropy
  lengths = rollouts.lengths.astype(jnp.float32)
  right = jnp.broadcast_to(correct[..., None], mask.shape)
  trained = loss_mask & own[..., None]
  mean_over = lambda x, where: jnp.where(
    where.any(), masked_mean(x, where), jnp.nan
  )  # no such token: no number, not a 0
  metrics = {
    "entropy/mean": masked_mean(entropy, mask),
    "entropy/correct": mean_over(entropy, mask & right),
    "entropy/incorrect": mean_over(entropy, mask & ~right),
    "length/mean": masked_mean(lengths, own),
    "length/min": jnp.where(own, lengths, jnp.inf).min(),
    "length/max": jnp.where(own, lengths, 0.0).max(),
    "length/cut_off": masked_mean(~rollouts.finished, own),
    "reward/mean": masked_mean(verdicts.reward + verdicts.penalty, own),
    "reward/accuracy": masked_mean(correct, own),
    "groups/all_correct": (correct | guided).all(1).mean(),
    "groups/all_wrong": (~correct | guided).all(1).mean(),
    "advantage/correct": mean_over(advantages, trained & right),
    "advantage/incorrect": mean_over(advantages, trained & ~right),
    "advantage/sign_flips": masked_mean(jnp.where(right, advantages < 0, advantages > 0), trained),
    "tokens/completion": rollouts.mask.sum(),
    "tokens/trained": loss_mask.sum(),
    "tokens/padding": _padding(rollouts),
  }
  if verdicts.valid is not None:
    metrics["completions/not_counted"] = 1.0 - verdicts.valid.mean()
  if rollouts.guided is not None:
    metrics["guide/accuracy"] = masked_mean(correct, guided)
    metrics["guide/rescued"] = ((~correct | guided).all(1) & (correct & guided).any(1)).mean()
  if rollouts.stale is not None:
    metrics["groups/stale"] = stale.any(1).mean()
  return metrics


def _padding(rollouts: Rollouts) -> jax.Array:
  """Of the places that the trainer computes, of prompts and completions, the share that holds no token."""
  prompts = rollouts.prompts
  packing = rollouts.packing
  places = prompts.tokens.size + (rollouts.mask if packing is None else packing.source).size
  return 1 - (prompts.lengths.sum() + rollouts.mask.sum()) / places


def mismatch(rollouts: Rollouts, log_probs: jax.Array) -> dict[str, jax.Array]:
  """How far sampler and trainer are apart on the policy's own fresh tokens.

  Args:
    rollouts: of the policy that learns, before it has learned from any of them.
    log_probs: f32[n, g, t], its log-probs as the trainer computes them.
  """
  fresh = rollouts.mask
  for flag in (rollouts.guided, rollouts.stale):
    fresh = fresh if flag is None else fresh & ~flag[..., None]
  gap = jnp.where(
    fresh, (log_probs if rollouts.rescored is None else rollouts.rescored) - rollouts.log_probs, 0.0
  )
  return {
    "mismatch/max_abs_logp": jnp.abs(gap).max(),
    "mismatch/kl": masked_mean(jnp.expm1(gap) - gap, fresh),
  }  # k3 estimate of KL(sampler || trainer), >= 0
