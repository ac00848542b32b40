"""Attention of one decode step over pages: each slot's prompt, its past and the current chunk.

There is one kernel for TPU and one for GPU. Both read only the pages in use, and a prompt once for
all slots in the same row. JAX's own kernels for pages (paged and ragged paged attention) read a
shared prompt once for every completion, and normalise their result, so that nothing can be added.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention.sources import merge_partials
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.chips import cores_of
from gtpo_jax.runtime.mesh import partition_spec
from gtpo_jax.sampling.cache import head_axis
from gtpo_jax.sampling.paged.gpu_kernel import attend_rows_on_gpu
from gtpo_jax.sampling.paged.tables import PageRows, Pages, PageTables
from gtpo_jax.sampling.paged.tpu_kernel import attend_on_tpu


def paged_attention(
  model: Transformer,
  q: jax.Array,
  pages: Pages,
  chunk: jax.Array,
  tables: PageTables,
  step: jax.Array,
  kernel: str,
) -> jax.Array:
  """Attends with one query position per slot to its prompt, its past and its chunk.

  Args:
    model: the architecture, on the sampling mesh.
    q: queries [s, 1, h, 1, e].
    pages: the layer's pages.
    chunk: [s, k, c, 2e], keys and values of the chunk as in a page.
    tables: the rows of each slot.
    step: i32[], the last valid position of the chunk.
    kernel: "pallas" (TPU) or "triton" (GPU). On CPU both are interpreted.

  Returns:
    [s, 1, h, 1, e]. What slots that are not running get is finite, and means nothing.
  """
  device = model.mesh.devices.flat[0]
  heads = head_axis(model)
  by_heads = partition_spec(("batch", None, heads))
  of_pages = partition_spec(("batch", heads))
  of_rows = partition_spec(("batch",))
  ends = jnp.zeros_like(tables.running.end) + step + 1
  rows = (tables.prompts, tables.completions, tables.running._replace(end=ends))
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
      jax.tree.map(lambda _: of_pages, pages),
      of_pages,
      *jax.tree.map(lambda _: of_rows, rows),
    ),
    out_specs=by_heads,
    check_vma=False,
  )(q, pages, chunk, *rows)


def local_attention(
  kernel: str,
  q: jax.Array,
  pages: Pages,
  chunk: jax.Array,
  *rows: PageRows,
  precision: str = "default",
  interpret: bool,
  cores: int = 1,
) -> jax.Array:
  """Runs `paged_attention` on one device's slots, pages and heads.

  Args:
    kernel: as in `paged_attention`.
    q: as there.
    pages: as there.
    chunk: as there.
    *rows: the rows of prompts, completions and running slots.
    precision: that of the GPU kernel's products; see `attend_rows_on_gpu`.
    interpret: whether to interpret the kernel.
    cores: the number of cores of a TPU.
  """
  if kernel == "pallas":
    return attend_on_tpu(q, pages, chunk, *rows, interpret=interpret, cores=cores)
  prompts, completions, running = rows
  parts = [
    attend_rows_on_gpu(q, source, part, precision, interpret)
    for source, part in ((pages, prompts), (pages, completions), (Pages(chunk, None), running))
  ]
  running_slots = (sum(part.weight_sum for part in parts) > 0).any((2, 3, 4), keepdims=True)
  return jnp.where(running_slots, merge_partials(parts), 0.0).astype(q.dtype)
