"""The trainer's log-probs of completions: the model, followed by the chunked head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms import Distillation
from gtpo_jax.arrays import Packing, Prompts, Rollouts
from gtpo_jax.models.experts.routing import RouterStatistics
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import named_sharding
from gtpo_jax.training.head import (
  HeadSettings,
  TeacherStates,
  TokenLoss,
  log_probs_and_entropy,
  loss_and_log_probs,
  score_norms,
)
from gtpo_jax.training.head_logits import Comparison
from gtpo_jax.training.packing import merge_parts, split_batch
from gtpo_jax.training.state import BUILDER_CACHE_SIZE


class Reading(NamedTuple):
  """The inputs of a forward pass, and the tokens whose log-probs it computes."""

  prompts: Prompts  # of the completions
  tokens: jax.Array  # i32[n, g, t], the completions
  packing: Packing | None = None  # the rows that completions share; None if each has its own
  # i32[n, g, t], tokens whose log-probs are computed after the same ones; None for `tokens`
  targets: jax.Array | None = None
  # `Rollouts.routes`, with which tokens are computed as `ModelConfig.router_replay` says; None if
  # nothing was recorded. The prompts have their own
  routes: jax.Array | None = None
  shares: jax.Array | None = None  # as in `RecordedRoutes`

  @classmethod
  def of(cls, rollouts: Rollouts) -> Reading:
    """Returns the trainer's inputs from rollouts."""
    return cls(rollouts.prompts, rollouts.tokens, rollouts.packing, routes=rollouts.routes)


class Teaching(NamedTuple):
  """A teacher whose distributions the policy is to match."""

  model: Transformer  # its architecture
  params: Params  # its parameters
  distillation: Distillation  # names the divergence
  prompts: Prompts  # its prompts
  weights: jax.Array  # f32[n, g, t], the weight of each token's divergence in the loss


def head_settings(
  model: Transformer, temperature: float, chunk: int, entropy_gradient: bool = False
) -> HeadSettings:
  """Returns the settings of a model's head; see `HeadSettings`."""
  precision = model.config.matmul_precision
  return HeadSettings(model.mesh, temperature, chunk, precision, entropy_gradient)


def score(
  model: Transformer, params: Params, reading: Reading, settings: HeadSettings
) -> tuple[jax.Array, jax.Array]:
  """Returns log-probs and entropies f32[n, g, t], in nats, of completion tokens.

  The distribution is softmax(logits / temperature). With a packing, values after the end of a
  completion are arbitrary. The `settings` are from `head_settings`.
  """
  return score_with_routers(model, params, reading, settings)[:2]


def score_with_routers(
  model: Transformer, params: Params, reading: Reading, settings: HeadSettings
) -> tuple[jax.Array, jax.Array, RouterStatistics | None]:
  """As `score`, and returns the statistics of the routers [n, g, t]; None if dense."""
  *head_inputs, router = _head_inputs(model, params, reading)
  outputs = (*log_probs_and_entropy(*head_inputs, settings), router)
  return jax.tree.map(lambda x: _to_completions(x, reading), outputs)


