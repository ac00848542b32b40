"""The warm start: maximum likelihood of what a teacher wrote."""

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.arrays import Prompts
from gtpo_jax.models import ModelConfig, Qwen2, init_params
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.training.imitation import Demonstrations, make_imitation
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer

CONFIG = ModelConfig(vocab_size=48, width=32, layers=1, heads=4, kv_heads=2, head_dim=8, mlp=64)
K = 2
B = 4
P = 3
T = 7


def test_two_updates_on_a_mesh_are_those_of_the_whole_softmax():
  """Mean cross-entropy a token that counts, of full logits, and plain gradient descent."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 48, (K, B, T)).astype(np.int32)
  prompts = Prompts(rng.integers(0, 48, (K, B, P)).astype(np.int32), np.full((K, B), P, np.int32))
  mask = np.arange(T) < rng.integers(1, T + 1, (K, B, 1))
  model = Qwen2(CONFIG, make_mesh(2, 1, 2, jax.devices()[:4]))
  optimizer = make_optimizer(
    OptimizerConfig(learning_rate=0.5, eps=1.0, b1=0.0, weight_decay=0.0, clip_norm=1e9), K
  )
  params = init_params(model, jax.random.key(0))
  start = jax.device_get(params)
  imitate = make_imitation(model, optimizer, head_chunk=12)
  state, losses = imitate(
    init_state(params, optimizer, model), Demonstrations(prompts, tokens, mask)
  )

  def loss(params, i):
    whole = jnp.concatenate([prompts.tokens[i], tokens[i]], 1)
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, whole))[:, P - 1 : -1]
    return -jnp.take_along_axis(log_probs, tokens[i][..., None], -1)[..., 0].mean(where=mask[i])

  params = start
  moments = optimizer.init(start)
  for i in range(K):
    value, grads = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, i)
    np.testing.assert_allclose(losses[i], value, rtol=1e-5)
    changes, moments = optimizer.update(grads, moments, params)
    params = jax.tree.map(np.add, params, changes)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5),
    jax.device_get(state.params),
    jax.device_get(params),
  )
  assert (
    max(
      np.abs(x - y).max()
      for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(start), strict=True)
    )
    > 1e-2
  )
