"""The training step: a jitted function from state, rollouts and rewards to the next state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.arrays import Rewards, Rollouts
from gtpo_jax.models.lora import combine, partition
from gtpo_jax.models.params import Params
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.training.log_probs import loss_and_score, score
from gtpo_jax.training.metrics import batch_metrics, mismatch_metrics
from gtpo_jax.training.micro_batches import merge_parts, split_batch
from gtpo_jax.training.state import BUILDER_CACHE_SIZE, Optimizer, TrainState, abstract_state

Metrics = dict[str, jax.Array]  # f32[] each
Update = Callable[[TrainState, Rollouts, Rewards], tuple[TrainState, Metrics]]


class TrainableState(NamedTuple):
  """The part of the training state that a gradient update changes."""

  params: Params  # trained parameters only
  opt_state: Any


class Minibatch(NamedTuple):
  """The inputs of one gradient update."""

  rollouts: Rollouts
  correct: jax.Array  # bool[n, g]
  advantages: jax.Array  # f32[n, g, t]
  mask: jax.Array  # bool[n, g, t], tokens in the loss


class LossInputs(NamedTuple):
  """The inputs of the loss on a minibatch or on one of its micro-batches."""

  rollouts: Rollouts
  advantages: jax.Array  # f32[n, g, t]
  mask: jax.Array  # bool[n, g, t], tokens in the loss
  weights: jax.Array  # f32[n, g, t], token weights, computed from the complete minibatch


# (trained parameters, frozen parameters, inputs) -> (gradient of the loss, log-probs f32[n, g, t])
GradientFn = Callable[[Params, Params, LossInputs], tuple[Params, jax.Array]]
# (trainable state, frozen parameters, minibatch) -> (trainable state, metrics, mismatch metrics)
GradientUpdateFn = Callable[
  [TrainableState, Params, Minibatch], tuple[TrainableState, Metrics, Metrics]
]


@functools.lru_cache(maxsize=BUILDER_CACHE_SIZE)
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
  """Returns the training step, a jitted function (state, rollouts, rewards) -> (state, metrics).

  Its `state` argument is donated. The advantages are computed once, from the complete batch. The
  prompts are then split into `minibatches`, and each minibatch gets one gradient update; this is
  repeated for `epochs` passes. Each update averages the loss over the tokens of its minibatch, and
  its importance ratios are relative to the log-probs of the policy that sampled the batch. The
  gradient of a minibatch is accumulated in float32 over `micro_batches`; their number does not
  change the result. If the loss or the gradient norm is not finite, the update is skipped:
  parameters and optimizer state are unchanged, and the step continues with the next update.
  `update/skipped` is the fraction of skipped updates.

  The metrics of the loss and the gradient are means over the gradient updates. `mismatch/*` is
  measured on the first minibatch, before the first update.

  Args:
    model: the architecture on its mesh.
    algorithm: from `algorithms.make`.
    optimizer: from `make_optimizer`.
    temperature: the sampling temperature; the trainer's log-probs are computed at it too.
    minibatches: number of parts of the n prompts, each with its own gradient update.
    epochs: number of passes over the batch.
    micro_batches: number of parts of a minibatch over which the gradient is accumulated.
    head_chunk: approximate number of tokens, over all devices, whose logits are in memory at once.
  """
  gradient = _make_gradient(model, algorithm, temperature, micro_batches, head_chunk)
  gradient_update = _make_gradient_update(algorithm, optimizer, gradient)

  def update(state: TrainState, rollouts: Rollouts, rewards: Rewards) -> tuple[TrainState, Metrics]:
    valid = rollouts.mask if rewards.valid is None else rollouts.mask & rewards.valid[..., None]
    signals = {
      "entropy": rollouts.entropy,
      "mask": valid,
      "correct": rewards.correct,
      "reward": rewards.reward,
      "penalty": rewards.penalty,
      "guided": rollouts.guided,
    }
    advantages = algorithm.advantages(**signals)
    mask = algorithm.loss_mask(**signals)
    trained, frozen = partition(model, state.params)
    trainable = TrainableState(trained, state.opt_state)
    batch = Minibatch(rollouts, rewards.correct, advantages, mask)
    if minibatches == epochs == 1:
      trainable, metrics, mismatch = gradient_update(trainable, frozen, batch)
    else:
      parts = split_batch(batch, minibatches, model)
      order = jnp.tile(jnp.arange(minibatches), epochs)
      trainable, metrics, mismatch = _scan_minibatches(
        gradient_update, trainable, frozen, parts, order
      )
    metrics |= mismatch
    metrics |= batch_metrics(rollouts, rewards, advantages, mask)
    metrics |= algorithm.credit_metrics(**signals)
    params = combine(trainable.params, frozen)
    return TrainState(state.step + 1, params, trainable.opt_state), metrics

  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer))
  return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))


def _scan_minibatches(
  gradient_update: GradientUpdateFn,
  trainable: TrainableState,
  frozen: Params,
  minibatches: Minibatch,
  order: jax.Array,
) -> tuple[TrainableState, Metrics, Metrics]:
  """Makes one gradient update for each minibatch index in `order` i32[updates].

  Returns:
    The trainable state, the means of the metrics, and the mismatch metrics of the first update.
  """

  def step(
    trainable: TrainableState, index: jax.Array
  ) -> tuple[TrainableState, tuple[Metrics, Metrics]]:
    minibatch = jax.tree.map(lambda x: x[index], minibatches)
    trainable, metrics, mismatch = gradient_update(trainable, frozen, minibatch)
    return trainable, (metrics, mismatch)

  trainable, (metrics, mismatch) = jax.lax.scan(step, trainable, order)
  metrics = jax.tree.map(lambda x: x.mean(), metrics)
  mismatch = jax.tree.map(lambda x: x[0], mismatch)
  return trainable, metrics, mismatch


def _make_gradient_update(
  algorithm: Algorithm, optimizer: Optimizer, gradient: GradientFn
) -> GradientUpdateFn:
  """Returns a function that makes one gradient update.

  The function returns the state unchanged if the loss or the gradient norm is not finite.
  """

  def gradient_update(
    trainable: TrainableState, frozen: Params, minibatch: Minibatch
  ) -> tuple[TrainableState, Metrics, Metrics]:
    rollouts, correct, advantages, mask = minibatch
    weights = algorithm.token_weights(mask, correct, rollouts.guided)
    inputs = LossInputs(rollouts, advantages, mask, weights)
    grads, log_probs = gradient(trainable.params, frozen, inputs)
    loss, metrics = algorithm.loss(log_probs=log_probs, **_loss_arguments(inputs))
    grad_norm = optax.global_norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    before = TrainableState(trainable.params, optimizer.load_moments(trainable.opt_state))
    updates, opt_state = optimizer.update(grads, before.opt_state, before.params)
    after = TrainableState(optax.apply_updates(before.params, updates), opt_state)
    trainable = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
    trainable = TrainableState(trainable.params, optimizer.offload_moments(trainable.opt_state))

    skipped = (~finite).astype(jnp.float32)
    metrics |= {"loss": loss, "grad_norm": grad_norm, "update/skipped": skipped}
    return trainable, metrics, mismatch_metrics(rollouts, log_probs)

  return gradient_update


def _make_gradient(
  model: Qwen2, algorithm: Algorithm, temperature: float, micro_batches: int, head_chunk: int
) -> GradientFn:
  """Returns a function that computes the gradient of the loss and the trainer's log-probs.

  The function accumulates the gradient over `micro_batches` parts of its inputs.
  """

  def loss_fn(trained: Params, frozen: Params, inputs: LossInputs) -> tuple[jax.Array, jax.Array]:
    rollouts = inputs.rollouts
    signals = _loss_arguments(inputs)
    params = combine(trained, frozen)
    policy = (model, params, rollouts.prompts, rollouts.tokens, temperature, head_chunk)
    if algorithm.per_token:
      return loss_and_score(*policy, algorithm.token_loss, signals, rollouts.packing)
    log_probs, _ = score(*policy, rollouts.packing)
    return algorithm.loss(log_probs=log_probs, **signals)[0], log_probs

  part_gradient = jax.grad(loss_fn, has_aux=True)
  if micro_batches == 1:
    return part_gradient

  def gradient(trained: Params, frozen: Params, inputs: LossInputs) -> tuple[Params, jax.Array]:
    def accumulate(total: Params, part: LossInputs) -> tuple[Params, jax.Array]:
      grads, log_probs = part_gradient(trained, frozen, part)
      return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), total, grads), log_probs

    # The sum is float32 for every dtype of the parameters.
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), trained)
    total, log_probs = jax.lax.scan(accumulate, zeros, split_batch(inputs, micro_batches, model))
    grads = jax.tree.map(lambda x, like: x.astype(like.dtype), total, trained)
    return grads, merge_parts(log_probs)

  return gradient


def _loss_arguments(inputs: LossInputs) -> dict[str, jax.Array | None]:
  """Returns the arguments of `Algorithm.loss` other than `log_probs`."""
  rollouts = inputs.rollouts
  return {
    "log_probs_old": rollouts.old_log_probs,
    "advantages": inputs.advantages,
    "mask": inputs.mask,
    "weights": inputs.weights,
    "guided": rollouts.guided,
    "log_probs_sampler": rollouts.log_probs,
    "log_probs_reference": rollouts.reference,
  }
