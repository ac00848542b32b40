"""The kernels for TPU and GPU, interpreted, against masked attention over all positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.models import ModelConfig, Qwen2
from gtpo_jax.models.attention import KV, MaskedKV, partial_attention
from gtpo_jax.runtime.mesh import make_mesh, single_device_mesh
from gtpo_jax.sampling.params import KERNEL_PLATFORMS
from gtpo_jax.sampling.ragged import local_ragged_attention, ragged_attention

SLOTS = 8


def inputs(heads, kv_heads, e, w, dtype=jnp.float32, kv_dtype=None, mesh=None):
  """A model, and random queries, caches and lengths of 8 slots."""
  config = ModelConfig(
    vocab_size=48, width=32, layers=1, heads=heads, kv_heads=kv_heads, head_dim=e, mlp=64
  )
  model = Qwen2(config, mesh or single_device_mesh())
  keys = jax.random.split(jax.random.key(0), 5)
  lengths = jnp.asarray([0, 1, w // 2, w - 1, w, 127, 128, 129])
  q = jax.random.normal(keys[0], (SLOTS, 1, heads, 1, e), dtype)
  k = jax.random.normal(keys[1], (SLOTS, 1, kv_heads, e, w), dtype)
  v = jax.random.normal(keys[2], (SLOTS, 1, kv_heads, w, e), dtype)
  if kv_dtype != "int8":
    return model, q, KV(k, v), lengths
  k_scale, v_scale = (
    jax.random.uniform(key, (SLOTS, 1, kv_heads, w), minval=0.01, maxval=0.02) for key in keys[3:]
  )
  kv = KV((50 * k).astype(jnp.int8), (50 * v).astype(jnp.int8), k_scale, v_scale)
  return model, q, kv, lengths


def run(kernel, model, q, kv, lengths):
  attend = lambda q, kv, lengths: ragged_attention(model, q, kv, lengths, kernel)
  return jax.jit(attend)(q, kv, lengths)


def masked_attention(q, kv, lengths):
  mask = jnp.arange(kv.v.shape[3]) < lengths[:, None]
  return partial_attention(q, MaskedKV(kv, mask[:, None, None]))


@pytest.mark.parametrize("kernel", KERNEL_PLATFORMS)
@pytest.mark.parametrize(
  ("heads", "kv_heads", "e", "w", "kv_dtype", "mesh"),
  [
    (4, 2, 16, 256, None, None),
    (7, 1, 64, 384, None, None),
    (5, 5, 16, 1024, None, None),
    (14, 2, 64, 512, "int8", None),
    (4, 2, 16, 256, None, (2, 2, 2)),
    (4, 2, 16, 256, "int8", (1, 2, 4)),
  ],
)
def test_kernel_equals_masked_attention(heads, kv_heads, e, w, kv_dtype, mesh, kernel):
  model, q, kv, lengths = inputs(
    heads, kv_heads, e, w, kv_dtype=kv_dtype, mesh=mesh and make_mesh(*mesh)
  )
  result = run(kernel, model, q, kv, lengths)
  expected = masked_attention(q, kv, lengths)
  nonempty = np.asarray(lengths) > 0
  for name in result._fields:
    a, b = (np.asarray(getattr(partial, name))[nonempty] for partial in (result, expected))
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=name)
  assert not np.asarray(result.weight_sum)[~nonempty].any()  # an empty slot has weight 0
  assert not np.asarray(result.weighted_values)[~nonempty].any()


@pytest.mark.parametrize("kernel", KERNEL_PLATFORMS)
def test_kernel_in_bfloat16(kernel):
  model, q, kv, lengths = inputs(12, 2, 128, 256, jnp.bfloat16)
  result = run(kernel, model, q, kv, lengths)
  expected = masked_attention(q, kv, lengths)
  normalise = lambda partial: np.asarray(partial.weighted_values / partial.weight_sum)[1:]
  np.testing.assert_allclose(normalise(result), normalise(expected), atol=2e-2)


@pytest.mark.parametrize("kernel", KERNEL_PLATFORMS)
def test_positions_past_the_length_are_not_read(kernel):
  """NaN in blocks past the length does not reach the result, as it would through a mask."""
  model, q, kv, lengths = inputs(4, 2, 16, 384)
  with_nan = kv._replace(k=jnp.where(jnp.arange(384) >= 256, jnp.nan, kv.k))
  result = run(kernel, model, q, with_nan, jnp.minimum(lengths, 250))
  assert all(np.isfinite(x).all() for x in result)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_the_gpu_kernel_lowers_to_a_triton_program(kv_dtype):
  """Without a GPU, the kernel can be lowered to the program for the Triton compiler."""
  _, q, kv, lengths = inputs(14, 2, 64, 512, jnp.bfloat16, kv_dtype)
  attend = jax.jit(
    lambda q, kv, lengths: local_ragged_attention(q, kv, lengths, "triton", interpret=False)
  )
  try:
    program = attend.trace(q, kv, lengths).lower(lowering_platforms=("cuda",)).as_text()
  except RuntimeError as error:
    if "No supported GPU devices" not in str(error):
      raise
    pytest.skip("this version of JAX queries the GPU for its type")
  assert "__gpu$xla.gpu.triton" in program
