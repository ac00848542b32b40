"""Supervised imitation: the warm start that makes a base model worth improving."""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import optax

from gtpo_jax.algorithms.losses import token_mean
from gtpo_jax.arrays import Prompts, masked_sum
from gtpo_jax.models.lora import combine, partition
from gtpo_jax.models.qwen2 import Params, Qwen2
from gtpo_jax.training.head import score_and_loss
from gtpo_jax.training.state import Optimizer, TrainState, abstract_state


@flax.struct.dataclass
class Demonstrations:
  """What the teacher wrote, for several updates: the leading axis k counts them."""

  prompts: Prompts  # [k, b, p]
  tokens: jax.Array  # i32[k, b, t]
  mask: jax.Array  # bool[k, b, t]


def make_imitation(
  model: Qwen2, optimizer: Optimizer, head_chunk: int
) -> Callable[[TrainState, Demonstrations], tuple[TrainState, jax.Array]]:
  """A jitted (state, demonstrations) -> (state, losses f32[k]): k updates of maximum likelihood, mean nats a token."""

  def one(state: TrainState, part: Demonstrations) -> tuple[TrainState, jax.Array]:
    trained, frozen = partition(model, state.params)

    def loss_of(trained: Params) -> tuple[jax.Array, jax.Array]:
      params = combine(trained, frozen)
      weights = token_mean(part.mask)[:, None]
      return score_and_loss(
        model, params, part.prompts, part.tokens[:, None], 1.0, head_chunk, _cross_entropy, weights
      )

    (loss, _), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
    changes, opt_state = optimizer.update(grads, optimizer.fetched(state.opt_state), trained)
    return TrainState(
      state.step + 1,
      combine(optax.apply_updates(trained, changes), frozen),
      optimizer.rested(opt_state),
    ), loss

  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer))
  return jax.jit(
    lambda state, parts: jax.lax.scan(one, state, parts),
    donate_argnums=0,
    out_shardings=(shardings, None),
  )


def _cross_entropy(log_probs: jax.Array, weights: jax.Array) -> jax.Array:
  return -masked_sum(weights * log_probs, weights > 0)
