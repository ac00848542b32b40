"""The gradient of the loss on a minibatch, accumulated over its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.arrays import Rollouts, Signals, masked_sum
from gtpo_jax.models.experts.routing import RouterStatistics, expert_shares, routes_of_inputs
from gtpo_jax.models.lora import combine
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.training.head_logits import Comparison
from gtpo_jax.training.log_probs import (
  Reading,
  Teaching,
  head_settings,
  loss_and_score,
  score_with_routers,
)
from gtpo_jax.training.packing import merge_parts, split_batch
from gtpo_jax.training.state import loss_scale, scaled, unscale


class UpdateSettings(NamedTuple):
  """How an update is divided, and how its log-probs are computed."""

  # the sampling temperature; the trainer's log-probs are computed at it too
  temperature: float = 1.0
  minibatches: int = 1  # number of parts of the n prompts, each with its own gradient update
  epochs: int = 1  # number of passes over the batch
  # number of parts of a minibatch over which the gradient is accumulated; see `split_batch`
  micro_batches: int = 1
  head_chunk: int = 0  # as `chunk` of `head.log_probs_and_entropy`


class Minibatch(NamedTuple):
  """The inputs of one gradient update, or a part of them."""

  rollouts: Rollouts
  signals: Signals


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
  router: RouterStatistics | None = None  # [n, g, t], at each token's input, if there are experts

  def loss(self, algorithm: Algorithm, signals: Signals) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss f32[] of these scores, and its metrics."""
    signals = signals.replace(selected=self.selected)
    loss, metrics = algorithm.loss(signals, log_probs=self.log_probs, entropy=self.entropy)
    if self.comparison is not None:
      weights = signals.teacher_weights
      loss += masked_sum(weights * self.comparison.divergence, weights != 0)
    return loss, metrics


class Balance(NamedTuple):
  """The inputs of the load-balancing loss of a minibatch."""

  shares: jax.Array  # as in `RecordedRoutes`, of the minibatch
  weight: jax.Array  # f32[], of each token


def balance_of(model: Transformer, rollouts: Rollouts) -> Balance | None:
  """Returns the inputs of the load-balancing loss of a minibatch; None without that loss.

  The shares come from the recorded choices, so the loss is a sum over tokens, and micro-batches
  do not change it.
  """
  c = model.config
  if not (c.router_balance and c.mixture):
    return None
  if rollouts.routes is None:
    raise ValueError("the load-balancing loss needs the recorded choices of experts")
  within = rollouts.packing and rollouts.packing.places(rollouts.tokens.shape[2])
  inputs = routes_of_inputs(rollouts.prompts.routes, rollouts.routes, within)
  shares = expert_shares(inputs, rollouts.present, c.mixture.experts)
  return Balance(shares, c.router_balance / jnp.maximum(rollouts.present.sum(), 1))


# (trained parameters, frozen parameters, minibatch, PRNG key) -> (gradient of the loss, scores)
GradientFn = Callable[[Params, FrozenParams, Minibatch, jax.Array], tuple[Params, Scores]]


