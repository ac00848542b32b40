"""Attention of one decode step over pages: each slot's prompt, its past and the current chunk.

There is one kernel for TPU and one for GPU. Both read only the pages in use, and a prompt once for
all slots in the same row. JAX's own kernels for pages (paged and ragged paged attention) read a
shared prompt once for every completion, and normalise their result, so that nothing can be added.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention.rope import rotate_new
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.chips import cores_of
from gtpo_jax.runtime.mesh import partition_spec
from gtpo_jax.sampling.cache import head_axis
from gtpo_jax.sampling.paged.gpu_kernel import attend_on_gpu
from gtpo_jax.sampling.paged.tables import NewPosition, PageRows, Pages, PageTables
from gtpo_jax.sampling.paged.tpu_kernel import attend_on_tpu


def paged_attention(
  model: Transformer,
  new: NewPosition,
  pages: Pages,
  chunk: jax.Array,
  tables: PageTables,
  kernel: str,
  window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attends with one query position per slot to its prompt, its past and its chunk.

  Args:
    model: the architecture, on the sampling mesh.
    new: the queries, and the keys and values of the same position.
    pages: the layer's pages.
    chunk: [s, k, c, 2e], keys and values of the chunk as in a page.
    tables: the rows of each slot.
    kernel: "pallas" (TPU) or "triton" (GPU). On CPU both are interpreted.
    window: the most positions that a query attends to, its own included; None for all before it.
      Pages before it are not read.

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
    window=window,
  )
  return jax.shard_map(
    attend,
    mesh=model.mesh,
    in_specs=(
      NewPosition(by_heads, jax.tree.map(lambda _: by_heads, new.kv), of_rows, partition_spec(())),
      jax.tree.map(lambda _: of_pages, pages),
      of_pages,
      jax.tree.map(lambda _: of_rows, tables),
    ),
    out_specs=(by_heads, of_pages),
    check_vma=False,
  )(new, pages, chunk, tables)


def local_attention(
  kernel: str,
  new: NewPosition,
  pages: Pages,
  chunk: jax.Array,
  tables: PageTables,
  *,
  precision: str = "default",
  interpret: bool,
  cores: int = 1,
  window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Runs `paged_attention` on one device's slots, pages and heads.

  Args:
    kernel, new, pages, chunk, tables: as there.
    precision: of the GPU kernel's products; see `attend_on_gpu`.
    interpret: whether to interpret the kernel.
    cores: the number of cores of a TPU.
    window: as there.
  """
  if kernel == "triton":
    return attend_on_gpu(
      new, pages, chunk, tables, precision=precision, interpret=interpret, window=window
    )
  q, kv = rotate_new(new.q, new.kv, new.rope, new.step)
  row = jnp.concatenate([jnp.swapaxes(kv.k, -1, -2), kv.v], -1)[:, 0].astype(chunk.dtype)
  chunk = jax.lax.dynamic_update_slice_in_dim(chunk, row, new.step, 2)
  running = tables.running._replace(end=jnp.zeros_like(tables.running.end) + new.step + 1)
  rows = (tables.prompts, tables.completions, running)
  behind = None
  if window:
    # Of each slot, the first position that it attends to, counted from the end of its prompt.
    past = tables.completion_rows
    generated = jnp.where(past < 0, 0, tables.completions.end[jnp.maximum(past, 0)])
    behind = generated + new.step + 1 - window
    rows = _within_window(*rows, behind, new.step + 1 - window)
  return attend_on_tpu(q, pages, chunk, *rows, behind, interpret=interpret, cores=cores), chunk


def _within_window(
  prompts: PageRows, completions: PageRows, running: PageRows, behind: jax.Array, first: jax.Array
) -> tuple[PageRows, PageRows, PageRows]:
  """Lets rows begin where the window of one of their slots begins.

  Args:
    prompts, completions, running: the rows.
    behind: i32[s], the first position of each slot's window, counted from its prompt's end.
    first: i32[], that in the chunk.
  """
  before = jnp.minimum(behind[prompts.slots].min(1), 0)
  begin = lambda rows, start: rows._replace(start=jnp.maximum(rows.start, start))
  return (
    begin(prompts, prompts.end + before),
    begin(completions, behind[completions.slots[:, 0]]),
    begin(running, first),
  )
