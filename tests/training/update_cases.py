"""A small model, batches with every kind of completion, and one update on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scores import jitted_score
from toys import TOY

from gtpo_jax import algorithms
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.models import Transformer, init_params
from gtpo_jax.models.params import abstract_params
from gtpo_jax.runtime.mesh import shard_batch, single_device_mesh
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer
from gtpo_jax.training.update import UpdateSettings, make_update

CONFIG = TOY
N = 8
G = 4
T = 9
# With a large eps, Adam's update is almost proportional to the gradient.
SGD_LIKE = OptimizerConfig(learning_rate=1e-2, eps=1.0, weight_decay=0.1, clip_norm=1e9)
SGD_WITHOUT_DECAY = OptimizerConfig(learning_rate=1e-2, eps=1.0, weight_decay=0.0, clip_norm=1e9)
EVERY_LOSS_TERM = {"kl_weight": 0.1, "tis_cap": 1.05, "dual_clip": 1.5}


@functools.cache
def batch(seed=0):
  """Rollouts of a policy close to the trained one, with many lengths, rewards and penalties."""
  rng = np.random.default_rng(seed)
  model = single_device_model()
  prompts = Prompts(
    jnp.asarray(rng.integers(0, 48, (N, 5)), jnp.int32),
    jnp.asarray(rng.integers(1, 6, N), jnp.int32),
  )
  tokens = jnp.asarray(rng.integers(0, 48, (N, G, T)), jnp.int32)
  log_probs, entropy = jitted_score(model, params_on(model), prompts, tokens, 1.0, 64)
  mask = np.arange(T) < rng.integers(1, T + 1, (N, G, 1))
  # Large enough that some ratios leave the clip range.
  noise = jnp.asarray(rng.normal(0, 0.2, (N, G, T)), jnp.float32)
  correct = rng.random((N, G)) < 0.5
  correct[0] = True  # group 0 is all correct, group 1 all wrong
  correct[1] = False
  correct[2:, 0] = True
  correct[2:, 1] = False
  rollouts = Rollouts(
    prompts,
    tokens,
    jnp.asarray(mask),
    jnp.asarray(mask),
    jnp.where(mask, log_probs + noise, 0),
    jnp.where(mask, entropy, 0),
    jnp.asarray(mask.sum(-1) < T),
  )
  penalty = np.where(mask.sum(-1) > 6, -0.5, 0.0).astype(np.float32)
  return jax.device_get((rollouts, Rewards(correct, correct.astype(np.float32), penalty)))


@functools.cache
def full_batch():
  """`batch` with all optional fields: guided, stale, rescored, reference and valid."""
  rollouts, rewards = batch()
  rng = np.random.default_rng(1)
  guided = np.zeros((N, G), bool)
  stale = np.zeros((N, G), bool)
  valid = np.ones((N, G), bool)
  guided[:, 3] = True
  stale[4] = True
  valid[5, 2] = False
  correct = rewards.correct.copy()
  correct[1, 3] = True  # in groups 1 and 6 only the guide is correct
  correct[6, :3] = False
  correct[6, 3] = True

  def near(x):
    noise = np.where(rollouts.mask, rng.normal(0, 0.1, (N, G, T)), 0)
    return (x + noise).astype(np.float32)

  rollouts = rollouts.replace(
    guided=guided,
    stale=stale,
    rescored=near(rollouts.log_probs),
    reference=near(rollouts.log_probs),
  )
  return rollouts, rewards.replace(correct=correct, valid=valid)


@functools.cache
def turn_batch():
  """`batch` with turns, between which the model has read, and with their rewards and states."""
  rollouts, rewards = batch()
  rng = np.random.default_rng(2)
  mask = rollouts.mask & (rng.random((N, G, T)) > 0.3)
  mask[..., 0] = True
  turns = np.cumsum(mask & ~np.pad(mask[..., :-1], ((0, 0), (0, 0), (1, 0))), -1) - 1
  values = np.take_along_axis(rng.normal(size=(N, G, T)), turns, -1)
  states = np.take_along_axis(rng.integers(0, 3, (N, G, T)), turns, -1)
  drawn = lambda x: np.where(mask, x, 0)
  rollouts = rollouts.replace(
    mask=mask, log_probs=drawn(rollouts.log_probs), entropy=drawn(rollouts.entropy)
  )
  turn_reward = drawn(values).astype(np.float32)
  return rollouts, rewards.replace(
    turn_reward=turn_reward, turn_state=drawn(states).astype(np.int32)
  )


def signals(rollouts, rewards):
  """The arguments of `Algorithm.advantages`."""
  return {
    "entropy": rollouts.entropy,
    "mask": rollouts.mask,
    "correct": rewards.correct,
    "reward": rewards.reward,
    "penalty": rewards.penalty,
  }


def single_device_model():
  return Transformer(CONFIG, single_device_mesh())


@functools.cache
def random_params():
  return jax.device_get(init_params(single_device_model(), jax.random.key(0)))


def params_on(model):
  return jax.tree.map(
    lambda x, like: jax.device_put(x * 4, like.sharding), random_params(), abstract_params(model)
  )


def run(
  name,
  mesh=None,
  micro_batches=1,
  optimizer=SGD_LIKE,
  head_chunk=64,
  data=None,
  minibatches=1,
  epochs=1,
  **settings,
):
  """The state and the metrics after one update, on the host."""
  model = Transformer(CONFIG, mesh or single_device_mesh())
  optimizer = make_optimizer(optimizer, 10, model=model)
  division = UpdateSettings(1.0, minibatches, epochs, micro_batches, head_chunk)
  update = make_update(model, algorithms.make(name, **settings), optimizer, division)
  state = init_state(params_on(model), optimizer, model)
  state, metrics = update(state, *shard_batch(data or batch(), model.mesh))
  return jax.device_get(state), {key: float(value) for key, value in metrics.items()}


@functools.cache
def plain(name):
  """The result of `run` with the published settings, on one device without micro-batches."""
  return run(name)


def assert_same(a, b, atol=1e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a[0], b[0])
  assert a[1].keys() == b[1].keys()
  for key in a[1]:
    assert a[1][key] == pytest.approx(b[1][key], rel=atol, abs=atol), key


def largest_difference(a, b):
  """max |x - y| over all arrays of two pytrees."""
  differences = jax.tree.map(lambda x, y: np.abs(np.asarray(x) - np.asarray(y)).max(), a, b)
  return max(jax.tree.leaves(differences))
