"""One compiled call from rollouts and verdicts to the next state."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.arrays import Rollouts, Verdicts
from gtpo_jax.errors import UserError
from gtpo_jax.models.qwen2 import Params, Qwen2
from gtpo_jax.parallel import batch_shards, constrain
from gtpo_jax.training.head import score
from gtpo_jax.training.measures import measure
from gtpo_jax.training.state import TrainState, abstract_state

Update = Callable[[TrainState, Rollouts, Verdicts], tuple[TrainState, dict[str, jax.Array]]]


def make_update(model: Qwen2, algorithm: Algorithm, optimizer: optax.GradientTransformation, *, temperature: float = 1.0,
                micro_batches: int = 1, head_chunk: int = 4096) -> Update:
  """The update as one jitted function (state, rollouts, verdicts) -> (state, metrics); it consumes the state it is given.

  Advantages and token weights are made from the whole batch. Gradients are then summed over `micro_batches` parts of the
  prompts, which gives the full batch's gradient whatever their number.

  Args:
    model: the architecture on its mesh.
    algorithm: from `algorithms.make`.
    optimizer: from `make_optimizer`.
    temperature: the sampling policy's; log-probs are compared at it.
    micro_batches: parts that the n prompts are cut into.
    head_chunk: tokens whose logits are held at once.
  """
  def update(state: TrainState, rollouts: Rollouts, verdicts: Verdicts) -> tuple[TrainState, dict[str, jax.Array]]:
    mask = algorithm.loss_mask(rollouts.mask, verdicts.correct)
    signals = {"entropy": rollouts.entropy, "mask": rollouts.mask, "correct": verdicts.correct, "reward": verdicts.reward,
               "penalty": verdicts.penalty}
    advantages = algorithm.advantages(**signals)
    batch = (rollouts, advantages, mask, algorithm.token_weights(mask))
    grads, log_probs = _accumulate(state.params, batch)

    changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, changes)

    loss, metrics = algorithm.loss(logp=log_probs, logp_old=rollouts.log_probs, advantages=advantages, mask=mask)
    metrics |= {"loss": loss, "grad_norm": optax.global_norm(grads)}
    metrics |= measure(rollouts, verdicts, advantages, mask, log_probs) | algorithm.credit_metrics(**signals)
    return TrainState(state.step + 1, params, opt_state), metrics

  def _accumulate(params: Params, batch: tuple) -> tuple[Params, jax.Array]:
    """The gradient over the whole batch, and the learner's log-probs f32[n, g, t]."""
    def part_loss(params: Params, part: tuple) -> tuple[jax.Array, jax.Array]:
      rollouts, advantages, mask, weights = part
      log_probs, _ = score(model, params, rollouts.prompts, rollouts.tokens, temperature, head_chunk)
      loss, _ = algorithm.loss(logp=log_probs, logp_old=rollouts.log_probs, advantages=advantages, mask=mask, weights=weights)
      return loss, log_probs

    gradient = jax.grad(part_loss, has_aux=True)
    if micro_batches == 1:
      return gradient(params, batch)

    def add(total: Params, part: tuple) -> tuple[Params, jax.Array]:
      grads, log_probs = gradient(params, part)
      return jax.tree.map(jnp.add, total, grads), log_probs

    parts = jax.tree.map(lambda x: _split(x, micro_batches, model), batch)
    grads, log_probs = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return grads, jnp.moveaxis(log_probs, 0, 1).reshape(batch[2].shape)

  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer))
  return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))


def _split(x: jax.Array, parts: int, model: Qwen2) -> jax.Array:
  """[n, ...] -> [parts, n / parts, ...]; every part takes prompts from every shard, so that no device waits."""
  x = jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)
  return constrain(x, model.mesh, None, "batch")


def check_divides(name: str, size: int, parts: int, model: Qwen2) -> None:
  """Refuses a batch of `size` that does not divide into `parts` over the mesh, before anything is compiled."""
  shards = batch_shards(model.mesh)
  if size % (parts * shards):
    raise UserError(f"{name} = {size} does not divide into {parts} micro-batch(es) over {shards} batch shard(s) of mesh "
                    f"{dict(model.mesh.shape)}; make it a multiple of {parts * shards}")
