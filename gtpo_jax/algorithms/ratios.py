"""Importance ratios and the k3 estimate f32[n, g, t], from log-probs f32[n, g, t] in nats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import masked_mean

# Log-ratios are clamped to +-20, which keeps their exponentials finite in float32.
LOG_RATIO_BOUND = 20.0


@dataclasses.dataclass(frozen=True)
class Ratio:
  """An importance ratio.

  Attributes:
    function: (log_probs, log_probs_old, mask) -> f32[n, g, t], differentiable in `log_probs`.
    per_token: whether a token's ratio depends only on that token's log-probs.
  """

  function: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
  per_token: bool


def token_ratio(log_probs: jax.Array, log_probs_old: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns `exp(log_probs - log_probs_old)` per token, with the log-ratio clamped to +-20.

  The ratio is 1 where `mask` is False.
  """
  return bounded_exp(_log_ratio(log_probs, log_probs_old, mask))


def sequence_ratio(log_probs: jax.Array, log_probs_old: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the arithmetic mean of each completion's token ratios, repeated for all its tokens.

  Source: GRPO-S (2508.04349 v1), eq. 6.
  """
  ratio = token_ratio(log_probs, log_probs_old, mask)
  return jnp.broadcast_to(masked_mean(ratio, mask, -1, keepdims=True), mask.shape)


def geometric_sequence_ratio(
  log_probs: jax.Array, log_probs_old: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns `exp(mean(log_probs - log_probs_old))` of each completion, repeated for all its tokens.

  Source: GSPO (2507.18071), eq. 7.
  """
  mean = masked_mean(_log_ratio(log_probs, log_probs_old, mask), mask, -1, keepdims=True)
  return jnp.broadcast_to(bounded_exp(mean), mask.shape)


def gspo_token_ratio(log_probs: jax.Array, log_probs_old: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns `sg(s) pi / sg(pi)` per token, with s the geometric ratio of the token's completion.

  sg is `stop_gradient`. The value is `geometric_sequence_ratio`, but each token has its own
  gradient, `s grad log pi`, so the tokens of a completion can have different advantages.
  Source: GSPO-token (2507.18071, eq. 14).
  """
  sequence = jax.lax.stop_gradient(geometric_sequence_ratio(log_probs, log_probs_old, mask))
  log_probs = jnp.where(mask, log_probs, 0.0)
  return sequence * jnp.exp(log_probs - jax.lax.stop_gradient(log_probs))


# The ratios by value of the setting `ratio`.
RATIOS: dict[str, Ratio] = {
  "token": Ratio(token_ratio, per_token=True),
  "arithmetic": Ratio(sequence_ratio, per_token=False),
  "geometric": Ratio(geometric_sequence_ratio, per_token=False),
  "gspo_token": Ratio(gspo_token_ratio, per_token=False),
}

# The ratios that all tokens of a completion share; they need one advantage per completion.
SEQUENCE_RATIOS = ("arithmetic", "geometric")


def k3(log_probs: jax.Array, log_probs_reference: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns Schulman's k3 estimate of KL(pi || reference) per token, in nats.

  The estimate is `r - 1 - log r` with r = reference / pi. It is never negative, and it is 0 where
  `mask` is False.
  """
  log_ratio = _log_ratio(log_probs_reference, log_probs, mask)
  log_ratio = jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
  return jnp.expm1(log_ratio) - log_ratio


def _log_ratio(log_probs: jax.Array, log_probs_old: jax.Array, mask: jax.Array) -> jax.Array:
  return jnp.where(mask, log_probs - log_probs_old, 0.0)


def bounded_exp(x: jax.Array) -> jax.Array:
  """Returns `exp(x)`, with x clamped to +-20."""
  return jnp.exp(jnp.clip(x, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
