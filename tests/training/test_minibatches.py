"""Minibatches and epochs: several gradient updates per step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_cases import (
  SGD_WITHOUT_DECAY,
  batch,
  largest_difference,
  params_on,
  run,
  signals,
  single_device_model,
)

from gtpo_jax import algorithms


def slow_updates(minibatches, epochs, rate=1e-2):
  """Runs GTPO with full logits and with Adam in float64; advantages are computed once per batch.

  Returns the parameters, and the loss and gradient norm of each gradient update.
  """
  model = single_device_model()
  algorithm = algorithms.make("gtpo")
  rollouts, rewards = batch()
  inputs = signals(rollouts, rewards)
  full = rollouts, algorithm.advantages(**inputs), algorithm.loss_mask(**inputs)

  def loss(params, part):
    rollouts, advantages, mask = part
    hidden = model.apply(
      {"params": params}, rollouts.prompts, rollouts.tokens, method="completion_hidden"
    )
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, hidden, method="logits"))
    log_probs = jnp.take_along_axis(log_probs, rollouts.tokens[..., None], -1)[..., 0]
    ratio = jnp.exp(log_probs - rollouts.log_probs)
    objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.28) * advantages)
    return -jnp.where(mask, objective, 0).sum() / mask.sum()

  gradient = jax.jit(jax.value_and_grad(loss))
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params_on(model))
  first = jax.tree.map(np.zeros_like, params)
  second = jax.tree.map(np.zeros_like, params)
  losses = []
  norms = []
  for i in range(epochs * minibatches):
    part = jax.tree.map(lambda x, start=i % minibatches: x[start::minibatches], full)
    value, grads = gradient(jax.tree.map(np.float32, params), part)
    grads = jax.tree.map(lambda x: np.asarray(x, np.float64), grads)
    losses.append(float(value))
    norms.append(np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(grads))))
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, grads)

    def adam(p, m, v, count=i + 1):
      return p - rate * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1.0)

    params = jax.tree.map(adam, params, first, second)
  return params, losses, norms


@pytest.mark.parametrize(
  ("minibatches", "epochs"),
  [
    (2, 3),
    pytest.param(4, 1, marks=pytest.mark.manual),
    pytest.param(1, 2, marks=pytest.mark.manual),
  ],
)
def test_minibatches_and_epochs_against_a_slow_loop(minibatches, epochs):
  params, losses, norms = slow_updates(minibatches, epochs)
  state, metrics = run("gtpo", minibatches=minibatches, epochs=epochs, optimizer=SGD_WITHOUT_DECAY)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), state.params, params)
  assert metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
  assert metrics["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
  assert state.step == 1
  counts = {int(x) for x in jax.tree.leaves(state.opt_state) if x.ndim == 0}
  assert counts == {minibatches * epochs}
  start = jax.device_get(params_on(single_device_model()))
  assert largest_difference(params, start) > 1e-3


@pytest.mark.slow
def test_a_minibatch_without_tokens_is_left_out_of_the_means():
  rollouts, rewards = batch()
  valid = np.ones(rewards.correct.shape, bool)
  valid[0::4] = False  # the first of four minibatches
  rest = np.arange(len(valid)) % 4 != 0
  others = jax.tree.map(lambda x: x[rest], (rollouts, rewards))
  data = (rollouts, rewards.replace(valid=valid))
  _, metrics = run("grpo", data=data, minibatches=4, optimizer=SGD_WITHOUT_DECAY)
  _, expected = run("grpo", data=others, minibatches=3, optimizer=SGD_WITHOUT_DECAY)
  assert metrics["update/empty"] >= 0.25
  of_updates = ("loss", "grad_norm", "ratio/", "clip/", "covariance/")
  compared = [name for name in metrics if name.startswith(of_updates)]
  assert len(compared) > 6
  for name in compared:
    assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
  nothing = rewards.replace(valid=np.zeros_like(valid))
  _, metrics = run("grpo", data=(rollouts, nothing), minibatches=4, optimizer=SGD_WITHOUT_DECAY)
  assert metrics["update/empty"] == 1
  assert all(np.isnan(metrics[name]) for name in compared)
