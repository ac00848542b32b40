"""Loss scaling: with it, float16 gradients are as exact as float16 is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.arrays import Prompts
from gtpo_jax.models import PRESETS
from gtpo_jax.models.params import init_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.training.log_probs import Reading, head_settings, loss_and_score
from gtpo_jax.training.state import loss_scale, scaled, unscale

N, G, T = 4, 4, 32
TOKENS = 32_768  # of the batch that these are a part of


def test_only_float16_is_scaled():
  of = lambda dtype: loss_scale(dataclasses.replace(PRESETS["tiny"], compute_dtype=dtype))
  assert [of("float32"), of("bfloat16"), of("float16")] == [1, 1, 8192]


def gradient(dtype, scale):
  """The gradient of a mean over 32,768 tokens, with advantages of a unit normal distribution."""
  config = dataclasses.replace(PRESETS["tiny"], compute_dtype=dtype, layers=1)
  model = Transformer(config, single_device_mesh())
  rng = np.random.default_rng(0)
  prompts = Prompts(jnp.asarray(rng.integers(0, 300, (N, 8)), jnp.int32), jnp.full((N,), 8))
  tokens = jnp.asarray(rng.integers(0, 300, (N, G, T)), jnp.int32)
  weights = jnp.asarray(rng.normal(size=(N, G, 1)) / TOKENS, jnp.float32)
  weights = jnp.broadcast_to(weights, (N, G, T))
  token_loss = scaled(lambda log_probs, entropy, weights: -(weights * log_probs).sum(), scale)

  settings = head_settings(model, 1.0, 1024)
  reading = Reading(prompts, tokens)

  def loss(params):
    return loss_and_score(model, params, reading, settings, token_loss, weights)[0]

  return unscale(jax.jit(jax.grad(loss))(init_params(model, jax.random.key(0))), scale)


@pytest.mark.slow
def test_float16_with_a_scale_equals_float32():
  exact = jax.tree.leaves(gradient("float32", 1.0))
  error = lambda got: max(
    float(jnp.linalg.norm(x - y) / jnp.linalg.norm(x))
    for x, y in zip(exact, jax.tree.leaves(got), strict=True)
  )
  assert error(gradient("float16", 2.0**13)) < 0.03
  assert error(gradient("float16", 1.0)) > 0.2  # most of it is below the smallest number