def loss_and_score(
  model: Transformer,
  params: Params,
  reading: Reading,
  settings: HeadSettings,
  token_loss: TokenLoss,
  signals: Any,
  teaching: Teaching | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Comparison | None, RouterStatistics | None]:
  """Returns the loss f32[], and the same log-probs and entropies f32[n, g, t] as `score`.

  With `teaching`, the loss includes the divergence from the teacher. The last results are the
  comparison with the teacher at each token [n, g, t], or None, and the statistics of the routers,
  whose `balance` has a gradient too; None without experts.

  The gradient is computed together with the loss, and flows only through the loss.

  Args:
    model, params, reading, settings: as in `score`.
    token_loss: as in `loss_and_log_probs`.
    signals: a pytree of arrays [n, g, t], or [n, g] if all tokens of a completion share one value.
      Signals of padding are 0, and `token_loss` must be 0 there.
    teaching: the teacher, if its distributions are matched.
  """

  def to_rows(x: jax.Array) -> jax.Array:
    per_token = jnp.broadcast_to(x.reshape(*tokens.shape[:2], -1), tokens.shape)
    return _to_rows(per_token, reading.packing)

  tokens = reading.tokens
  hidden, table, row_tokens, router = _head_inputs(model, params, reading)
  teacher = None
  if teaching is not None:
    params = jax.lax.stop_gradient(teaching.params)
    read = Reading(teaching.prompts, tokens, reading.packing)
    states, teacher_table, *_ = _head_inputs(teaching.model, params, read)
    weights = to_rows(teaching.weights)
    teacher = TeacherStates(states, teacher_table, weights, teaching.distillation)
  loss, *outputs = loss_and_log_probs(
    token_loss, hidden, table, row_tokens, jax.tree.map(to_rows, signals), settings, teacher
  )
  # The comparison is None without a teacher, and the statistics without experts.
  of_completions = jax.tree.map(lambda x: _to_completions(x, reading), [*outputs, router])
  return loss, *of_completions


@functools.lru_cache(maxsize=BUILDER_CACHE_SIZE)
def make_scorer(
  model: Transformer,
  temperature: float,
  micro_batches: int,
  chunk: int,
  replays: bool = False,
  norms: bool = False,
) -> Callable[[Params, Rollouts], jax.Array]:
  """Returns a jitted function (params, rollouts) -> log-probs f32[n, g, t] of the sampled tokens.

  The log-probs are in nats, computed with the trainer's forward pass, and 0 on padding. Only the
  policy that sampled the tokens `replays` its choices of experts. With `norms`, the function
  returns `score_norms` in place of the log-probs.
  """

  settings = head_settings(model, temperature, chunk)

  def log_probs(params: Params, rollouts: Rollouts) -> jax.Array:
    def score_part(x: Rollouts) -> jax.Array:
      x = x if replays else x.replace(routes=None)
      reading = Reading.of(x)
      if norms:
        *head_inputs, _ = _head_inputs(model, params, reading)
        scores = _to_completions(score_norms(*head_inputs, settings), reading)
      else:
        scores, _ = score(model, params, reading, settings)
      return jnp.where(x.mask, scores, 0.0)

    parts = split_batch(rollouts, micro_batches, model)
    return merge_parts(jax.lax.map(score_part, parts), len(rollouts.mask))

  return jax.jit(log_probs, out_shardings=named_sharding(model.mesh, "batch"))


def _head_inputs(
  model: Transformer, params: Params, reading: Reading
) -> tuple[jax.Array, jax.Array, jax.Array, RouterStatistics | None]:
  """Returns the states [b, t, d] that predict each token, the head [v, d] and tokens i32[b, t].

  With targets, it returns these in place of the tokens. The last result are the statistics of the
  routers, in the shape of the rows.
  """
  prompts, tokens, packing, targets, *recorded = reading
  hidden, router = model.apply(
    {"params": params}, prompts, tokens, packing, *recorded, method="completion_states"
  )
  return (
    hidden.reshape(-1, *hidden.shape[2:]),
    model.apply({"params": params}, method="head_table"),
    _to_rows(tokens if targets is None else targets, packing),
    router,
  )


def _to_rows(x: jax.Array, packing: Packing | None) -> jax.Array:
  """Reshapes [n, g, t] to rows: [n g, t], or [n w, s] with a packing."""
  x = x if packing is None else packing.pack(x)
  return x.reshape(-1, x.shape[2])


def _to_completions(x: jax.Array, reading: Reading) -> jax.Array:
  """Undoes `_to_rows`."""
  tokens, packing = reading.tokens, reading.packing
  if packing is None:
    return x.reshape(tokens.shape)
  return packing.unpack(x.reshape(packing.source.shape), tokens.shape[2])
