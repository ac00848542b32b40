"""One compiled call from rollouts and verdicts to the next state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.arrays import Rewards, Rollouts
from gtpo_jax.models.lora import combine, partition
from gtpo_jax.models.qwen2 import Params, Qwen2
from gtpo_jax.training.head import score, score_and_loss
from gtpo_jax.training.measures import measure, mismatch
from gtpo_jax.training.micro_batches import join, split
from gtpo_jax.training.state import Optimizer, TrainState, abstract_state

Metrics = dict[str, jax.Array]  # f32[] each
Learned = tuple[Params, Any]  # what is trained, and the optimizer's state
Update = Callable[[TrainState, Rollouts, Rewards], tuple[TrainState, Metrics]]


def make_update(
  model: Qwen2,
  algorithm: Algorithm,
  optimizer: Optimizer,
  *,
  temperature: float = 1.0,
  minibatches: int = 1,
  epochs: int = 1,
  micro_batches: int = 1,
  head_chunk: int = 4096,
) -> Update:
  """The update as one jitted function (state, rollouts, verdicts) -> (state, metrics); it consumes the state it is given.

  Advantages are made from the whole batch, once. Then comes one gradient update for each of `minibatches` parts of the prompts,
  `epochs` times over; each averages over its own tokens, and all compare with the log-probs of the policy that sampled. A
  minibatch's gradient is summed over `micro_batches` parts of it, in float32, which gives the same whatever their number. Where its loss
  or gradient is not finite, parameters and optimizer stay as they are and the step goes on; `update/skipped` is the share of such.

  Metrics of the loss and its gradient are means over the gradient updates; `mismatch/*` is of the first minibatch, before any of them.

  Args:
    model: the architecture on its mesh.
    algorithm: from `algorithms.make`.
    optimizer: from `make_optimizer`.
    temperature: the sampling policy's; log-probs are compared at it.
    minibatches: parts of the n prompts that are learned from one after the other.
    epochs: times that the batch is gone through.
    micro_batches: parts that each minibatch is cut into.
    head_chunk: tokens whose logits are held at once.
  """

  def update(
    state: TrainState, rollouts: Rollouts, verdicts: Rewards
  ) -> tuple[TrainState, Metrics]:
    valid = rollouts.mask if verdicts.valid is None else rollouts.mask & verdicts.valid[..., None]
    signals = {
      "entropy": rollouts.entropy,
      "mask": valid,
      "correct": verdicts.correct,
      "reward": verdicts.reward,
      "penalty": verdicts.penalty,
      "guided": rollouts.guided,
    }
    advantages = algorithm.advantages(**signals)
    mask = algorithm.loss_mask(**signals)
    trained, frozen = partition(model, state.params)
    learned = (trained, state.opt_state)
    batch = (rollouts, verdicts.correct, advantages, mask)
    if minibatches == epochs == 1:
      learned, metrics, apart = learn(frozen, learned, batch)
    else:
      parts = split(batch, minibatches, model)
      order = jnp.tile(jnp.arange(minibatches), epochs)

      def one(learned: Learned, i: jax.Array) -> tuple[Learned, tuple[Metrics, Metrics]]:
        learned, *measured = learn(frozen, learned, jax.tree.map(lambda x: x[i], parts))
        return learned, tuple(measured)

      learned, (each, apart) = jax.lax.scan(one, learned, order)
      metrics = jax.tree.map(lambda x: x.mean(), each)
      apart = jax.tree.map(lambda x: x[0], apart)
    metrics |= (
      apart | measure(rollouts, verdicts, advantages, mask) | algorithm.credit_metrics(**signals)
    )
    return TrainState(state.step + 1, combine(learned[0], frozen), learned[1]), metrics

  def learn(frozen: Params, learned: Learned, batch: tuple) -> tuple[Learned, Metrics, Metrics]:
    """One gradient update on (rollouts, correct, advantages, mask): what it gives, its metrics, and the mismatch before it."""
    (trained, opt_state) = learned
    (rollouts, correct, advantages, mask) = batch
    weights = algorithm.token_weights(mask, correct, rollouts.guided)
    grads, log_probs = accumulate(trained, frozen, (rollouts, advantages, mask, weights))
    loss, metrics = algorithm.loss(
      logp=log_probs, **signals_of(rollouts, advantages, mask, weights)
    )
    norm = optax.global_norm(grads)
    good = jnp.isfinite(loss) & jnp.isfinite(norm)

    before = trained, optimizer.fetched(opt_state)
    changes, moved = optimizer.update(grads, before[1], trained)
    after = optax.apply_updates(trained, changes), moved
    trained, opt_state = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before)
    metrics |= {"loss": loss, "grad_norm": norm, "update/skipped": (~good).astype(jnp.float32)}
    return (trained, optimizer.rested(opt_state)), metrics, mismatch(rollouts, log_probs)

  def signals_of(
    rollouts: Rollouts, advantages: jax.Array, mask: jax.Array, weights: jax.Array
  ) -> dict[str, jax.Array | None]:
    """What the loss takes beside the learner's log-probs."""
    return {
      "logp_old": rollouts.old_log_probs,
      "advantages": advantages,
      "mask": mask,
      "weights": weights,
      "guided": rollouts.guided,
      "logp_sampler": rollouts.log_probs,
      "logp_reference": rollouts.reference,
    }

  def accumulate(
    trained: Params, frozen: Params, batch: tuple[Rollouts, jax.Array, jax.Array, jax.Array]
  ) -> tuple[Params, jax.Array]:
    """The gradient of what is trained over a minibatch, and the learner's log-probs f32[n, g, t]."""

    def part_loss(trained: Params, part: tuple) -> tuple[jax.Array, jax.Array]:
      rollouts = part[0]
      signals = signals_of(*part)
      inputs = (
        model,
        combine(trained, frozen),
        rollouts.prompts,
        rollouts.tokens,
        temperature,
        head_chunk,
      )
      if algorithm.per_token:
        return score_and_loss(*inputs, algorithm.token_loss, signals, rollouts.packing)
      log_probs, _ = score(*inputs, rollouts.packing)
      return algorithm.loss(logp=log_probs, **signals)[0], log_probs

    gradient = jax.grad(part_loss, has_aux=True)
    if micro_batches == 1:
      return gradient(trained, batch)

    def add(total: Params, part: tuple) -> tuple[Params, jax.Array]:
      grads, log_probs = gradient(trained, part)
      return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), total, grads), log_probs

    zeros = jax.tree.map(
      lambda x: jnp.zeros_like(x, jnp.float32), trained
    )  # whatever the type of the parameters
    total, log_probs = jax.lax.scan(add, zeros, split(batch, micro_batches, model))
    return jax.tree.map(lambda x, like: x.astype(like.dtype), total, trained), join(log_probs)

  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer))
  return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))