def make_gradient(
  model: Transformer,
  algorithm: Algorithm,
  update: UpdateSettings,
  teacher: Transformer | None = None,
) -> GradientFn:
  """Returns a function that computes the gradient of the loss and the trainer's scores.

  The function accumulates the gradient over the micro-batches of a minibatch. If there are
  several parts and the objective selects tokens from the complete minibatch, all log-probs are
  first computed in a pass of their own. `teacher` is the teacher's architecture, if its
  distributions are matched.
  """
  bonus = bool(algorithm.recipe.entropy_bonus)
  selects = algorithm.recipe.selects
  micro_batches = update.micro_batches
  settings = head_settings(model, update.temperature, update.head_chunk, bonus)
  without_gradient = head_settings(model, update.temperature, update.head_chunk)
  scale = loss_scale(model.config)
  token_loss = scaled(algorithm.token_loss, scale)

  def policy(
    trained: Params, frozen: FrozenParams, rollouts: Rollouts, balance: Balance | None = None
  ) -> tuple[Any, ...]:
    reading = Reading.of(rollouts)._replace(shares=balance and balance.shares)
    return model, combine(trained, frozen.policy), reading

  def loss_fn(
    trained: Params,
    frozen: FrozenParams,
    minibatch: Minibatch,
    key: jax.Array,
    balance: Balance | None,
  ) -> tuple[jax.Array, Scores]:
    loss, scores = policy_loss(trained, frozen, minibatch, key, balance)
    if balance is not None:
      terms = jnp.where(minibatch.rollouts.present, scores.router.balance, 0)
      loss += scale * balance.weight * terms.sum()
    return loss, jax.lax.stop_gradient(scores)

  def policy_loss(
    trained: Params,
    frozen: FrozenParams,
    minibatch: Minibatch,
    key: jax.Array,
    balance: Balance | None,
  ) -> tuple[jax.Array, Scores]:
    rollouts, signals = minibatch
    inputs_of_policy = policy(trained, frozen, rollouts, balance)
    if algorithm.recipe.per_token and (signals.selected is not None or not selects):
      teaching = None
      if teacher:
        weights = scale * signals.teacher_weights
        teaching = Teaching(
          teacher,
          combine(trained, frozen.policy) if frozen.teacher is None else frozen.teacher,
          algorithm.recipe.distillation,
          rollouts.for_teacher.prompts,
          weights,
        )
      loss, log_probs, entropy, comparison, router = loss_and_score(
        *inputs_of_policy, settings, token_loss, signals.of_tokens(), teaching
      )
      return loss, Scores(log_probs, entropy, signals.selected, comparison, router)
    log_probs, entropy, router = score_with_routers(*inputs_of_policy, settings)
    signals = _with_selection(algorithm, signals, log_probs, key)
    scores = Scores(log_probs, entropy, signals.selected, router=router)
    loss, _ = scores.loss(algorithm, signals)
    return loss if scale == 1 else scale * loss, scores

  def part_gradient(
    trained: Params,
    frozen: FrozenParams,
    minibatch: Minibatch,
    key: jax.Array,
    balance: Balance | None,
  ) -> tuple[Params, Scores]:
    grads, scores = jax.grad(loss_fn, has_aux=True)(trained, frozen, minibatch, key, balance)
    return unscale(grads, scale), scores

  def gradient(
    trained: Params, frozen: FrozenParams, minibatch: Minibatch, key: jax.Array
  ) -> tuple[Params, Scores]:
    balance = balance_of(model, minibatch.rollouts)
    if micro_batches == 1:
      return part_gradient(trained, frozen, minibatch, key, balance)
    n = len(minibatch.signals.mask)

    def score_part(rollouts: Rollouts) -> jax.Array:
      return score_with_routers(*policy(trained, frozen, rollouts), without_gradient)[0]

    def accumulate(total: Params, part: Minibatch) -> tuple[Params, Scores]:
      grads, scores = part_gradient(trained, frozen, part, key, balance)
      return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), total, grads), scores

    if selects:
      rollouts, signals = minibatch
      parts = split_batch(rollouts, micro_batches, model)
      log_probs = merge_parts(jax.lax.map(score_part, parts), n)
      minibatch = Minibatch(rollouts, _with_selection(algorithm, signals, log_probs, key))
    # The sum is float32 whatever the dtype of the parameters.
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), trained)
    total, scores = jax.lax.scan(accumulate, zeros, split_batch(minibatch, micro_batches, model))
    grads = jax.tree.map(lambda x, like: x.astype(like.dtype), total, trained)
    return grads, jax.tree.map(lambda x: merge_parts(x, n), scores)

  return gradient


def _with_selection(
  algorithm: Algorithm, signals: Signals, log_probs: jax.Array, key: jax.Array
) -> Signals:
  """Returns the signals with the tokens that the objective selects, if it selects any."""
  if not algorithm.recipe.selects or signals.selected is not None:
    return signals
  return signals.replace(selected=algorithm.select(signals, log_probs=log_probs, key=key))
