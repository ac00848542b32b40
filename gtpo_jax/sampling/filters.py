"""From logits to one token: repetition penalty, temperature, top-k, top-p, min-p, and the draw.

The distribution at the sampling temperature, *before* penalty and filters, is the policy: its log-probs and entropy are what the
algorithms use. Penalty and filters only change what is drawn.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.runtime.errors import UserError

BLOCK = 128  # words a block of the two-level draw: one TPU lane row


class Picked(NamedTuple):
  """One drawn token a row; log-probs and entropy in nats."""

  token: jax.Array  # i32[...]
  log_prob: (
    jax.Array
  )  # f32[...], of the policy: softmax(logits / temperature) over the whole vocabulary
  entropy: jax.Array  # f32[...], of that same distribution
  drawn_log_prob: jax.Array  # f32[...], of the distribution that was drawn from, penalty and filters applied; 0 under greedy decoding
  plain_log_prob: jax.Array  # f32[...], of softmax(logits)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How tokens are drawn.

  Attributes:
    temperature: divides the logits; 0 takes the most probable token.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches p; 1 keeps all.
    min_p: keep tokens at least this fraction as probable as the most probable; 0 keeps all.
    repetition_penalty: divides positive logits, multiplies negative ones, of tokens already in prompt or completion (1909.05858,
      section 4.1, as Transformers does it); 1 leaves them alone.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0

  def __post_init__(self):
    if not 0 <= self.temperature < float("inf"):
      raise UserError(f"sampling.temperature must be at least 0 and finite, got {self.temperature}")
    if self.top_k < 0:
      raise UserError(f"sampling.top_k must be at least 0 (0 keeps all), got {self.top_k}")
    if not 0 < self.top_p <= 1:
      raise UserError(f"sampling.top_p must be in (0, 1], got {self.top_p}")
    if not 0 <= self.min_p < 1:
      raise UserError(f"sampling.min_p must be in [0, 1), got {self.min_p}")
    if not 0 < self.repetition_penalty < float("inf"):
      raise UserError(
        f"sampling.repetition_penalty must be above 0 and finite (1 leaves the logits alone), got {self.repetition_penalty}"
      )

  @property
  def policy_temperature(self) -> float:
    """The temperature of the distribution whose log-probs and entropy are reported: 1 under greedy decoding."""
    return self.temperature or 1.0

  @property
  def penalises(self) -> bool:
    """Whether what was written before changes what is drawn."""
    return self.repetition_penalty != 1.0

  @property
  def filters(self) -> bool:
    """Whether tokens are drawn from anything but the policy itself."""
    return (
      self.penalises or self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0
    )

  def pick(self, logits: jax.Array, keys: jax.Array, seen: jax.Array | None = None) -> Picked:
    """Draws one token a row.

    Args:
      logits: f32[..., v].
      keys: typed PRNG keys [...]; not used at temperature 0.
      seen: bool[..., v], the tokens written before; read where there is a repetition penalty.
    """
    scaled, weights, total = self._weights(logits)
    entropy = (
      jnp.log(total) - jnp.where(weights > 0, weights * scaled, 0).sum(-1, keepdims=True) / total
    )
    at = lambda values: jnp.take_along_axis(values, token[..., None], -1)
    shown = logits
    drawn = weights
    if self.penalises:
      shown = jnp.where(
        seen,
        jnp.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty),
        logits,
      )
      drawn = self._weights(shown)[1]
    if self.temperature == 0:
      token = jnp.argmax(shown, -1).astype(jnp.int32)
    else:
      drawn = self.keep(drawn)
      token = draw(drawn, keys)
    log_prob = at(scaled) - jnp.log(total)
    if self.temperature == 0:
      drawn_log_prob = jnp.zeros_like(log_prob)
    elif self.filters:
      drawn_log_prob = jnp.log(at(drawn) / drawn.sum(-1, keepdims=True))
    else:
      drawn_log_prob = log_prob
    plain = (
      log_prob
      if self.policy_temperature == 1
      else at(logits) - jax.nn.logsumexp(logits, -1, keepdims=True)
    )
    return Picked(
      token, *(x[..., 0] for x in (log_prob, jnp.maximum(entropy, 0), drawn_log_prob, plain))
    )

  def _weights(self, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """f32[..., v] of what the highest logit is ahead by, over the temperature, <= 0; its exponential; that one's sum f32[..., 1]."""
    scaled = (
      logits - logits.max(-1, keepdims=True)
    ) / self.policy_temperature  # in this order the highest is exactly 0
    weights = jnp.exp(scaled)
    return scaled, weights, weights.sum(-1, keepdims=True)

  def keep(self, probs: jax.Array) -> jax.Array:
    """Sets to 0 the probabilities f32[..., v], of any sum, that the filters drop. Ties at a filter's bound are kept.

    The filters apply in the usual order, top-k, top-p, min-p; top-p counts within what top-k kept.
    """
    vocab = probs.shape[-1]
    if 0 < self.top_k < vocab:
      bound = jax.lax.top_k(probs, self.top_k)[0][..., -1:]
      probs = jnp.where(probs >= bound, probs, 0)
    if self.top_p < 1:
      ordered = jnp.sort(probs, axis=-1, descending=True)
      before = jnp.cumsum(ordered, axis=-1) - ordered
      inside = before < self.top_p * ordered.sum(
        -1, keepdims=True
      )  # the most probable token always is
      bound = jnp.where(inside, ordered, jnp.inf).min(-1, keepdims=True)
      probs = jnp.where(probs >= bound, probs, 0)
    if self.min_p > 0:
      probs = jnp.where(probs >= self.min_p * probs.max(-1, keepdims=True), probs, 0)
    return probs


