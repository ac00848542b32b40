"""Training with adapters: only the adapters change, however the update is split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import ALPHA, RANK, SOME, adapted, base, is_adapter, on_mesh_of, with_lora
from flax.traverse_util import flatten_dict
from hf_folders import hf_folder, padded_batch
from meshes import mesh_of
from scores import jitted_score

from gtpo_jax import algorithms
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.models.config import LORA_TARGETS
from gtpo_jax.models.hf.load import read_params
from gtpo_jax.models.lora import combine, merge_lora, split_adapters, without_lora
from gtpo_jax.runtime.mesh import shard_batch
from gtpo_jax.training.state import OptimizerConfig, abstract_state, init_state, make_optimizer
from gtpo_jax.training.update import UpdateSettings, make_update

N = 8
G = 4
T = 6
# With a large eps, Adam's update is almost proportional to the gradient.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1.0, weight_decay=0.1, clip_norm=1e9)


@functools.cache
def batch():
  rng = np.random.default_rng(0)
  prompts = Prompts(
    jnp.asarray(rng.integers(0, 64, (N, 5)), jnp.int32),
    jnp.asarray(rng.integers(1, 6, N), jnp.int32),
  )
  tokens = jnp.asarray(rng.integers(0, 64, (N, G, T)), jnp.int32)
  model, params = adapted()
  log_probs, entropy = jitted_score(model, params, prompts, tokens, 1.0, 64)
  mask = np.arange(T) < rng.integers(1, T + 1, (N, G, 1))
  correct = rng.random((N, G)) < 0.5
  correct[:, 0], correct[:, 1] = True, False
  noise = rng.normal(0, 0.1, (N, G, T)).astype(np.float32)
  rollouts = Rollouts(
    prompts,
    tokens,
    jnp.asarray(mask),
    jnp.asarray(mask),
    jnp.where(mask, log_probs + noise, 0),
    jnp.where(mask, entropy, 0),
    jnp.asarray(mask.sum(-1) < T),
  )
  return jax.device_get(
    (rollouts, Rewards(correct, correct.astype(np.float32), np.zeros((N, G), np.float32)))
  )


@functools.cache
def trained(shape=None, micro_batches=1, kept="float32", targets=LORA_TARGETS, quantize=""):
  """(params before, params after, optimizer state, metrics) of two updates, on the host."""
  mesh = mesh_of(*shape) if shape else None
  model = with_lora(base()[0], mesh, targets, param_dtype=kept, quantize=quantize)
  adapters, _ = split_adapters(adapted(targets)[1])
  params = combine(adapters, read_params(model, hf_folder()[0]))
  optimizer = make_optimizer(OPTIMIZER, 10)
  update = make_update(
    model,
    algorithms.make("gtpo"),
    optimizer,
    UpdateSettings(micro_batches=micro_batches, head_chunk=64),
  )
  state = init_state(on_mesh_of(params, model), optimizer, model)
  for _ in range(2):
    state, metrics = update(state, *shard_batch(batch(), model.mesh))
  return jax.device_get((params, state.params, state.opt_state, metrics))


@pytest.mark.parametrize(
  "settings",
  [
    {},
    pytest.param({"kept": "bfloat16"}, marks=pytest.mark.manual),
    pytest.param({"targets": SOME}, marks=pytest.mark.manual),
    pytest.param({"quantize": "int4", "kept": "bfloat16"}, marks=pytest.mark.slow),
    pytest.param(
      {"shape": (2, 2, 1, 2), "micro_batches": 2}, marks=[pytest.mark.manual, pytest.mark.devices]
    ),
  ],
  ids=["f32", "bf16", "some", "int4", "2x2x2"],
)
def test_only_the_adapters_are_trained(settings):
  before, after, _, metrics = trained(**settings)
  assert metrics["grad_norm"] > 1e-3
  before = flatten_dict(before)
  after = flatten_dict(after)
  assert before.keys() == after.keys()
  for path in before:
    assert (np.asarray(before[path]).tobytes() != np.asarray(after[path]).tobytes()) == is_adapter(
      path
    ), path


@pytest.mark.slow
def test_the_optimizer_has_moments_of_the_adapters_only():
  before, _, moments, _ = trained()
  size = sum(x.size for path, x in flatten_dict(before).items() if is_adapter(path))
  assert sum(x.size for x in jax.tree.leaves(moments) if x.ndim) == 2 * size
  model = with_lora(base()[0])
  like = abstract_state(model, make_optimizer(OPTIMIZER, 10))
  assert jax.tree.structure(like.opt_state) == jax.tree.structure(moments)
  _, _, moments, _ = trained(kept="bfloat16", quantize="int4")
  assert {x.dtype for x in jax.tree.leaves(moments) if x.ndim} == {np.dtype("float32")}


@pytest.mark.parametrize(
  ("shape", "micro_batches"), [pytest.param((2, 2, 1, 2), 2, marks=pytest.mark.devices), (None, 4)]
)
@pytest.mark.slow
def test_the_update_does_not_depend_on_micro_batches_or_mesh(shape, micro_batches):
  _, want, _, metrics = trained()
  _, got, _, also = trained(shape, micro_batches)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), want, got)
  assert also["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4) and also[
    "loss"
  ] == pytest.approx(metrics["loss"], abs=1e-5)


@pytest.mark.slow
def test_the_gradient_is_that_of_the_merged_matrices():
  """dA = s W' B^T and dB = s A^T W', with W' the merged matrix's gradient and s = alpha / rank."""
  model, params = adapted()
  tokens, _ = padded_batch()
  loss = lambda model, params: jnp.square(
    model.apply({"params": params}, jnp.asarray(tokens))
  ).mean()
  gradient = lambda model: jax.jit(jax.grad(lambda params: loss(model, params)))
  merged_grads = gradient(without_lora(model))(merge_lora(model, params))
  adapter_grads = gradient(model)(params)
  for name in LORA_TARGETS:
    layer = params["layers"][name]
    d = merged_grads["layers"][name]["kernel"]
    a = layer["lora_a"].reshape(2, -1, RANK)
    b = layer["lora_b"].reshape(2, RANK, -1)
    d = d.reshape(2, a.shape[1], b.shape[2])
    got = adapter_grads["layers"][name]
    np.testing.assert_allclose(
      got["lora_a"].reshape(a.shape), ALPHA / RANK * d @ b.mT, rtol=1e-3, atol=1e-4
    )
    np.testing.assert_allclose(
      got["lora_b"].reshape(b.shape), ALPHA / RANK * a.mT @ d, rtol=1e-3, atol=1e-4
    )
