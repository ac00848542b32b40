"""Supervised imitation of a teacher, which produces the base model of a warm-started run."""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.struct
import jax
import optax

from gtpo_jax.algorithms.loss import token_mean
from gtpo_jax.arrays import Prompts, masked_sum
from gtpo_jax.models.lora import combine, partition
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.compiler_options import update_options
from gtpo_jax.training.log_probs import Reading, head_settings, loss_and_score
from gtpo_jax.training.state import (
  BUILDER_CACHE_SIZE,
  Optimizer,
  TrainState,
  abstract_state,
  loss_scale,
  scaled,
  unscale,
)


@flax.struct.dataclass
class Demonstrations:
  """The teacher's completions for k updates of b prompts each."""

  prompts: Prompts  # [k, b, p]
  tokens: jax.Array  # i32[k, b, t]
  mask: jax.Array  # bool[k, b, t]


@functools.lru_cache(maxsize=BUILDER_CACHE_SIZE)
def make_imitation(
  model: Transformer, optimizer: Optimizer, head_chunk: int
) -> Callable[[TrainState, Demonstrations], tuple[TrainState, jax.Array]]:
  """Returns a jitted function (state, demonstrations) -> (state, losses f32[k]).

  The function makes k maximum-likelihood updates. It donates its `state` argument. Losses are in
  nats per token.
  """

  settings = head_settings(model, 1.0, head_chunk)
  scale = loss_scale(model.config)
  cross_entropy = scaled(
    lambda log_probs, entropy, weights: -masked_sum(weights * log_probs, weights > 0), scale
  )

  def imitation_step(state: TrainState, batch: Demonstrations) -> tuple[TrainState, jax.Array]:
    trained, frozen = partition(model, state.params)

    def loss_fn(trained: Params) -> jax.Array:
      params = combine(trained, frozen)
      reading = Reading(batch.prompts, batch.tokens[:, None])
      weights = token_mean(batch.mask)[:, None]
      return loss_and_score(model, params, reading, settings, cross_entropy, weights)[0]

    loss, grads = jax.value_and_grad(loss_fn)(trained)
    loss, grads = unscale((loss, grads), scale)
    opt_state = optimizer.load_moments(state.opt_state)
    updates, opt_state = optimizer.update(grads, opt_state, trained)
    params = combine(optax.apply_updates(trained, updates), frozen)
    opt_state = optimizer.offload_moments(opt_state)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss

  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer))
  return jax.jit(
    lambda state, demonstrations: jax.lax.scan(imitation_step, state, demonstrations),
    donate_argnums=0,
    out_shardings=(shardings, None),
    compiler_options=update_options(model.mesh.devices.flat),
  )
