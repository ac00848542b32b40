"""Metrics of a batch and of the mismatch between sampler and trainer, computed under jit."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.corrections import Corrections
from gtpo_jax.algorithms.loss import effective_sample_size, surprise_metrics
from gtpo_jax.arrays import Rewards, Rollouts, masked_mean, mean_or_nan
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.experts.routing import RouterStatistics, expert_shares


class UpdateMetrics(NamedTuple):
  """The metrics of one gradient update, f32[] each; of several, with a leading axis [updates]."""

  has_tokens: jax.Array  # bool[], whether the minibatch has tokens in the loss
  gradient: dict[str, jax.Array]  # by name, the loss and the norm of its gradient
  # by name, means over tokens of the minibatch; NaN if it has no such tokens
  tokens: dict[str, jax.Array]
  # by name, whether the update was skipped or empty, and its coefficients
  outcome: dict[str, jax.Array]
  mismatch: dict[str, jax.Array]  # from `mismatch_metrics`


def mean_over_updates(measured: UpdateMetrics) -> dict[str, jax.Array]:
  """Returns the metrics of a step, f32[] each, from its gradient updates' metrics [updates].

  Minibatches without tokens have no loss and no means over tokens, so they are left out of these
  metrics, which are NaN if all minibatches are. The mismatch is the first minibatch's.
  """
  gradient = {name: mean_or_nan(x, measured.has_tokens) for name, x in measured.gradient.items()}
  tokens = {name: mean_or_nan(x, ~jnp.isnan(x)) for name, x in measured.tokens.items()}
  outcome = {name: x.mean() for name, x in measured.outcome.items()}
  return gradient | tokens | outcome | {name: x[0] for name, x in measured.mismatch.items()}


def batch_metrics(
  rollouts: Rollouts, rewards: Rewards, advantages: jax.Array, loss_mask: jax.Array
) -> dict[str, jax.Array]:
  """Returns the diagnostics of a step's batch, f32[] each.

  They cover only the policy's own completions, except `guide/*`, `tokens/*` and `completions/*`.
  Completions without a verdict count neither as correct nor as incorrect. The means over O+ or over
  O- (`entropy/correct` and similar) are NaN if there are no such tokens.

  Args:
    rollouts, rewards: the batch.
    advantages: f32[n, g, t].
    loss_mask: bool[n, g, t], tokens in the loss.
  """
  none = jnp.zeros(rewards.correct.shape, bool)
  guided = none if rollouts.guided is None else rollouts.guided
  own = ~guided
  correct = rewards.correct
  judged = own if rewards.scored is None else own & rewards.scored
  mask = rollouts.mask & own[..., None]
  judged_tokens = rollouts.mask & judged[..., None]
  entropy = rollouts.entropy
  lengths = rollouts.mask.sum(-1).astype(jnp.float32)
  token_correct = jnp.broadcast_to(correct[..., None], mask.shape)
  in_loss = loss_mask & own[..., None]
  wrong_sign = jnp.where(token_correct, advantages < 0, advantages > 0)
  packing = rollouts.packing
  inputs = rollouts.tokens if packing is None else packing.source
  positions = rollouts.prompts.tokens.size + inputs.size
  metrics = {
    "entropy/mean": masked_mean(entropy, mask),
    "entropy/correct": mean_or_nan(entropy, judged_tokens & token_correct),
    "entropy/incorrect": mean_or_nan(entropy, judged_tokens & ~token_correct),
    "length/mean": masked_mean(lengths, own),
    "length/min": jnp.where(own, lengths, jnp.inf).min(),
    "length/max": jnp.where(own, lengths, 0.0).max(),
    "length/cut_off": masked_mean(~rollouts.finished, own),
    "reward/mean": mean_or_nan(rewards.reward + rewards.penalty, judged),
    "reward/accuracy": mean_or_nan(correct, judged),
    "groups/all_correct": mean_or_nan((correct | ~judged).all(1), judged.any(1)),
    "groups/all_wrong": mean_or_nan((~correct | ~judged).all(1), judged.any(1)),
    "advantage/correct": mean_or_nan(advantages, in_loss & token_correct),
    "advantage/incorrect": mean_or_nan(advantages, in_loss & ~token_correct),
    "advantage/sign_flips": masked_mean(wrong_sign, in_loss),
    "tokens/completion": rollouts.mask.sum(),
    "tokens/trained": loss_mask.sum(),
    # Of the positions in the trainer's input.
    "tokens/padding": 1 - (rollouts.prompts.lengths.sum() + rollouts.lengths.sum()) / positions,
  }
  metrics |= surprise_metrics(entropy, rollouts.log_probs, mask)
  if rewards.valid is not None:
    metrics["completions/not_counted"] = 1.0 - rewards.valid.mean()
  if rollouts.guided is not None:
    rescued = (~correct | guided).all(1) & (correct & guided).any(1)
    metrics["guide/accuracy"] = masked_mean(correct, guided)
    metrics["guide/rescued"] = rescued.mean()
  if rollouts.teacher is not None:
    # The mean of min(1, teacher / policy) is an estimate of their distributions' overlap.
    divergence = rollouts.divergence
    overlap = jnp.exp(jnp.minimum(-divergence, 0.0))
    metrics |= distillation_metrics(divergence, overlap, mask, judged_tokens, token_correct)
  if rollouts.stale is not None:
    metrics["groups/stale"] = rollouts.stale.any(1).mean()
  return metrics


def distillation_metrics(
  divergence: jax.Array, overlap: jax.Array, mask: jax.Array, judged: jax.Array, correct: jax.Array
) -> dict[str, jax.Array]:
  """Returns how far the policy is from the teacher, f32[] each.

  Args:
    divergence: f32[n, g, t], nats, of each token, or an estimate of it.
    overlap: f32[n, g, t], 1 minus the total variation, or an estimate of it.
    mask: bool[n, g, t], the policy's own tokens.
    judged: bool[n, g, t], those in completions with a verdict.
    correct: bool[n, g, t], those in correct completions.
  """
  return {
    "distill/divergence": mean_or_nan(divergence, mask),
    "distill/correct": mean_or_nan(divergence, judged & correct),
    "distill/incorrect": mean_or_nan(divergence, judged & ~correct),
    "distill/agreement": mean_or_nan(overlap, mask),
  }


def router_metrics(
  config: ModelConfig, rollouts: Rollouts, router: RouterStatistics
) -> dict[str, jax.Array]:
  """Returns how the routers of a mixture of experts distribute tokens, f32[] each.

  `router/entropy` is the mean entropy of their distributions over experts, in nats.
  `router/largest_share` is the largest share of the recorded choices of a layer that one expert
  got, over all layers; 1 / experts if all get the same. `router/balance` is the load-balancing loss
  without its weight, if there is one.

  Args:
    config: the architecture.
    rollouts: the minibatch.
    router: [n, g, t], at the inputs of the tokens.
  """
  metrics = {"router/entropy": mean_or_nan(router.entropy, rollouts.present)}
  if rollouts.routes is not None:
    shares = expert_shares(rollouts.routes, rollouts.present, config.mixture.experts)
    metrics["router/largest_share"] = shares.max()
  if config.router_balance:
    metrics["router/balance"] = masked_mean(router.balance, rollouts.present)
  return metrics


def mismatch_metrics(
  rollouts: Rollouts, log_probs: jax.Array, router: RouterStatistics | None = None
) -> dict[str, jax.Array]:
  """Returns how much the log-probs of sampler and trainer differ for the same parameters.

  Tokens of a guide or of an earlier step's policy are left out; without other tokens, the metrics
  are NaN. `mismatch/kl` is the k3 estimate of KL(sampler || trainer), >= 0.

  `mismatch/router` is the share of tokens whose input the trainer's routers would have sent to
  other experts than the sampler's in any layer, `mismatch/router_layers` its mean over layers.

  Args:
    rollouts: completions sampled from the current parameters, before any update on them.
    log_probs: f32[n, g, t], the trainer's log-probs with the same parameters; not used if the
      rollouts are rescored.
    router: [n, g, t], the statistics of the trainer's routers, if there are experts.
  """
  fresh = rollouts.mask
  for flag in (rollouts.guided, rollouts.stale):
    fresh = fresh if flag is None else fresh & ~flag[..., None]
  trainer_log_probs = log_probs if rollouts.rescored is None else rollouts.rescored
  gap = jnp.where(fresh, trainer_log_probs - rollouts.log_probs, 0.0)
  metrics = {
    "mismatch/max_abs_logp": jnp.where(fresh.any(), jnp.abs(gap).max(), jnp.nan),
    "mismatch/kl": mean_or_nan(jnp.expm1(gap) - gap, fresh),
  }
  if router is not None and rollouts.routes is not None:
    metrics["mismatch/router"] = mean_or_nan(router.any_differs, fresh)
    metrics["mismatch/router_layers"] = mean_or_nan(router.differs, fresh)
  return metrics


def correction_metrics(
  corrections: Corrections, rollouts: Rollouts, importance: jax.Array | None, kept: jax.Array | None
) -> dict[str, jax.Array]:
  """Returns the diagnostics of the corrections, f32[] each, over the policy's own completions.

  Args:
    corrections: the algorithm's.
    rollouts: the batch.
    importance: f32[n, g, t], the importance weights, if there are any.
    kept: bool[n, g], the completions that are not masked, if some may be.
  """
  own = rollouts.mask.any(-1)
  if rollouts.guided is not None:
    own = own & ~rollouts.guided
  metrics = {}
  if importance is not None:
    mask = rollouts.mask & own[..., None]
    capped = importance >= corrections.tis_cap
    if corrections.tis_level == "sequence":
      importance, capped, mask = importance[..., 0], capped[..., 0], own
    metrics["correction/ess"] = effective_sample_size(importance, mask)
    metrics["correction/capped"] = masked_mean(capped, mask)
  if kept is not None:
    metrics["correction/masked"] = masked_mean(~kept, own)
  return metrics
