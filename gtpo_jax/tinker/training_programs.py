"""The compiled programs of training: accumulate a gradient, only compute a loss, apply a step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from gtpo_jax.models.lora import combine, partition
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.compiler_options import update_options
from gtpo_jax.tinker.datum_batches import Rows
from gtpo_jax.tinker.losses import sequence_loss, token_losses
from gtpo_jax.training.log_probs import Reading, head_settings, loss_and_score, score
from gtpo_jax.training.state import (
  BUILDER_CACHE_SIZE,
  Optimizer,
  abstract_state,
  adamw,
  loss_scale,
  scaled,
  unscale,
)


class BatchScores(NamedTuple):
  """The loss of a batch, f32[], and the log-probs and entropies of targets, f32[n, g, t] nats."""

  loss: jax.Array
  log_probs: jax.Array
  entropy: jax.Array


@flax.struct.dataclass
class StepSettings:
  """The settings of a step, f32[] each, as in `OptimizerConfig`; `clip_norm` is 0 for none."""

  learning_rate: Any
  b1: Any
  b2: Any
  eps: Any
  weight_decay: Any
  clip_norm: Any


class TrainingPrograms(NamedTuple):
  """The compiled programs of an architecture.

  Attributes:
    abstract: shapes, dtypes and shardings of the trained parameters, and of the optimizer state.
    init: trained parameters -> optimizer state.
    zeros: () -> a gradient of 0.
    accumulate: (trained, frozen, gradient so far, rows, per_token) -> (gradient, `BatchScores`).
    forward: (trained, frozen, rows, per_token) -> `BatchScores`.
    apply: (trained, optimizer state, gradient, `StepSettings`) -> (trained, optimizer state, norm
      of the gradient f32[], whether it was finite bool[]); a step that is not finite changes
      nothing.
  """

  abstract: tuple[Params, Any]
  init: Any
  zeros: Any
  accumulate: Any
  forward: Any
  apply: Any


def all_finite(*trees: Any) -> bool:
  """Returns whether all numbers of trees of arrays are finite."""
  return bool(_all_finite(trees))


@jax.jit
def _all_finite(trees: Any) -> jax.Array:
  return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(trees)]))


@functools.lru_cache(maxsize=BUILDER_CACHE_SIZE)
def make_programs(model: Transformer) -> TrainingPrograms:
  """Returns the programs of an architecture; they compile on their first use."""
  settings = head_settings(model, 1.0, 0)
  scale = loss_scale(model.config)

  def reading_of(rows: Rows) -> Reading:
    return Reading(rows.prompts, rows.tokens, targets=rows.targets)

  def scores(
    trained: Params, frozen: Params, rows: Rows, per_token: bool
  ) -> tuple[jax.Array, BatchScores]:
    inputs = (model, combine(trained, frozen), reading_of(rows), settings)
    if per_token:
      loss = scaled(token_losses, scale)
      total, log_probs, entropy, *_ = loss_and_score(*inputs, loss, rows.inputs)
    else:
      log_probs, entropy = score(*inputs)
      total = scale * sequence_loss(log_probs, rows.inputs)
    return total, BatchScores(total / scale, log_probs, entropy)

  def accumulate(
    trained: Params, frozen: Params, total: Params, rows: Rows, per_token: bool
  ) -> tuple[Params, BatchScores]:
    grads, found = jax.grad(scores, has_aux=True)(trained, frozen, rows, per_token)
    grads = unscale(grads, scale)
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, grads), found

  def forward(trained: Params, frozen: Params, rows: Rows, per_token: bool) -> BatchScores:
    log_probs, entropy = score(model, combine(trained, frozen), reading_of(rows), settings)
    of_tokens = token_losses(log_probs, entropy, rows.inputs)
    loss = of_tokens if per_token else sequence_loss(log_probs, rows.inputs)
    return BatchScores(loss, log_probs, entropy)

  def apply(
    trained: Params, opt_state: Any, grads: Params, step: StepSettings
  ) -> tuple[Params, Any, jax.Array, jax.Array]:
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm)
    clip_norm = jnp.where(step.clip_norm > 0, step.clip_norm, jnp.inf)
    optimizer = adamw(step.learning_rate, step.b1, step.b2, step.eps, step.weight_decay, clip_norm)
    grads = jax.tree.map(lambda x, like: x.astype(like.dtype), grads, trained)
    updates, new_state = optimizer.update(grads, opt_state, trained)
    new = optax.apply_updates(trained, updates)
    keep = lambda new, old: jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)
    return keep(new, trained), keep(new_state, opt_state), norm, finite

  chain = adamw(0.0, 0.9, 0.95, 1e-12, 0.0, 1.0)
  state = abstract_state(model, Optimizer(chain.init, chain.update))
  abstract = (partition(model, state.params)[0], state.opt_state)
  # Everything has one sharding, so that a state that was read runs the same programs, to the bit.
  of_trained, of_state = jax.tree.map(lambda x: x.sharding, abstract)
  zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), abstract[0])
  options = update_options(model.mesh.devices.flat)
  jit = functools.partial(jax.jit, compiler_options=options)
  return TrainingPrograms(
    abstract,
    jax.jit(chain.init, out_shardings=of_state),
    jax.jit(zeros, out_shardings=of_trained),
    jit(accumulate, static_argnames="per_token", out_shardings=(of_trained, None)),
    jit(forward, static_argnames="per_token"),
    jit(apply, out_shardings=(of_trained, of_state, None, None)),
  )
