"""bfloat16 matrix products: they run on CPUs however they are transposed, with exact sums."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of
from scores import jitted_score
from toys import TOY

from gtpo_jax import algorithms
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.models import Transformer, init_params
from gtpo_jax.models.number_formats import einsum, matmul_float32
from gtpo_jax.models.params import abstract_params
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.mesh import shard_batch, single_device_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.programs import ProgramSettings
from gtpo_jax.sampling.settings import SamplingParams
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer
from gtpo_jax.training.update import make_update

CONFIG = TOY
N = 8
G = 4
P = 5
T = 8
PROMPTS = np.random.default_rng(1).integers(1, 48, (N, P))


def operands(*shapes):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def test_two_products_by_hand():
  """256 + 1 is not a bfloat16: a float32 result keeps the 1, and a bfloat16 result rounds it."""
  x = jnp.asarray([[256, 1], [3, 4]], jnp.bfloat16)
  y = jnp.ones((2, 2), jnp.bfloat16)
  assert matmul_float32(x, y, "default").tolist() == [[257, 257], [7, 7]]
  exact = einsum("ab,cb->ac", x, y, "default")
  assert (exact.dtype, exact.tolist()) == (jnp.float32, [[257, 257], [7, 7]])
  rounded = einsum("ab,cb->ac", x, y, "default", jnp.bfloat16)
  assert (rounded.dtype, rounded.tolist()) == (jnp.bfloat16, [[256, 256], [7, 7]])


def test_every_transposition_runs_and_has_exact_sums():
  """XLA folds transposes into products, and has no bfloat16 kernel for two transposed operands."""
  sizes = {"a": 16, "b": 32, "c": 24, "n": 3}
  names = itertools.product(("", "n"), ("ab", "ba"), ("bc", "cb"), ("ac", "ca"))
  cases = [f"{n}{left},{n}{right}->{n}{out}" for n, left, right, out in names]
  shapes = [
    [[sizes[axis] for axis in x] for x in case[: case.index("-")].split(",")] for case in cases
  ]
  pairs = [operands(*pair) for pair in shapes]

  def products(pairs):
    results = [einsum(case, *pair, "default") for case, pair in zip(cases, pairs, strict=True)]
    return results, [jnp.swapaxes(x, -1, -2) for x in results]

  for case, pair, *results in zip(cases, pairs, *jax.jit(products)(pairs), strict=True):
    wanted = np.einsum(case, *(np.asarray(x, np.float32) for x in pair))
    for result, expected in zip(results, (wanted, np.swapaxes(wanted, -1, -2)), strict=True):
      np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4, err_msg=case)
  # Alone, so that nothing but the transposed product is compiled.
  for case, pair in zip(cases, pairs, strict=True):
    turned = lambda x, y, case=case: jnp.swapaxes(einsum(case, x, y, "default"), -1, -2)
    assert np.isfinite(jax.jit(turned)(*pair)).all(), case


def model_of(dtype, mesh):
  return Transformer(dataclasses.replace(CONFIG, compute_dtype=dtype), mesh)


def params_on(model):
  params = init_params(model_of("float32", single_device_mesh()), jax.random.key(0))
  place = lambda x, like: jax.device_put(fetch(x) * 4, like.sharding)
  return jax.tree.map(place, params, abstract_params(model))


def batch_of_prompts():
  return Prompts(PROMPTS.astype(np.int32), np.full(N, P, np.int32))


def decode_errors(dtype, mesh):
  """The differences between the log-probs of the sampler and those of the trainer."""
  model = model_of(dtype, mesh)
  params = params_on(model)
  engine = Engine(ProgramSettings(model, stop=(), pad=0, max_prompt_tokens=P, max_tokens=T))
  sampled = engine.sample(
    engine.layout(params),
    PROMPTS.tolist(),
    jax.random.key(0),
    group=G,
    sampling_params=SamplingParams(),
  )
  prompts, tokens = shard_batch((batch_of_prompts(), sampled.tokens), mesh)
  again, _ = jitted_score(model, params, prompts, tokens, 1.0, 64)
  return np.abs(fetch(sampled.log_probs) - fetch(again))


def results(dtype, mesh):
  """The log-probs and entropies of random completions, and how an update moves the parameters."""
  model = model_of(dtype, mesh)
  params = params_on(model)
  tokens = np.random.default_rng(2).integers(1, 48, (N, G, T)).astype(np.int32)
  batch, tokens = shard_batch((batch_of_prompts(), tokens), mesh)
  log_probs, entropy = jitted_score(model, params, batch, tokens, 1.0, 64)
  mask = np.ones((N, G, T), bool)
  old = np.full((N, G, T), -3.9, np.float32)
  rollouts = Rollouts(batch, tokens, mask, mask, old, np.abs(old), mask[..., 0])
  correct = np.arange(G) % 2 == np.zeros((N, 1))
  rewards = Rewards(correct, correct.astype(np.float32), np.zeros((N, G), np.float32))
  optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, eps=1.0, clip_norm=1e9), 10)
  update = make_update(model, algorithms.make("gtpo"), optimizer)
  rollouts, rewards = shard_batch((rollouts, rewards), mesh)
  state, _ = update(init_state(params, optimizer, model), rollouts, rewards)
  moved = jax.tree.map(lambda x, y: fetch(x) - fetch(y), state.params, params_on(model))
  return {
    "forward": fetch(log_probs),
    "entropy": fetch(entropy),
    "update": np.concatenate([x.ravel() for x in jax.tree.leaves(moved)]),
  }


def assert_close(mesh):
  """Compares bfloat16 with float32, in spacings of bfloat16: 2^-8 of the largest value."""
  half, full = (results(dtype, mesh) for dtype in ("bfloat16", "float32"))
  for name in ("forward", "entropy"):
    spacings = np.abs(half[name] - full[name]) / (np.abs(full[name]).max() * 2**-8)
    assert 0.01 < spacings.mean() < 2 and spacings.max() < 16, name
  spacings = decode_errors("bfloat16", mesh) / (np.abs(full["forward"]).max() * 2**-8)
  assert spacings.mean() < 1 and spacings.max() < 16
  cosine = half["update"] @ full["update"]
  cosine /= np.linalg.norm(half["update"]) * np.linalg.norm(full["update"])
  assert 0.99 < cosine < 0.999999


@pytest.mark.slow
def test_sampling_scoring_and_learning_are_close_to_float32():
  assert_close(single_device_mesh())


@pytest.mark.devices
@pytest.mark.some(0, slow=1)
@pytest.mark.parametrize("shape", [(2, 2, 1, 2), (1, 4, 2, 1), (1, 8, 1, 1)])
def test_they_are_close_on_eight_devices(shape):
  assert_close(mesh_of(*shape))