def draw(probs: jax.Array, keys: jax.Array) -> jax.Array:
  """One index a row with probability proportional to `probs` f32[..., v] >= 0, by inverting the distribution function.

  One uniform number a row instead of Gumbel noise over the vocabulary. Two levels, blocks and then words in a block, keep
  both the running sums short (rounding stays near 1e-7 of the total) and the work to one pass over the vocabulary. An index
  of probability 0 is never drawn.
  """
  vocab = probs.shape[-1]
  padded = jnp.pad(probs, [(0, 0)] * (probs.ndim - 1) + [(0, -vocab % BLOCK)])
  blocks = padded.reshape(*probs.shape[:-1], -1, BLOCK)
  uniform = _uniform(keys)
  block, rest = _invert(blocks.sum(-1), uniform)
  words = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
  word, _ = _invert(words, rest)
  return (block * BLOCK + word).astype(jnp.int32)


def _invert(weights: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The first index with weight whose running sum passes `uniform` [0, 1) of the total, and where in it the point falls, [0, 1).

  A parallel running sum may rise by rounding across weights of 0, or end below the point: neither may choose an index of
  weight 0, and the last index with weight takes what is left.
  """
  sums = jnp.cumsum(weights, axis=-1)
  point = uniform * sums[..., -1]
  passed = (sums > point[..., None]) & (weights > 0)
  last = weights.shape[-1] - 1 - jnp.argmax(weights[..., ::-1] > 0, axis=-1)
  index = jnp.where(passed.any(-1), jnp.argmax(passed, axis=-1), last)
  weight = jnp.take_along_axis(weights, index[..., None], -1)[..., 0]
  start = jnp.take_along_axis(sums, index[..., None], -1)[..., 0] - weight
  return index, jnp.clip((point - start) / jnp.where(weight > 0, weight, 1), 0, 1 - 2**-24)


def _uniform(keys: jax.Array) -> jax.Array:
  draw_one = lambda key: jax.random.uniform(key, dtype=jnp.float32)
  for _ in keys.shape:
    draw_one = jax.vmap(draw_one)
  return draw_one(keys)
