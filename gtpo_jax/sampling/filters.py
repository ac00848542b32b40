"""Samples a token from logits: repetition penalty, temperature, top-k, top-p, min-p, draw.

The policy is the distribution at the sampling temperature, *before* penalty and filters. The
algorithms use its log-probs and entropy. Penalty and filters only affect which token is drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.sampling.params import SamplingParams

BLOCK = 128  # tokens per block of the two-level draw; the width of a TPU vector register


class SampledToken(NamedTuple):
  """One sampled token per row. Log-probs and entropy are in nats."""

  token: jax.Array  # i32[...]
  log_prob: jax.Array  # f32[...], under the policy: softmax(logits / temperature), unfiltered
  entropy: jax.Array  # f32[...], of the policy
  drawn_log_prob: jax.Array  # f32[...], after penalty and filters; 0 under greedy decoding
  plain_log_prob: jax.Array  # f32[...], under softmax(logits)


def sample_token(
  params: SamplingParams, logits: jax.Array, keys: jax.Array, seen_tokens: jax.Array | None = None
) -> SampledToken:
  """Samples one token per row.

  Args:
    params: temperature, penalty and filters.
    logits: f32[..., v].
    keys: typed PRNG keys [...]; unused at temperature 0.
    seen_tokens: bool[..., v], the tokens of the prompt and the completion so far; only needed for a
      repetition penalty.
  """
  scaled, weights, total = _softmax_weights(logits, params.policy_temperature)
  entropy = (
    jnp.log(total) - jnp.where(weights > 0, weights * scaled, 0).sum(-1, keepdims=True) / total
  )
  penalised = logits
  draw_weights = weights
  if params.penalises_repetition:
    penalised = _penalise(logits, seen_tokens, params.repetition_penalty)
    _, draw_weights, _ = _softmax_weights(penalised, params.policy_temperature)
  if params.temperature == 0:
    token = jnp.argmax(penalised, -1).astype(jnp.int32)
  else:
    draw_weights = apply_filters(params, draw_weights)
    token = draw(draw_weights, keys)

  at_token = lambda values: jnp.take_along_axis(values, token[..., None], -1)
  log_prob = at_token(scaled) - jnp.log(total)
  if params.temperature == 0:
    drawn_log_prob = jnp.zeros_like(log_prob)
  elif params.draws_from_policy:
    drawn_log_prob = log_prob
  else:
    drawn_log_prob = jnp.log(at_token(draw_weights) / draw_weights.sum(-1, keepdims=True))
  if params.policy_temperature == 1:
    plain_log_prob = log_prob
  else:
    plain_log_prob = at_token(logits) - jax.nn.logsumexp(logits, -1, keepdims=True)
  values = (log_prob, jnp.maximum(entropy, 0), drawn_log_prob, plain_log_prob)
  return SampledToken(token, *(x[..., 0] for x in values))


def apply_filters(params: SamplingParams, probs: jax.Array) -> jax.Array:
  """Returns `probs` with 0 for the tokens that the filters exclude.

  The filters apply in the usual order: top-k, top-p, min-p. Top-p is relative to the total of the
  tokens that top-k keeps. All tokens tied at a filter's bound are kept.

  Args:
    params: the filters.
    probs: f32[..., v], which need not sum to 1.
  """
  vocab = probs.shape[-1]
  if 0 < params.top_k < vocab:
    bound = jax.lax.top_k(probs, params.top_k)[0][..., -1:]
    probs = jnp.where(probs >= bound, probs, 0)
  if params.top_p < 1:
    ordered = jnp.sort(probs, axis=-1, descending=True)
    before = jnp.cumsum(ordered, axis=-1) - ordered  # 0 for the first, which is always kept
    inside = before < params.top_p * ordered.sum(-1, keepdims=True)
    bound = jnp.where(inside, ordered, jnp.inf).min(-1, keepdims=True)
    probs = jnp.where(probs >= bound, probs, 0)
  if params.min_p > 0:
    probs = jnp.where(probs >= params.min_p * probs.max(-1, keepdims=True), probs, 0)
  return probs


def draw(probs: jax.Array, keys: jax.Array) -> jax.Array:
  """Draws one index i32[...] per row with probability proportional to `probs` f32[..., v] >= 0.

  It inverts the cumulative distribution function, which needs one uniform number per row instead of
  Gumbel noise over the vocabulary. The two levels, first a block and then a token in the block,
  keep the running sums short (rounding stays near 1e-7 of the total) and read the vocabulary once.
  An index of probability 0 is never drawn.
  """
  vocab = probs.shape[-1]
  padded = jnp.pad(probs, [(0, 0)] * (probs.ndim - 1) + [(0, -vocab % BLOCK)])
  blocks = padded.reshape(*probs.shape[:-1], -1, BLOCK)
  block, fraction = _invert_cdf(blocks.sum(-1), _uniform(keys))
  block_probs = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
  index, _ = _invert_cdf(block_probs, fraction)
  return (block * BLOCK + index).astype(jnp.int32)


def _penalise(logits: jax.Array, seen_tokens: jax.Array, penalty: float) -> jax.Array:
  return jnp.where(seen_tokens, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def _softmax_weights(
  logits: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns scaled logits f32[..., v] with maximum 0, their exponentials, and the sums [..., 1]."""
  shifted = logits - logits.max(-1, keepdims=True)  # before dividing: the maximum is exactly 0
  scaled = shifted / temperature
  weights = jnp.exp(scaled)
  return scaled, weights, weights.sum(-1, keepdims=True)


def _invert_cdf(weights: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Inverts the CDF of unnormalised `weights` f32[..., v] at `uniform` f32[...] in [0, 1).

  Because of rounding, a parallel running sum may rise across weights of 0 or end below the target.
  An index of weight 0 is selected in neither case: rises at weights of 0 are ignored, and a target
  past the end selects the last index of positive weight.

  Returns:
    The index i32[...], and the target's position within that index's weight, f32[...] in [0, 1).
  """
  sums = jnp.cumsum(weights, axis=-1)
  target = uniform * sums[..., -1]
  passed = (sums > target[..., None]) & (weights > 0)
  last = weights.shape[-1] - 1 - jnp.argmax(weights[..., ::-1] > 0, axis=-1)
  index = jnp.where(passed.any(-1), jnp.argmax(passed, axis=-1), last)
  weight = jnp.take_along_axis(weights, index[..., None], -1)[..., 0]
  start = jnp.take_along_axis(sums, index[..., None], -1)[..., 0] - weight
  return index, jnp.clip((target - start) / jnp.where(weight > 0, weight, 1), 0, 1 - 2**-24)


def _uniform(keys: jax.Array) -> jax.Array:
  """Returns one uniform number f32[...] in [0, 1) for each typed PRNG key [...]."""
  draw_one = lambda key: jax.random.uniform(key, dtype=jnp.float32)
  for _ in keys.shape:
    draw_one = jax.vmap(draw_one)
  return draw_one(keys)
