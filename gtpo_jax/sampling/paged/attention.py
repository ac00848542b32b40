"""Attention of one decode step over pages: each slot's prompt, its past and the current chunk.

There is one kernel for TPU and one for GPU. Both read only the pages in use, and a prompt once for
all slots in the same row. JAX's own kernels for pages (paged and ragged paged attention) read a
shared prompt once for every completion, and normalise their result, so that nothing can be added.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention.rope import Rope, rotate_new
from gtpo_jax.models.attention.sources import KV
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.chips import cores_of
from gtpo_jax.runtime.mesh import partition_spec
from gtpo_jax.sampling.cache import head_axis
from gtpo_jax.sampling.paged.gpu_kernel import attend_on_gpu
from gtpo_jax.sampling.paged.tables import Pages, PageTables
from gtpo_jax.sampling.paged.tpu_kernel import attend_on_tpu


def paged_attention(
  model: Transformer,
  q: jax.Array,
  new: KV,
  rope: Rope,
  pages: Pages,
  chunk: jax.Array,
  tables: PageTables,
  step: jax.Array,
  kernel: str,
) -> tuple[jax.Array, jax.Array]:
  """Attends with one query position per slot to its prompt, its past and its chunk.

  Args:
    model: the architecture, on the sampling mesh.
    q: queries [s, 1, h, 1, e], not rotated.
    new: keys and values of the same position, [s, 1, k, e, 1] and [s, 1, k, 1, e], not rotated.
    rope: the rotary angles of the chunk's positions, f32[s, 1, c, e/2] each.
    pages: the layer's pages.
    chunk: [s, k, c, 2e], keys and values of the chunk as in a page.
    tables: the rows of each slot.
    step: i32[], the new position's place in the chunk.
    kernel: "pallas" (TPU) or "triton" (GPU). On CPU both are interpreted.

  Returns:
    [s, 1, h, 1, e], and the chunk with the new position. What slots that are not running get is
    finite, and means nothing.
  """
  device = model.mesh.devices.flat[0]
  heads = head_axis(model)
  by_heads = partition_spec(("batch", None, heads))
  of_pages = partition_spec(("batch", heads))
  of_rows = partition_spec(("batch",))
  tables = tables._replace(written=None)
  attend = functools.partial(
    local_attention,
    kernel,
    precision=model.config.matmul_precision,
    interpret=device.platform == "cpu",
    cores=cores_of(device),
  )
  return jax.shard_map(
    attend,
    mesh=model.mesh,
    in_specs=(
      by_heads,
      jax.tree.map(lambda _: by_heads, new),
      of_rows,
      jax.tree.map(lambda _: of_pages, pages),
      of_pages,
      jax.tree.map(lambda _: of_rows, tables),
      partition_spec(()),
    ),
    out_specs=(by_heads, of_pages),
    check_vma=False,
  )(q, new, rope, pages, chunk, tables, step)


def local_attention(
  kernel: str,
  q: jax.Array,
  new: KV,
  rope: Rope,
  pages: Pages,
  chunk: jax.Array,
  tables: PageTables,
  step: jax.Array,
  *,
  precision: str = "default",
  interpret: bool,
  cores: int = 1,
) -> tuple[jax.Array, jax.Array]:
  """Runs `paged_attention` on one device's slots, pages and heads.

  Args:
    kernel, q, new, rope, pages, chunk, tables, step: as there.
    precision: that of the GPU kernel's products; see `attend_on_gpu`.
    interpret: whether to interpret the kernel.
    cores: the number of cores of a TPU.
  """
  if kernel == "triton":
    return attend_on_gpu(
      q, new, rope, pages, chunk, tables, step, precision=precision, interpret=interpret
    )
  q, new = rotate_new(q, new, rope, step)
  row = jnp.concatenate([jnp.swapaxes(new.k, -1, -2), new.v], -1)[:, 0].astype(chunk.dtype)
  chunk = jax.lax.dynamic_update_slice_in_dim(chunk, row, step, 2)
  running = tables.running._replace(end=jnp.zeros_like(tables.running.end) + step + 1)
  rows = (tables.prompts, tables.completions, running)
  return attend_on_tpu(q, pages, chunk, *rows, interpret=interpret, cores=cores), chunk
