"""The training step: a jitted function from state, rollouts and rewards to the next state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.arrays import Rewards, Rollouts, Signals
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.lora import combine, partition
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.compiler_options import update_options
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.training.gradient import (
  FrozenParams,
  GradientFn,
  Minibatch,
  UpdateSettings,
  make_gradient,
)
from gtpo_jax.training.packing import split_batch
from gtpo_jax.training.state import BUILDER_CACHE_SIZE, Optimizer, TrainState, abstract_state
from gtpo_jax.training.update_metrics import (
  UpdateMetrics,
  batch_metrics,
  correction_metrics,
  distillation_metrics,
  mean_over_updates,
  mismatch_metrics,
  router_metrics,
)

Metrics = dict[str, jax.Array]  # f32[] each
Update = Callable[..., tuple[TrainState, Metrics]]
DEFAULTS = UpdateSettings()


class TrainableState(NamedTuple):
  """The part of the training state that a gradient update changes."""

  params: Params  # trained parameters only
  opt_state: Any
  entropy_coef: jax.Array | None  # f32[], the adapted weight of the entropy bonus


class UpdateProgram:
  """A jitted update, called with a complete state.

  What is trained is donated. A frozen base is only read, so that others may hold its arrays too.

  Args:
    model: the architecture.
    program: the update of a state that has the trained parameters only, with the base as its
      second argument.
  """

  def __init__(self, model: Transformer, program: Any):
    self._model = model
    self._program = program

  def __call__(self, state: TrainState, *others: Any) -> tuple[TrainState, Metrics]:
    """Returns the next state, and metrics; `others` are as in `make_update`."""
    trained, base = partition(self._model, state.params)
    state, metrics = self._program(state.replace(params=trained), base, *others)
    return state.replace(params=combine(state.params, base)), metrics

  def lower(self, state: TrainState, *others: Any) -> jax.stages.Lowered:
    """Lowers the program for such arguments."""
    trained, base = partition(self._model, state.params)
    return self._program.lower(state.replace(params=trained), base, *others)


# (trainable state, frozen parameters, minibatch, PRNG key) -> (trainable state, metrics)
GradientUpdateFn = Callable[
  [TrainableState, FrozenParams, Minibatch, jax.Array], tuple[TrainableState, UpdateMetrics]
]


@functools.lru_cache(maxsize=BUILDER_CACHE_SIZE)
def make_update(
  model: Transformer,
  algorithm: Algorithm,
  optimizer: Optimizer,
  settings: UpdateSettings = DEFAULTS,
  teacher: Transformer | None = None,
) -> Update:
  """Returns the training step, a jitted function (state, rollouts, rewards) -> (state, metrics).

  With a `teacher`, its parameters are a fourth argument; if it is left out, the teacher has those
  of the policy at each gradient update. The `state` argument is donated, but for a frozen base. The
  advantages are computed once, from the complete batch. The prompts are then split into
  minibatches, and each minibatch gets one gradient update; this is repeated for each epoch. Each
  update averages the loss over the tokens of its minibatch, and its importance ratios are relative
  to the log-probs of the policy that sampled the batch. The gradient of a minibatch is accumulated
  in float32 over the micro-batches; their number does not change the result. If the loss or the
  gradient norm is not finite, the update is skipped: parameters and optimizer state are
  unchanged, and the step continues with the next update. `update/skipped` is the fraction of such
  updates. An update is also left out if no token of its minibatch contributes to the loss;
  `update/empty` is the fraction of those.

  The metrics are means over the gradient updates, without minibatches that have no tokens in the
  loss (`mean_over_updates`). `mismatch/*` is measured on the first minibatch, before the first
  update.

  Args:
    model: the architecture on its mesh.
    algorithm: from `algorithms.make`.
    optimizer: from `make_optimizer`.
    settings: how the update is divided, and how its log-probs are computed.
    teacher: the teacher's architecture; required if the algorithm matches its distributions.
  """
  if algorithm.recipe.matches_distributions and teacher is None:
    divergence = algorithm.recipe.distillation.divergence
    raise UserError(
      f"distill.divergence = {divergence!r} needs the teacher's model; pass `teacher`"
    )
  gradient = make_gradient(model, algorithm, settings, teacher)
  # With several devices, an element of a parameter would have to be sent to all of them.
  orders_moments = model.mesh.size == 1 and model.mesh.devices.flat[0].platform == "cpu"
  gradient_update = _make_gradient_update(
    algorithm, optimizer, gradient, orders_moments, model.config
  )

  def update(
    state: TrainState,
    base: Params,
    rollouts: Rollouts,
    rewards: Rewards,
    teacher_params: Params | None = None,
  ) -> tuple[TrainState, Metrics]:
    credit = Signals.of(rollouts, rewards).only(rewards.valid)
    if credit.score_norms is not None and rollouts.rescored is not None:
      importance = algorithm.recipe.corrections.weights(
        rollouts.rescored, rollouts.sampler_log_probs, rollouts.mask
      )
      credit = credit.replace(importance=importance)
    signals = credit.after_credit().replace(
      advantages=algorithm.advantages(credit),
      mask=algorithm.loss_mask(credit),
      teacher_weights=algorithm.teacher_weights(credit) if teacher else None,
    )
    rollouts, signals, corrections = _correct(algorithm, rollouts, signals)
    signals = signals.replace(
      log_probs_old=rollouts.old_log_probs, log_probs_reference=rollouts.reference
    )
    frozen = FrozenParams(base, teacher_params)
    trainable = TrainableState(state.params, state.opt_state, state.entropy_coef)
    batch = Minibatch(rollouts, signals)
    key = jax.random.fold_in(jax.random.key(0), state.step)
    if settings.minibatches == settings.epochs == 1:
      trainable, measured = gradient_update(trainable, frozen, batch, key)
      measured = jax.tree.map(lambda x: x[None], measured)
    else:
      parts = split_batch(batch, settings.minibatches, model)
      order = jnp.tile(jnp.arange(settings.minibatches), settings.epochs)
      trainable, measured = _scan_minibatches(gradient_update, trainable, frozen, parts, order, key)
    metrics = mean_over_updates(measured) | corrections
    metrics |= batch_metrics(rollouts, rewards, signals.advantages, signals.mask)
    metrics |= algorithm.credit_metrics(credit)
    return TrainState(state.step + 1, *trainable), metrics

  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer))
  trained, _ = partition(model, shardings.params)
  program = jax.jit(
    update,
    donate_argnums=0,
    out_shardings=(shardings.replace(params=trained), None),
    compiler_options=update_options(model.mesh.devices.flat),
  )
  return UpdateProgram(model, program)


def _correct(
  algorithm: Algorithm, rollouts: Rollouts, signals: Signals
) -> tuple[Rollouts, Signals, Metrics]:
  """Applies the corrections to a batch; also returns their metrics.

  Args:
    algorithm: says which corrections there are.
    rollouts: the batch, with `rescored` if there is a correction.
    signals: of the tokens in the loss.

  Returns:
    The rollouts, without `rescored` if completions are only masked: the ratio is then relative to
    the sampler's log-probs. The signals of the tokens that stay in the loss, with their importance
    weights if there are any. The metrics.
  """
  if rollouts.rescored is None:
    return rollouts, signals, {}
  arguments = (rollouts.rescored, rollouts.sampler_log_probs, rollouts.mask)
  corrections = algorithm.recipe.corrections
  importance = corrections.weights(*arguments)
  kept = corrections.kept(*arguments)
  metrics = correction_metrics(corrections, rollouts, importance, kept)
  if kept is not None and importance is None:
    rollouts = rollouts.replace(rescored=None)
  return rollouts, signals.replace(importance=importance).only(kept), metrics


def _scan_minibatches(
  gradient_update: GradientUpdateFn,
  trainable: TrainableState,
  frozen: FrozenParams,
  minibatches: Minibatch,
  order: jax.Array,
  key: jax.Array,
) -> tuple[TrainableState, UpdateMetrics]:
  """Makes one gradient update for each minibatch index in `order` i32[updates].

  Returns:
    The trainable state, and the metrics of all updates with an axis [updates].
  """

  def step(
    trainable: TrainableState, xs: tuple[jax.Array, jax.Array]
  ) -> tuple[TrainableState, UpdateMetrics]:
    index, key = xs
    minibatch = jax.tree.map(lambda x: x[index], minibatches)
    return gradient_update(trainable, frozen, minibatch, key)

  return jax.lax.scan(step, trainable, (order, jax.random.split(key, len(order))))


def _make_gradient_update(
  algorithm: Algorithm,
  optimizer: Optimizer,
  gradient: GradientFn,
  orders_moments: bool,
  config: ModelConfig,
) -> GradientUpdateFn:
  """Returns a function that makes one gradient update.

  The function returns the state unchanged if the loss or the gradient norm is not finite, or if no
  token contributes to the loss. With `orders_moments`, the moments are updated after the parameters
  (`Optimizer.moments_after`).
  """

  def gradient_update(
    trainable: TrainableState, frozen: FrozenParams, minibatch: Minibatch, key: jax.Array
  ) -> tuple[TrainableState, UpdateMetrics]:
    rollouts, signals = minibatch
    mask = signals.mask
    weights = algorithm.token_weights(mask, signals.correct, signals.guided)
    signals = signals.replace(weights=weights)
    teacher = signals.teacher_weights is not None
    if teacher:
      signals = signals.replace(teacher_weights=weights * signals.teacher_weights)
    entropy_coef = trainable.entropy_coef
    used_coef = None
    bonus = algorithm.recipe.entropy_bonus
    if bonus:
      used_coef, entropy_coef = bonus.next_coef(entropy_coef, signals.entropy, mask)
      signals = signals.replace(entropy_weights=used_coef * weights)
    grads, scores = gradient(trainable.params, frozen, Minibatch(rollouts, signals), key)
    loss, metrics = scores.loss(algorithm, signals)
    if scores.comparison is not None:
      correct = signals.correct[..., None]
      metrics |= distillation_metrics(*scores.comparison, signals.own, signals.own, correct)
    if scores.router is not None:
      metrics |= router_metrics(config, rollouts, scores.router)
      if config.router_balance:
        loss += config.router_balance * metrics["router/balance"]
    grad_norm = optax.global_norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    # Even without a gradient, weight decay and momentum would move the parameters.
    empty = ~(mask & (signals.advantages != 0)).any()
    if algorithm.settings.kl_weight or bonus or teacher or config.router_balance:
      empty = ~mask.any()

    before = TrainableState(
      trainable.params, optimizer.load_moments(trainable.opt_state), trainable.entropy_coef
    )
    keep = finite & ~empty
    kept = lambda new, old: jax.tree.map(lambda x, y: jnp.where(keep, x, y), new, old)
    updates, opt_state = optimizer.update(grads, before.opt_state, before.params)
    params = kept(optax.apply_updates(before.params, updates), before.params)
    moments = before.opt_state
    if orders_moments:
      moments = optimizer.moments_after(moments, params)
      _, opt_state = optimizer.update(grads, moments, params)
    entropy_coef = kept(entropy_coef, before.entropy_coef)
    trainable = TrainableState(params, kept(opt_state, moments), entropy_coef)
    opt_state = optimizer.offload_moments(trainable.opt_state)
    trainable = trainable._replace(opt_state=opt_state)

    outcome = {
      "update/skipped": (~finite).astype(jnp.float32),
      "update/empty": empty.astype(jnp.float32),
    }
    if used_coef is not None:
      outcome["entropy/coef"] = used_coef
    mismatch = mismatch_metrics(rollouts, scores.log_probs, scores.router)
    gradient_metrics = {"loss": loss, "grad_norm": grad_norm}
    return trainable, UpdateMetrics(mask.any(), gradient_metrics, metrics, outcome, mismatch)

  return gradient_update
