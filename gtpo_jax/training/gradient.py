"""The gradient of the loss on a minibatch, accumulated over its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.arrays import Rollouts, masked_sum
from gtpo_jax.models.lora import combine
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.training.head_logits import Comparison
from gtpo_jax.training.log_probs import Teaching, head_settings, loss_and_score, score
from gtpo_jax.training.loss_scale import loss_scale, scaled, unscale
from gtpo_jax.training.micro_batches import merge_parts, split_batch


class GradientInputs(NamedTuple):
  """The inputs of the gradient on a minibatch or on one of its micro-batches."""

  rollouts: Rollouts
  advantages: jax.Array  # f32[n, g, t]
  mask: jax.Array  # bool[n, g, t], tokens in the loss
  weights: jax.Array  # f32[n, g, t], token weights, computed from the complete minibatch
  importance: jax.Array | None  # f32[n, g, t], with importance weights
  entropy_weights: jax.Array | None = None  # f32[n, g, t], with an entropy bonus
  selected: jax.Array | None = None  # bool[n, g, t], if the objective selects tokens
  # f32[n, g, t], the weights of the divergences, if a teacher's distributions are matched
  teacher_weights: jax.Array | None = None


class FrozenParams(NamedTuple):
  """The parameters that are read but not trained."""

  policy: Params  # the base under adapters; empty without
  # The teacher, if its distributions are matched and it is not the policy.
  teacher: Params | None = None


class Scores(NamedTuple):
  """The trainer's log-probs and entropies, in nats, and the tokens that the objective selected."""

  log_probs: jax.Array  # f32[n, g, t]
  entropy: jax.Array  # f32[n, g, t]
  selected: jax.Array | None = None  # bool[n, g, t], if the objective selects tokens
  comparison: Comparison | None = None  # [n, g, t], if a teacher's distributions are matched

  def loss(
    self, algorithm: Algorithm, inputs: GradientInputs
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss f32[] of these scores, and its metrics."""
    scores = {"log_probs": self.log_probs, "entropy": self.entropy, "selected": self.selected}
    loss, metrics = algorithm.loss(**scores, **_loss_arguments(inputs))
    if self.comparison is not None:
      weights = inputs.teacher_weights
      loss += masked_sum(weights * self.comparison.divergence, weights != 0)
    return loss, metrics


# (trained parameters, frozen parameters, inputs, PRNG key) -> (gradient of the loss, scores)
GradientFn = Callable[[Params, FrozenParams, GradientInputs, jax.Array], tuple[Params, Scores]]


def make_gradient(
  model: Transformer,
  algorithm: Algorithm,
  temperature: float,
  micro_batches: int,
  head_chunk: int,
  teacher: Transformer | None = None,
) -> GradientFn:
  """Returns a function that computes the gradient of the loss and the trainer's scores.

  The function accumulates the gradient over `micro_batches` parts of its inputs. If there are
  several parts and the objective selects tokens from the complete minibatch, all log-probs are
  first computed in a pass of their own. `teacher` is the teacher's architecture, if its
  distributions are matched.
  """
  bonus = bool(algorithm.recipe.entropy_bonus)
  selects = algorithm.recipe.selects
  settings = head_settings(model, temperature, head_chunk, bonus)
  scale = loss_scale(model.config)
  token_loss = scaled(algorithm.token_loss, scale)

  def policy(trained: Params, frozen: FrozenParams, rollouts: Rollouts) -> tuple[Any, ...]:
    params = combine(trained, frozen.policy)
    return (model, params, rollouts.prompts, rollouts.tokens)

  def loss_fn(
    trained: Params, frozen: FrozenParams, inputs: GradientInputs, key: jax.Array
  ) -> tuple[jax.Array, Scores]:
    rollouts = inputs.rollouts
    inputs_of_policy = policy(trained, frozen, rollouts)
    if algorithm.recipe.per_token and (inputs.selected is not None or not selects):
      signals = _loss_arguments(inputs) | {"selected": inputs.selected}
      teaching = None
      if teacher:
        weights = scale * inputs.teacher_weights
        teaching = Teaching(
          teacher,
          combine(trained, frozen.policy) if frozen.teacher is None else frozen.teacher,
          algorithm.recipe.distillation,
          rollouts.for_teacher.prompts,
          weights,
        )
      loss, log_probs, entropy, comparison = loss_and_score(
        *inputs_of_policy, settings, token_loss, signals, rollouts.packing, teaching
      )
      return loss, Scores(log_probs, entropy, inputs.selected, comparison)
    log_probs, entropy = score(*inputs_of_policy, temperature, head_chunk, rollouts.packing, bonus)
    inputs = _with_selection(algorithm, inputs, log_probs, key)
    scores = Scores(log_probs, entropy, inputs.selected)
    loss, _ = scores.loss(algorithm, inputs)
    return loss if scale == 1 else scale * loss, scores

  def part_gradient(
    trained: Params, frozen: FrozenParams, inputs: GradientInputs, key: jax.Array
  ) -> tuple[Params, Scores]:
    grads, scores = jax.grad(loss_fn, has_aux=True)(trained, frozen, inputs, key)
    return unscale(grads, scale), scores

  if micro_batches == 1:
    return part_gradient

  def gradient(
    trained: Params, frozen: FrozenParams, inputs: GradientInputs, key: jax.Array
  ) -> tuple[Params, Scores]:
    def score_part(rollouts: Rollouts) -> jax.Array:
      return score(*policy(trained, frozen, rollouts), temperature, head_chunk, rollouts.packing)[0]

    def accumulate(total: Params, part: GradientInputs) -> tuple[Params, Scores]:
      grads, scores = part_gradient(trained, frozen, part, key)
      return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), total, grads), scores

    if selects:
      parts = split_batch(inputs.rollouts, micro_batches, model)
      log_probs = merge_parts(jax.lax.map(score_part, parts))
      inputs = _with_selection(algorithm, inputs, log_probs, key)
    # The sum is float32 whatever the dtype of the parameters.
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), trained)
    total, scores = jax.lax.scan(accumulate, zeros, split_batch(inputs, micro_batches, model))
    grads = jax.tree.map(lambda x, like: x.astype(like.dtype), total, trained)
    return grads, jax.tree.map(merge_parts, scores)

  return gradient


def _with_selection(
  algorithm: Algorithm, inputs: GradientInputs, log_probs: jax.Array, key: jax.Array
) -> GradientInputs:
  """Returns the inputs with the tokens that the objective selects, if it selects any."""
  if not algorithm.recipe.selects or inputs.selected is not None:
    return inputs
  selected = algorithm.select(
    log_probs=log_probs,
    log_probs_old=inputs.rollouts.old_log_probs,
    advantages=inputs.advantages,
    mask=inputs.mask,
    entropy_old=inputs.rollouts.entropy,
    key=key,
  )
  return inputs._replace(selected=selected)


def _loss_arguments(inputs: GradientInputs) -> dict[str, jax.Array | None]:
  """Returns the arguments of `Algorithm.loss` other than the scores."""
  rollouts = inputs.rollouts
  return {
    "log_probs_old": rollouts.old_log_probs,
    "advantages": inputs.advantages,
    "mask": inputs.mask,
    "weights": inputs.weights,
    "guided": rollouts.guided,
    "entropy_weights": inputs.entropy_weights,
    "importance": inputs.importance,
    "log_probs_reference": rollouts.reference,
  }
