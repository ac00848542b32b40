"""Samples a token from logits: repetition penalty, temperature, top-k, top-p, min-p, draw.

The policy is the distribution at the sampling temperature, *before* penalty and filters. The
algorithms use its log-probs and entropy. Penalty and filters only affect which token is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.sampling.settings import SamplingParams

BLOCK = 128  # tokens per block of the two-level draw; the width of a TPU vector register
ALTERNATIVES = 20  # the most probable tokens that `sample_rows` returns for each position


class SampledToken(NamedTuple):
  """One sampled token per row. Log-probs and entropy are in nats."""

  token: jax.Array  # i32[...]
  log_prob: jax.Array  # f32[...], under the policy: softmax(logits / temperature), unfiltered
  entropy: jax.Array  # f32[...], of the policy
  drawn_log_prob: jax.Array  # f32[...], after penalty and filters; 0 under greedy decoding
  plain_log_prob: jax.Array  # f32[...], under softmax(logits)


class Temperature(NamedTuple):
  """A temperature and what it is compared with: once for a chunk, and not for every token."""

  divisor: float | jax.Array  # f32[], divides the logits; 1 if greedy
  greedy: bool | jax.Array  # bool[], whether it is 0, which takes the most probable token
  plain: bool | jax.Array  # bool[], whether the divisor is 1

  @classmethod
  def of(cls, temperature: float | jax.Array) -> Temperature:
    """Returns it for a number, which the compiler knows, or for an array f32[]."""
    greedy = temperature == 0
    if isinstance(greedy, bool):
      divisor = 1.0 if greedy else temperature
    else:
      divisor = jnp.where(greedy, 1.0, temperature)
    return cls(divisor, greedy, divisor == 1)


class RowSampling(NamedTuple):
  """How the tokens of a row are drawn, or of all rows, if these differ: then arrays [s]."""

  temperature: Any = np.float32(1)  # 0 takes the most probable token
  top_k: Any = np.int32(0)  # 0 keeps all
  top_p: Any = np.float32(1)  # 1 keeps all
  min_p: Any = np.float32(0)  # 0 keeps all
  lists_alternatives: Any = np.bool_(False)  # whether the row, or any, wants `Alternatives`

  @classmethod
  def of(cls, rows: Iterable[RowSampling]) -> RowSampling:
    """Returns the arrays of some rows."""
    columns = zip(zip(*rows, strict=True), cls(), strict=True)
    arrays = cls(*(np.asarray(column, plain.dtype) for column, plain in columns))
    return arrays._replace(lists_alternatives=arrays.lists_alternatives.any())


PLAIN = RowSampling()


class Alternatives(NamedTuple):
  """The most probable tokens, in descending order, k of them."""

  tokens: jax.Array  # i32[..., k]
  log_probs: jax.Array  # f32[..., k], nats, under softmax(logits)


def sample_token(
  params: SamplingParams,
  temperature: float | jax.Array | Temperature,
  logits: jax.Array,
  keys: jax.Array,
  seen_tokens: jax.Array | None = None,
) -> SampledToken:
  """Samples one token per row.

  Args:
    params: penalty and filters; its temperature is not used.
    temperature: divides the logits; 0 takes the most probable token. With an array f32[], greedy
      and random sampling are the same program. With a number, the program has no branches, which
      is a tenth faster for small models on CPU.
    logits: f32[..., v].
    keys: typed PRNG keys [...]; unused at temperature 0.
    seen_tokens: bool[..., v], the tokens of the prompt and the completion so far; only needed for a
      repetition penalty.
  """
  if not isinstance(temperature, Temperature):
    temperature = Temperature.of(temperature)
  divisor, greedy, plain = temperature
  policy = _Softmax(logits, divisor)
  weights = policy.weights
  # Sums over blocks of tokens serve the totals and the draw.
  block_sums = _blocks(weights).sum(-1)
  weighted = _blocks(jnp.where(weights > 0, weights * policy.scaled, 0)).sum(-1)
  # Otherwise a GPU computes each in a pass of its own over the logits.
  block_sums, weighted = jax.lax.optimization_barrier((block_sums, weighted))
  total = block_sums.sum(-1, keepdims=True)
  entropy = jnp.log(total) - weighted.sum(-1, keepdims=True) / total
  at = lambda values, token: jnp.take_along_axis(values, token[..., None], -1)

  penalised = logits
  if params.penalises_repetition:
    penalised = _penalise(logits, seen_tokens, params.repetition_penalty)
  if params.is_filtered:
    draw_weights = apply_filters(params, _Softmax(penalised, divisor).weights)
    drawn = draw(draw_weights, keys)
  else:
    drawn = _draw(block_sums, policy.block_weights, keys)
  # A branch computes what only it needs, so that the other does not read the logits for it.
  token = _select(greedy, lambda: most_probable(penalised), lambda: drawn)
  log_prob = policy.at(token) - jnp.log(total)
  drawn_log_prob = log_prob
  if params.is_filtered:
    drawn_log_prob = jnp.log(at(draw_weights, token) / draw_weights.sum(-1, keepdims=True))
  drawn_log_prob = _select(greedy, lambda: jnp.zeros_like(log_prob), lambda: drawn_log_prob)
  plain_log_prob = _select(
    plain, lambda: log_prob, lambda: at(logits, token) - jax.nn.logsumexp(logits, -1, keepdims=True)
  )
  values = (log_prob, jnp.maximum(entropy, 0), drawn_log_prob, plain_log_prob)
  return SampledToken(token, *(x[..., 0] for x in values))


def sample_rows(
  rows: RowSampling, logits: jax.Array, keys: jax.Array
) -> tuple[SampledToken, Alternatives]:
  """Samples one token per row, each in its own way.

  Each row draws what `sample_token` draws for it alone.

  Args:
    rows: how each row is drawn.
    logits: f32[s, v].
    keys: typed PRNG keys [s].

  Returns:
    The tokens, and the alternatives to them; zeros if no row wants them.
  """
  greedy = rows.temperature == 0
  policy = _Softmax(logits, jnp.where(greedy, 1.0, rows.temperature)[:, None])
  weights = policy.weights
  block_sums = _blocks(weights).sum(-1)
  total = block_sums.sum(-1)
  weighted = jnp.where(weights > 0, weights * policy.scaled, 0).sum(-1)
  entropy = jnp.maximum(jnp.log(total) - weighted / total, 0)
  unfiltered = _draw(block_sums, policy.block_weights, keys)
  is_filtered = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)

  def filtered() -> tuple[jax.Array, jax.Array]:
    kept = filter_rows(rows, weights)
    token = jnp.where(is_filtered, draw(kept, keys), unfiltered)
    return token, jnp.where(is_filtered, kept.sum(-1), total)

  token, kept_total = jax.lax.cond(is_filtered.any(), filtered, lambda: (unfiltered, total))
  token = jax.lax.cond(
    greedy.any(), lambda: jnp.where(greedy, most_probable(logits), token), lambda: token
  )
  normaliser = jax.nn.logsumexp(logits, -1)
  scaled = policy.at(token)[:, 0]
  sampled = SampledToken(
    token=token,
    log_prob=scaled - jnp.log(total),
    entropy=entropy,
    drawn_log_prob=jnp.where(greedy, 0, scaled - jnp.log(kept_total)),
    plain_log_prob=jnp.take_along_axis(logits, token[:, None], -1)[:, 0] - normaliser,
  )
  k = min(ALTERNATIVES, logits.shape[-1])
  zeros = Alternatives(jnp.zeros((len(logits), k), jnp.int32), jnp.zeros((len(logits), k)))
  listed = lambda: alternatives(logits, normaliser)
  return sampled, jax.lax.cond(rows.lists_alternatives, listed, lambda: zeros)


def most_probable(logits: jax.Array) -> jax.Array:
  """Returns the index i32[...] of the first largest logit of f32[..., v].

  XLA computes `jnp.argmax` on a CPU one logit after another on one core; a maximum and a minimum
  are vectorised.
  """
  v = logits.shape[-1]
  largest = logits == logits.max(-1, keepdims=True)
  first = jnp.where(largest, jnp.arange(v, dtype=jnp.int32), v).min(-1)
  return jnp.minimum(first, v - 1)  # NaNs are equal to nothing


def alternatives(logits: jax.Array, normaliser: jax.Array) -> Alternatives:
  """Returns the most probable tokens of logits f32[..., v], given their logsumexp f32[...]."""
  best, tokens = jax.lax.top_k(logits, min(ALTERNATIVES, logits.shape[-1]))
  return Alternatives(tokens.astype(jnp.int32), best - normaliser[..., None])


def filter_rows(rows: RowSampling, weights: jax.Array) -> jax.Array:
  """Does what `apply_filters` does, with other filters for each row.

  A filter keeps the tokens from some weight on. That bound is found by bisection, which a CPU does
  faster than it sorts a large vocabulary.

  Args:
    rows: the filters.
    weights: f32[s, v] from 0 to 1; the largest of each row is 1.
  """
  top_k = jnp.where(rows.top_k > 0, rows.top_k, weights.shape[-1])[:, None]
  enough = lambda kept: kept.sum(-1, keepdims=True) >= top_k
  by_rank = lambda: _keep_most(weights, enough)
  weights = jax.lax.cond((rows.top_k > 0).any(), by_rank, lambda: weights)

  def by_mass() -> jax.Array:
    needed = rows.top_p[:, None] * weights.sum(-1, keepdims=True)
    mass = lambda kept: jnp.where(kept, weights, 0).sum(-1, keepdims=True)
    kept = _keep_most(weights, lambda kept: mass(kept) >= needed)
    return jnp.where(rows.top_p[:, None] < 1, kept, weights)

  weights = jax.lax.cond((rows.top_p < 1).any(), by_mass, lambda: weights)
  return jnp.where(weights >= rows.min_p[:, None], weights, 0)


def _keep_most(weights: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """Returns `weights` f32[s, v] with 0 below the highest bound at which `enough` tokens are kept.

  Args:
    weights: from 0 to 1.
    enough: bool[s, v], the tokens that are kept -> bool[s, 1]. It holds if all are kept.
  """
  bits = jax.lax.bitcast_convert_type(weights, jnp.int32)  # numbers >= 0 are ordered as their bits

  def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low, high = bounds
    middle = high - (high - low) // 2
    holds = enough(bits >= middle)
    return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

  low = jnp.zeros((len(weights), 1), jnp.int32)
  high = jnp.full_like(low, jnp.float32(1).view(jnp.int32))
  bound, _ = jax.lax.fori_loop(0, 30, halve, (low, high))
  return jnp.where(bits >= bound, weights, 0)


def _select(condition: bool | jax.Array, then: Callable[[], Any], other: Callable[[], Any]) -> Any:
  """Returns `then()` or `other()`; computes only one if the condition is known to the compiler."""
  if isinstance(condition, bool):
    return then() if condition else other()
  return jax.lax.cond(condition, then, other)


class _Softmax:
  """The softmax of logits f32[..., v] before normalisation.

  What is needed for single tokens is computed from their logits alone, so that no array of the size
  of the logits is stored besides them.
  """

  def __init__(self, logits: jax.Array, temperature: float | jax.Array):
    self._logits = logits
    self._maximum = logits.max(-1, keepdims=True)
    self._temperature = temperature

  @property
  def scaled(self) -> jax.Array:
    """f32[..., v], the logits divided by the temperature, with maximum 0."""
    return self._scale(self._logits)

  @property
  def weights(self) -> jax.Array:
    """f32[..., v], the exponentials of `scaled`."""
    return jnp.exp(self.scaled)

  def at(self, token: jax.Array) -> jax.Array:
    """Returns `scaled` at `token` i32[...], f32[..., 1]."""
    return self._scale(jnp.take_along_axis(self._logits, token[..., None], -1))

  def block_weights(self, block: jax.Array) -> jax.Array:
    """Returns the weights f32[..., BLOCK] of the block of tokens `block` i32[...]."""
    index = block[..., None] * BLOCK + jnp.arange(BLOCK)
    logits = jnp.take_along_axis(self._logits, index, -1, mode="fill", fill_value=-jnp.inf)
    return jnp.exp(self._scale(logits))

  def _scale(self, logits: jax.Array) -> jax.Array:
    # The maximum is subtracted before dividing, so that it is exactly 0.
    return (logits - self._maximum) / self._temperature


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
  blocks = _blocks(probs)
  inside = lambda block: jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
  return _draw(blocks.sum(-1), inside, keys)


def _draw(
  block_sums: jax.Array, inside: Callable[[jax.Array], jax.Array], keys: jax.Array
) -> jax.Array:
  """Draws an index as `draw` does.

  Args:
    block_sums: f32[..., blocks], the sum of each block of `BLOCK` entries.
    inside: block i32[...] -> f32[..., BLOCK], the entries of one block, 0 past the last entry.
    keys: typed PRNG keys [...].
  """
  block, fraction = _invert_cdf(block_sums, _uniform(keys))
  index, _ = _invert_cdf(inside(block), fraction)
  return (block * BLOCK + index).astype(jnp.int32)


def _blocks(x: jax.Array) -> jax.Array:
  """Returns `x` [..., v] in blocks, [..., blocks, BLOCK], with zeros past the last entry."""
  padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)])
  return padded.reshape(*x.shape[:-1], -1, BLOCK)


def _penalise(logits: jax.Array, seen_tokens: jax.Array, penalty: float) -> jax.Array:
  return jnp.where(seen_tokens, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def _invert_cdf(weights: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Inverts the CDF of unnormalised `weights` f32[..., v] at `uniform` f32[...] in [0, 1).

  Because of rounding, a parallel running sum may rise across weights of 0 or end below the target.
  Neither selects an index of weight 0: rises at weights of 0 are ignored, and a target past the end
  selects the last index with a positive weight.

  Returns:
    The index i32[...], and the target's position within that index's weight, f32[...] in [0, 1).
  """
  sums = jnp.cumsum(weights, axis=-1)
  target = uniform * sums[..., -1]
  positive = weights > 0
  passed = (sums > target[..., None]) & positive
  # A minimum and a maximum of indices are vectorised; `jnp.argmax` is not.
  v = weights.shape[-1]
  indices = jnp.arange(v, dtype=jnp.int32)
  first = jnp.where(passed, indices, v).min(-1)
  last = jnp.where(positive, indices, -1).max(-1)
  index = jnp.where(first < v, first, jnp.where(last < 0, v - 1, last))
  weight = jnp.take_along_axis(weights, index[..., None], -1)[..., 0]
  start = jnp.take_along_axis(sums, index[..., None], -1)[..., 0] - weight
  return index, jnp.clip((target - start) / jnp.where(weight > 0, weight, 1), 0, 1 - 2**-24)


def _uniform(keys: jax.Array) -> jax.Array:
  """Returns one uniform number f32[...] in [0, 1) for each typed PRNG key [...]."""
  draw_one = lambda key: jax.random.uniform(key, dtype=jnp.float32)
  for _ in keys.shape:
    draw_one = jax.vmap(draw_one)
  return draw_one(keys)
