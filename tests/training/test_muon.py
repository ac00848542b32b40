"""Muon: its update against NumPy, every matrix of a layer or expert alone, on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from meshes import mesh_of
from toys import TOY_EXPERTS
from update_cases import params_on, run, single_device_model

from gtpo_jax.models import Transformer, init_params
from gtpo_jax.models.declaration import KINDS, Kind
from gtpo_jax.runtime.mesh import bytes_per_device, single_device_mesh
from gtpo_jax.training.state import OptimizerConfig, abstract_state, init_state, make_optimizer

MUON = OptimizerConfig(name="muon", learning_rate=1e-2, weight_decay=0.1, clip_norm=1e9)
ADAMW = dataclasses.replace(MUON, name="adamw")


def orthogonal(x):
  """Five Newton-Schulz iterations with Keller Jordan's coefficients."""
  x = x / np.linalg.norm(x)
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return x


def first_update(config, model, params, grads):
  optimizer = make_optimizer(config, 5, model=model)
  updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
  return {"/".join(path): np.asarray(x) for path, x in flatten_dict(updates).items()}


def test_the_first_update_is_that_of_numpy():
  """It has the root mean square of AdamW's; attention's heads are part of one matrix."""
  model = Transformer(TOY_EXPERTS, single_device_mesh())
  params = init_params(model, jax.random.key(0))
  grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
  given = {"/".join(path): np.asarray(x, np.float64) for path, x in flatten_dict(grads).items()}
  values = {"/".join(path): np.asarray(x) for path, x in flatten_dict(params).items()}
  updates = first_update(MUON, model, params, grads)
  matrices = {
    "layers/place_0/q/kernel": (32, 2 * 16),  # [layers, width, heads, head_dim]
    "tail/o/kernel": (2 * 16, 32),
    "layers/place_1/gate/kernel": (32, 64),
    "layers/place_0/experts/gate/kernel": (32, 24),  # [layers, experts, width, mlp]
    "tail/experts/down/kernel": (24, 32),
  }
  for name, (rows, columns) in matrices.items():
    expected = [
      orthogonal(x) * 0.2 * max(rows, columns) ** 0.5
      for x in given[name].reshape(-1, rows, columns)
    ]
    expected = -0.01 * (np.reshape(expected, given[name].shape) + 0.1 * values[name])
    np.testing.assert_allclose(updates[name], expected, rtol=2e-3, atol=2e-6)
  plain = first_update(ADAMW, model, params, grads)
  for name, update in updates.items():
    if KINDS[name.rpartition("/")[2]] is Kind.MATRIX:
      assert not np.array_equal(update, plain[name]), name
    else:
      np.testing.assert_allclose(update, plain[name], rtol=1e-5, atol=1e-9)


def test_norms_and_biases_do_not_decay_and_matrices_do():
  model = single_device_model()
  params = params_on(model)
  updates = first_update(MUON, model, params, jax.tree.map(jnp.zeros_like, params))
  kernel = params["layers"]["q"]["kernel"]
  np.testing.assert_allclose(updates["layers/q/kernel"], -0.001 * kernel, rtol=1e-5)
  np.testing.assert_allclose(updates["embedding"], -0.001 * params["embedding"], rtol=1e-5)
  assert not updates["norm/scale"].any() and not updates["layers/q/bias"].any()


@pytest.mark.devices
def test_the_momentum_is_sharded_like_the_parameters_and_there_is_one():
  model = Transformer(single_device_model().config, mesh_of(1, 2, 1, 2))
  optimizer = make_optimizer(MUON, 5, model=model)
  state = init_state(params_on(model), optimizer, model)
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == (2, 32, 64)]
  assert len(moments) == 2  # of gate and up; AdamW has two of each
  expected = jax.sharding.PartitionSpec(None, ("expert", "fsdp", "context"), "tensor")
  assert all(x.sharding.spec == expected for x in moments)
  abstract = abstract_state(model, optimizer)
  described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
  assert described(state) == described(abstract)
  matrices = [x for x in jax.tree.leaves(abstract.params["layers"]) if x.ndim > 2]
  saved = bytes_per_device(abstract_state(model, make_optimizer(ADAMW, 5)).opt_state)
  saved -= bytes_per_device(abstract.opt_state)
  heads = [module["bias"] for module in abstract.params["layers"].values() if "bias" in module]
  assert abs(saved - bytes_per_device(matrices) + bytes_per_device(heads)) < 100  # counters


@pytest.mark.devices
@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_update_on_a_mesh_is_that_on_one_device(offload):
  config = dataclasses.replace(MUON, eps=1e-3, offload=offload)  # Adam amplifies less rounding
  alone, metrics = run("gtpo", optimizer=config)
  split, _ = run("gtpo", mesh_of(1, 2, 1, 2), optimizer=config)
  assert metrics["update/skipped"] == 0
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-5), split.params, alone.params
  )
