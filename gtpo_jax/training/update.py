"""One compiled call from rollouts and verdicts to the next state."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.arrays import Rollouts, Verdicts
from gtpo_jax.models.lora import combine, partition
from gtpo_jax.models.qwen2 import Params, Qwen2
from gtpo_jax.training.head import score
from gtpo_jax.training.measures import measure
from gtpo_jax.training.micro_batches import join, split
from gtpo_jax.training.state import TrainState, abstract_state

Update = Callable[[TrainState, Rollouts, Verdicts], tuple[TrainState, dict[str, jax.Array]]]


def make_update(model: Qwen2, algorithm: Algorithm, optimizer: optax.GradientTransformation, *, temperature: float = 1.0,
                micro_batches: int = 1, head_chunk: int = 4096) -> Update:
  """The update as one jitted function (state, rollouts, verdicts) -> (state, metrics); it consumes the state it is given.

  Advantages and token weights are made from the whole batch. Gradients are then summed over `micro_batches` parts of the
  prompts, in float32, which gives the full batch's gradient whatever their number. Where loss or gradient is not finite, parameters
  and optimizer stay as they are, the step counts all the same, and `update/skipped` is 1.

  Args:
    model: the architecture on its mesh.
    algorithm: from `algorithms.make`.
    optimizer: from `make_optimizer`.
    temperature: the sampling policy's; log-probs are compared at it.
    micro_batches: parts that the n prompts are cut into.
    head_chunk: tokens whose logits are held at once.
  """
  def update(state: TrainState, rollouts: Rollouts, verdicts: Verdicts) -> tuple[TrainState, dict[str, jax.Array]]:
    counted = rollouts.mask if verdicts.counted is None else rollouts.mask & verdicts.counted[..., None]
    signals = {"entropy": rollouts.entropy, "mask": counted, "correct": verdicts.correct, "reward": verdicts.reward,
               "penalty": verdicts.penalty, "guided": rollouts.guided}
    advantages, mask = algorithm.advantages(**signals), algorithm.loss_mask(**signals)
    weights = algorithm.token_weights(mask, verdicts.correct, rollouts.guided)
    trained, frozen = partition(model, state.params)
    grads, log_probs = accumulate(trained, frozen, (rollouts, advantages, mask, weights))

    loss, metrics = loss_of(log_probs, rollouts, advantages, mask, weights)
    norm = optax.global_norm(grads)
    good = jnp.isfinite(loss) & jnp.isfinite(norm)

    changes, moved = optimizer.update(grads, state.opt_state, trained)
    after, before = (optax.apply_updates(trained, changes), moved), (trained, state.opt_state)
    trained, opt_state = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before)

    metrics |= {"loss": loss, "grad_norm": norm, "update/skipped": ~good}
    metrics |= measure(rollouts, verdicts, advantages, mask, log_probs) | algorithm.credit_metrics(**signals)
    return TrainState(state.step + 1, combine(trained, frozen), opt_state), metrics

  def loss_of(log_probs: jax.Array, rollouts: Rollouts, advantages: jax.Array, mask: jax.Array,
              weights: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return algorithm.loss(logp=log_probs, logp_old=rollouts.old_log_probs, advantages=advantages, mask=mask, weights=weights,
                          guided=rollouts.guided, logp_sampler=rollouts.log_probs, logp_reference=rollouts.reference)

  def accumulate(trained: Params, frozen: Params, batch: tuple[Rollouts, jax.Array, jax.Array, jax.Array]) -> tuple[Params, jax.Array]:
    """The gradient of what is trained over the whole batch, and the learner's log-probs f32[n, g, t]."""
    def part_loss(trained: Params, part: tuple) -> tuple[jax.Array, jax.Array]:
      rollouts, *rest = part
      log_probs, _ = score(model, combine(trained, frozen), rollouts.prompts, rollouts.tokens, temperature, head_chunk)
      return loss_of(log_probs, rollouts, *rest)[0], log_probs

    gradient = jax.grad(part_loss, has_aux=True)
    if micro_batches == 1:
      return gradient(trained, batch)

    def add(total: Params, part: tuple) -> tuple[Params, jax.Array]:
      grads, log_probs = gradient(trained, part)
      return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), total, grads), log_probs

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), trained)  # whatever the type of the parameters
    total, log_probs = jax.lax.scan(add, zeros, split(batch, micro_batches, model))
    return jax.tree.map(lambda x, like: x.astype(like.dtype), total, trained), join(log_probs)

  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer))
  return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))
