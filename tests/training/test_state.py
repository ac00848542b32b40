"""The training state and its optimizer: layout, schedule, decay, momentum dtype and offload."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import mesh_of
from update_cases import (
  CONFIG,
  SGD_LIKE,
  SGD_WITHOUT_DECAY,
  batch,
  largest_difference,
  params_on,
  run,
  single_device_model,
)

from gtpo_jax import algorithms
from gtpo_jax.models import ModelConfig, Transformer
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import shard_batch, single_device_mesh
from gtpo_jax.training.state import (
  OptimizerConfig,
  abstract_state,
  clip_by_global_norm,
  init_state,
  make_optimizer,
  make_schedule,
)
from gtpo_jax.training.update import UpdateSettings, make_update


@pytest.mark.devices
def test_the_state_is_sharded_like_the_parameters():
  model = Transformer(CONFIG, mesh_of(2, 2, 1, 2))
  state = init_state(params_on(model), make_optimizer(SGD_LIKE, 5), model)
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == (2, 32, 64)]
  assert len(moments) == 4
  expected = jax.sharding.PartitionSpec(None, ("expert", "fsdp", "context"), "tensor")
  assert all(x.sharding.spec == expected for x in moments)
  abstract = abstract_state(model, make_optimizer(SGD_LIKE, 5))
  described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
  assert described(state) == described(abstract)


def test_norms_and_biases_do_not_decay():
  model = single_device_model()
  optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.5), 5)
  params = params_on(model)
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
  kernel = params["layers"]["q"]["kernel"]
  np.testing.assert_allclose(updates["layers"]["q"]["kernel"], -0.05 * kernel, rtol=1e-5)
  assert not np.asarray(updates["norm"]["scale"]).any()
  assert not np.asarray(updates["layers"]["q"]["bias"]).any()


def test_gradients_are_clipped_as_optax_clips_them():
  grads = {"a": jnp.asarray([3.0, -4.0]), "b": jnp.asarray([[12.0]])}  # of norm 13
  clipped = clip_by_global_norm(grads, 6.5)
  np.testing.assert_array_equal(clipped["a"], [1.5, -2.0])
  np.testing.assert_array_equal(clipped["b"], [[6.0]])
  for bound in (1.0, 12.9, 13.0, 50.0):
    expected, _ = optax.clip_by_global_norm(bound).update(grads, optax.EmptyState())
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-7),
      clip_by_global_norm(grads, bound),
      expected,
    )
  unchanged = clip_by_global_norm(grads, 13.0)
  np.testing.assert_array_equal(unchanged["a"], grads["a"])
  zeros = clip_by_global_norm({"a": jnp.zeros(2)}, 1.0)
  np.testing.assert_array_equal(zeros["a"], [0.0, 0.0])


@pytest.mark.slow
def test_an_update_on_a_cpu_has_one_gradient_in_memory():
  """Beside the state there are the gradient, and arrays of the embedding's size.

  A second array of the clipped gradient, or three of the embedding's gradient at once, would not
  fit into the bound.
  """
  config = ModelConfig(
    vocab_size=4096, width=256, layers=4, heads=4, kv_heads=2, head_dim=64, mlp=1024
  )
  model = Transformer(config, single_device_mesh())
  optimizer = make_optimizer(OptimizerConfig(), 5)
  state = abstract_state(model, optimizer)
  update = make_update(model, algorithms.make("gtpo"), optimizer)
  memory = update.lower(state, *batch()).compile().memory_analysis()
  params = 4 * sum(x.size for x in jax.tree.leaves(state.params))
  assert memory.temp_size_in_bytes < 2.25 * params
  assert memory.alias_size_in_bytes >= 3 * params  # parameters and moments are written in place


def test_schedules():
  config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, schedule="linear")
  rate = make_schedule(config, 12)
  rates = [rate(i) for i in (0, 2, 4, 8, 12)]
  np.testing.assert_allclose(rates, [0.0, 1.0, 2.0, 1.0, 0.0], atol=1e-6)
  rate = make_schedule(OptimizerConfig(learning_rate=2.0, schedule="cosine"), 8)
  np.testing.assert_allclose([rate(i) for i in (0, 4, 8)], [2.0, 1.0, 0.0], atol=1e-6)
  rate = make_schedule(OptimizerConfig(learning_rate=2.0), 8)
  assert [float(rate(i)) for i in (0, 8)] == [2.0, 2.0]


def test_the_schedule_counts_steps_not_gradient_updates():
  """The rate is 0 in the first warm-up step, of three updates, and half the peak in the second."""
  model = single_device_model()
  config = OptimizerConfig(learning_rate=0.5, warmup_steps=2, weight_decay=0.0, b1=0.0, b2=0.0)
  optimizer = make_optimizer(config, 10, updates=3)
  params = params_on(model)
  grads = jax.tree.map(jnp.ones_like, params)
  state = optimizer.init(params)
  optimizer_update = jax.jit(optimizer.update)
  rates = []
  for _ in range(9):
    updates, state = optimizer_update(grads, state, params)
    # With b1 = b2 = 0, Adam's update is minus the rate.
    rates.append(round(-float(updates["norm"]["scale"][0]), 5))
  assert rates == [0.0] * 3 + [0.25] * 3 + [0.5] * 3


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("learning_rate", 0.0, "above 0 and finite, got 0.0"),
    ("b2", 1.0, r"in \[0, 1\), got 1.0"),
    ("weight_decay", -1.0, "at least 0 and finite, got -1.0"),
    ("schedule", "step", "one of constant, cosine, linear, got 'step'"),
    ("clip_norm", -1.0, "above 0 and finite, got -1.0"),
    ("momentum_dtype", "float16", "float32, bfloat16, .*got 'float16'"),
  ],
)
def test_invalid_optimizers_are_rejected(field, value, message):
  with pytest.raises(UserError, match=message):
    OptimizerConfig(**{field: value})


@pytest.mark.devices
@pytest.mark.slow
def test_bfloat16_momentum():
  """Only the first moment is bfloat16; after four updates the parameters barely differ."""
  optimizer = make_optimizer(OptimizerConfig(momentum_dtype="bfloat16"), 5)
  opt_state = abstract_state(Transformer(CONFIG, mesh_of(2, 2, 1, 2)), optimizer).opt_state
  is_adam = lambda x: hasattr(x, "mu")
  adam = next(x for x in jax.tree.leaves(opt_state, is_leaf=is_adam) if is_adam(x))
  assert {x.dtype for x in jax.tree.leaves(adam.mu)} == {jnp.dtype("bfloat16")}
  assert {x.dtype for x in jax.tree.leaves(adam.nu)} == {jnp.dtype("float32")}
  exact, rounded = (
    run(
      "gtpo", minibatches=4, optimizer=dataclasses.replace(SGD_WITHOUT_DECAY, momentum_dtype=dtype)
    )[0].params
    for dtype in ("", "bfloat16")
  )
  start = jax.device_get(params_on(single_device_model()))
  change = largest_difference(exact, start)
  rounding = largest_difference(exact, rounded)
  assert 0 < rounding < change / 50


def test_why_the_second_moment_is_not_bfloat16():
  """At b2 = 0.999 it never decays: a step is below half the spacing of bfloat16 numbers."""
  nu = jnp.bfloat16(1.5)
  for _ in range(1000):
    nu = (0.999 * nu.astype(jnp.float32)).astype(jnp.bfloat16)
  assert float(nu) == 1.5
  assert 1.5 * 0.999**1000 < 0.6


def memory_kinds(tree):
  return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@pytest.mark.slow
@pytest.mark.parametrize(
  "shape",
  [(1, 1, 1, 1), pytest.param((1, 2, 1, 1), marks=[pytest.mark.devices, pytest.mark.manual])],
)
def test_offloaded_moments_do_not_change_the_result(shape):
  model = Transformer(CONFIG, mesh_of(*shape))
  states = {}
  for offload in (False, True):
    optimizer = make_optimizer(dataclasses.replace(SGD_LIKE, offload=offload), 10)
    update = make_update(
      model, algorithms.make("gtpo"), optimizer, UpdateSettings(minibatches=2, head_chunk=64)
    )
    state = init_state(params_on(model), optimizer, model)
    kinds = memory_kinds(state.opt_state)
    assert len(kinds) == 1
    assert ("pinned_host" in kinds) == offload
    assert memory_kinds(abstract_state(model, optimizer).opt_state) == kinds
    for _ in range(2):
      state, _ = update(state, *shard_batch(batch(), model.mesh))
      assert memory_kinds(state.opt_state) == kinds
      assert "pinned_host" not in memory_kinds(state.params)
    states[offload] = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, states[False], states[True])
