"""Imitation: maximum likelihood of a teacher's completions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of
from toys import TOY
from update_cases import largest_difference

from gtpo_jax.arrays import Prompts
from gtpo_jax.models import Transformer, init_params
from gtpo_jax.training.imitation import Demonstrations, make_imitation
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer

CONFIG = dataclasses.replace(TOY, layers=1)
K = 2
B = 4
P = 3
T = 7


@pytest.mark.devices
@pytest.mark.slow
def test_two_updates_on_a_mesh_agree_with_the_full_softmax():
  """The expected loss is the mean cross-entropy over the mask, computed from full logits."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 48, (K, B, T)).astype(np.int32)
  prompts = Prompts(rng.integers(0, 48, (K, B, P)).astype(np.int32), np.full((K, B), P, np.int32))
  mask = np.arange(T) < rng.integers(1, T + 1, (K, B, 1))
  model = Transformer(CONFIG, mesh_of(2, 1, 1, 2))
  config = OptimizerConfig(learning_rate=0.5, eps=1.0, b1=0.0, weight_decay=0.0, clip_norm=1e9)
  optimizer = make_optimizer(config, K)
  params = init_params(model, jax.random.key(0))
  start = jax.device_get(params)
  imitate = make_imitation(model, optimizer, head_chunk=12)
  state = init_state(params, optimizer, model)
  state, losses = imitate(state, Demonstrations(prompts, tokens, mask))

  def loss(params, i):
    sequences = jnp.concatenate([prompts.tokens[i], tokens[i]], 1)
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, sequences))[:, P - 1 : -1]
    targets = tokens[i][..., None]
    return -jnp.take_along_axis(log_probs, targets, -1)[..., 0].mean(where=mask[i])

  params = start
  moments = optimizer.init(start)
  for i in range(K):
    value, grads = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, i)
    np.testing.assert_allclose(losses[i], value, rtol=1e-5)
    updates, moments = optimizer.update(grads, moments, params)
    params = jax.tree.map(np.add, params, updates)
  assert_close = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5)
  jax.tree.map(assert_close, jax.device_get(state.params), jax.device_get(params))
  assert largest_difference(params, start) > 1e-2
