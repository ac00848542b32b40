"""The kernels for TPU and GPU, interpreted, against attention over everything with a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.models import ModelConfig, Qwen2
from gtpo_jax.models.attention import KV, Source, look
from gtpo_jax.runtime.mesh import make_mesh, single_device_mesh
from gtpo_jax.sampling.ragged import look_back, look_back_here
from gtpo_jax.sampling.slots import KERNELS


def case(heads, kv_heads, e, w, dtype=jnp.float32, kept=None, mesh=None):
  model = Qwen2(
    ModelConfig(
      vocab_size=48, width=32, layers=1, heads=heads, kv_heads=kv_heads, head_dim=e, mlp=64
    ),
    mesh or single_device_mesh(),
  )
  keys = jax.random.split(jax.random.key(0), 5)
  written = jnp.asarray([0, 1, w // 2, w - 1, w, 127, 128, 129])
  q = jax.random.normal(keys[0], (8, 1, heads, 1, e), dtype)
  kv = KV(
    jax.random.normal(keys[1], (8, 1, kv_heads, e, w), dtype),
    jax.random.normal(keys[2], (8, 1, kv_heads, w, e), dtype),
  )
  if kept == "int8":
    scales = (
      jax.random.uniform(key, (8, 1, kv_heads, w), minval=0.01, maxval=0.02) for key in keys[3:]
    )
    kv = KV(*((50 * x).astype(jnp.int8) for x in kv[:2]), *scales)
  return model, q, kv, written


def seen_by(kernel, model, q, kv, written):
  return jax.jit(lambda q, kv, written: look_back(model, q, kv, written, kernel))(q, kv, written)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
  ("heads", "kv_heads", "e", "w", "kept", "mesh"),
  [
    (4, 2, 16, 256, None, None),
    (7, 1, 64, 384, None, None),
    (5, 5, 16, 1024, None, None),
    (14, 2, 64, 512, "int8", None),
    (4, 2, 16, 256, None, (2, 2, 2)),
    (4, 2, 16, 256, "int8", (1, 2, 4)),
  ],
)
def test_kernel_sees_what_the_mask_lets_be_seen(heads, kv_heads, e, w, kept, mesh, kernel):
  model, q, kv, written = case(heads, kv_heads, e, w, kept=kept, mesh=mesh and make_mesh(*mesh))
  got = seen_by(kernel, model, q, kv, written)
  want = look(q, Source(kv, (jnp.arange(w) < written[:, None])[:, None, None]))
  some = np.asarray(written) > 0
  for name in got._fields:
    a, b = (np.asarray(getattr(seen, name))[some] for seen in (got, want))
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=name)
  assert (
    not np.asarray(got.total)[~some].any() and not np.asarray(got.mixed)[~some].any()
  )  # nothing seen has no weight


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_in_bfloat16(kernel):
  model, q, kv, written = case(12, 2, 128, 256, jnp.bfloat16)
  got = seen_by(kernel, model, q, kv, written)
  want = look(q, Source(kv, (jnp.arange(256) < written[:, None])[:, None, None]))
  ratio = lambda seen: np.asarray(seen.mixed / seen.total)[1:]
  np.testing.assert_allclose(ratio(got), ratio(want), atol=2e-2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_behind_the_end_is_not_read(kernel):
  """NaN there does no harm to values that are read beside it, unlike under a mask alone."""
  model, q, kv, written = case(4, 2, 16, 384)
  rotten = kv._replace(k=jnp.where(jnp.arange(384) >= 256, jnp.nan, kv.k))
  written = jnp.minimum(written, 250)
  got = seen_by(kernel, model, q, rotten, written)
  assert all(np.isfinite(x).all() for x in got)


@pytest.mark.parametrize("kept", [None, "int8"])
def test_the_gpu_kernel_becomes_a_triton_program(kept):
  """There is no GPU here; as far as the Triton program that is handed to its compiler, it is made."""
  _, q, kv, written = case(14, 2, 64, 512, jnp.bfloat16, kept)
  here = jax.jit(lambda q, kv, written: look_back_here(q, kv, written, "triton", interpret=False))
  try:
    program = here.trace(q, kv, written).lower(lowering_platforms=("cuda",)).as_text()
  except RuntimeError as error:
    if "No supported GPU devices" not in str(error):
      raise
    pytest.skip("this JAX asks the GPU itself what it is")
  assert "__gpu$xla.gpu.triton" in program
