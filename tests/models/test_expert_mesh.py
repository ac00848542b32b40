"""Experts that are split over devices compute what one device does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of
from toys import TOY_EXPERTS, strong

from gtpo_jax import algorithms
from gtpo_jax.arrays import Rewards, Signals
from gtpo_jax.models import Transformer
from gtpo_jax.models.experts import module
from gtpo_jax.models.kinds import LayerKind, Mixture
from gtpo_jax.models.params import abstract_params
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import shard_batch, single_device_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.programs import ProgramSettings
from gtpo_jax.sampling.settings import EngineConfig, SamplingParams
from gtpo_jax.training.gradient import FrozenParams, Minibatch, UpdateSettings, make_gradient
from gtpo_jax.training.packing import plan_rows

MIXTURE = Mixture(12, 3, 24, normalised=True, shared=16)
CONFIG = dataclasses.replace(TOY_EXPERTS, kv_heads=2, mixture=MIXTURE)
T, G = 8, 4
PROMPTS = [np.random.default_rng(i).integers(12, 48, 1 + i % 6).tolist() for i in range(8)]
# (data, fsdp, context, tensor, expert) on eight devices
MESHES = {
  "expert2": (1, 2, 1, 2, 2),
  "expert4": (2, 1, 1, 1, 4),
  "expert4-context": (1, 1, 2, 1, 4),
}
pytestmark = pytest.mark.devices


def built(mesh, quantize=""):
  """The model, its parameters, and an engine on a mesh; the parameters are the same on each."""
  model, params = strong(CONFIG, mesh, 3)
  config = EngineConfig(chunk=4, weights_dtype=quantize)
  settings = ProgramSettings(model, (7, 11, 13, 17), 3, 6, T, config=config)
  return model, params, Engine(settings)


@functools.cache
def sampled(name, quantize=""):
  _, params, engine = built(mesh_of(*MESHES[name]) if name else single_device_mesh(), quantize)
  settings = {"group": G, "sampling_params": SamplingParams()}
  return engine.sample(engine.layout(params), PROMPTS, jax.random.key(4), **settings)


def gradient(name, rollouts):
  """The gradient of GTPO and of the load-balancing loss."""
  mesh = mesh_of(*MESHES[name]) if name else single_device_mesh()
  _, params, _ = built(mesh)
  model = Transformer(dataclasses.replace(CONFIG, router_balance=0.1), mesh)
  correct = np.asarray(rollouts.tokens.sum(-1) % 2 == 0)
  rewards = Rewards(correct, correct.astype(np.float32), np.zeros(correct.shape, np.float32))
  algorithm = algorithms.make("gtpo")
  signals = Signals.of(rollouts, rewards)
  advantages = algorithm.advantages(signals)
  weights = algorithm.token_weights(signals.mask)
  signals = signals.replace(
    advantages=advantages, weights=weights, log_probs_old=rollouts.log_probs
  )
  batch = shard_batch(Minibatch(rollouts, jax.device_get(signals)), mesh)
  compute = jax.jit(make_gradient(model, algorithm, UpdateSettings(head_chunk=64)))
  grads, scores = compute(params, FrozenParams({}), batch, jax.random.key(0))
  return jax.device_get(grads), jax.device_get(scores)


@pytest.mark.parametrize(
  ("name", "packed"),
  [
    pytest.param("expert2", False, marks=pytest.mark.manual),
    ("expert4-context", True),
    pytest.param("expert2", True, marks=pytest.mark.manual),
    pytest.param("expert4", False, marks=pytest.mark.manual),
    pytest.param("expert4", True, marks=pytest.mark.manual),
    pytest.param("expert4-context", False, marks=pytest.mark.manual),
  ],
)
@pytest.mark.slow
def test_sampler_and_gradient_equal_those_of_one_device(name, packed, monkeypatch):
  """Also where several devices compute their tokens in three parts."""
  rollouts = sampled("")
  if not packed:
    got = sampled(name)
    np.testing.assert_array_equal(got.tokens, rollouts.tokens)
    np.testing.assert_array_equal(got.routes, rollouts.routes)
    np.testing.assert_allclose(got.log_probs, rollouts.log_probs, rtol=0, atol=2e-5)
  else:
    short = np.arange(T) < np.asarray([1, 4, 2, 3])[:, None]
    rollouts = rollouts.replace(mask=rollouts.mask & short, present=rollouts.present & short)
    packing = plan_rows(np.asarray(rollouts.lengths), T, MESHES[name][2])
    rollouts = rollouts.replace(packing=packing)
  want, plain = gradient("", rollouts)
  of_token = MESHES[name][4] * MIXTURE.per_token * CONFIG.width * 4  # bytes of its rows
  monkeypatch.setattr(module, "PART_BYTES", of_token * rollouts.tokens.size // 8 // 3)
  got, scores = gradient(name, rollouts)
  mask = np.asarray(rollouts.mask)
  np.testing.assert_allclose(scores.log_probs[mask], plain.log_probs[mask], rtol=0, atol=3e-5)
  np.testing.assert_array_equal(scores.router.differs[mask], 0)
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(g, w, rtol=0, atol=1e-6 + 3e-5 * np.abs(w).max())


@pytest.mark.slow
def test_int8_experts_are_split_too():
  got, want = sampled("expert2", "int8"), sampled("", "int8")
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=0, atol=2e-5)


def test_a_forward_pass_sends_tokens_to_experts_and_no_matrix_of_an_expert():
  mesh = mesh_of(1, 1, 1, 1, 4)
  model = Transformer(
    dataclasses.replace(CONFIG, layers=1, kinds=(LayerKind(mlp="experts"),)), mesh
  )
  params = abstract_params(model)
  tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
  program = jax.jit(lambda p, x: model.apply({"params": p}, x)).lower(params, tokens).compile()
  text = program.as_text()
  assert "f32[12,32,24]" not in text  # all experts' matrices
  assert "f32[3,32,24]" in text  # those of a device


def test_an_indivisible_number_of_experts_is_refused():
  with pytest.raises(UserError, match="the model's expert axis of 12 does not divide over 8"):
    abstract_params(Transformer(CONFIG, mesh_of(1, 1, 1, 1, 8)))
