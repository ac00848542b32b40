"""The update through cuDNN's padded rows: the losses and gradients of the reference on CPU.

`jax.nn.dot_product_attention` computes here what cuDNN computes on a GPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of

from gtpo_jax.arrays import Prompts
from gtpo_jax.models import PRESETS
from gtpo_jax.models.attention import causal
from gtpo_jax.models.attention.kernels import attend_with_cudnn
from gtpo_jax.models.params import init_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.training.log_probs import Reading, head_settings, loss_and_score
from gtpo_jax.training.packing import plan_rows

N, G = 2, 4
LENGTHS = np.asarray([[20, 3, 1, 9], [7, 7, 12, 2]])


def loss_and_gradient(t, packed, devices=1):
  """The loss of a weighted sum of log-probs, and its gradient, in float32."""
  config = dataclasses.replace(PRESETS["tiny"], layers=1, matmul_precision="highest")
  model = Transformer(config, mesh_of(devices, 1, 1, 1))
  rng = np.random.default_rng(0)
  prompts = Prompts(jnp.asarray(rng.integers(0, 300, (N, 6)), jnp.int32), jnp.asarray([6, 2]))
  tokens = jnp.asarray(rng.integers(0, 300, (N, G, t)), jnp.int32)
  mask = np.arange(t) < LENGTHS[..., None]
  weights = jnp.asarray(np.where(mask, rng.normal(size=mask.shape), 0), jnp.float32)
  packing = plan_rows(LENGTHS, t) if packed else None
  assert packing is None or packing.segment is not None
  weighted = lambda log_probs, entropy, weights: (weights * log_probs).sum()

  settings = head_settings(model, 1.0, 64)
  reading = Reading(prompts, tokens, packing)

  def loss(params):
    return loss_and_score(model, params, reading, settings, weighted, weights)[0]

  return jax.jit(jax.value_and_grad(loss))(init_params(model, jax.random.key(0)))


@pytest.mark.parametrize(
  ("t", "packed", "devices"),
  [
    (21, True, 1),
    pytest.param(20, False, 1, marks=pytest.mark.manual),
    pytest.param(21, True, 2, marks=[pytest.mark.manual, pytest.mark.devices]),
  ],
)
@pytest.mark.slow
def test_padded_rows_give_the_losses_and_gradients_of_the_reference(
  t, packed, devices, monkeypatch
):
  expected = loss_and_gradient(t, packed=False)
  monkeypatch.setattr(causal, "attention_kind", lambda config, mesh: "cudnn")
  kernel = functools.partial(attend_with_cudnn, implementation="xla")
  monkeypatch.setattr(causal, "attend_with_cudnn", kernel)
  got = loss_and_gradient(t, packed, devices)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, expected)
