"""The kernels for TPU and GPU, interpreted, against attention over the positions of each slot."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of
from toys import TOY

from gtpo_jax.models import Transformer
from gtpo_jax.models.attention.rope import rope_angles, rotate_new
from gtpo_jax.models.attention.sources import KV
from gtpo_jax.runtime.mesh import batch_shards, single_device_mesh
from gtpo_jax.sampling.paged.attention import local_attention, paged_attention
from gtpo_jax.sampling.paged.cache import PagedCache
from gtpo_jax.sampling.paged.tables import NewPosition, PageRows, Pages, PageTables
from gtpo_jax.sampling.settings import KERNEL_PLATFORMS

SLOTS = 8  # per shard
PAGES = 42
# (slots, first position, end) of each row in use; the pages of a row are random.
PROMPTS = [([0, 1], 3, 16), ([2], 0, 48), ([5, 7], 15, 40), ([6], 47, 48)]
COMPLETIONS = [([0], 0, 1), ([2], 0, 16), ([7], 0, 17), ([6], 0, 48)]
RUNNING = [0, 1, 2, 5, 6, 7]  # slots that attend to a chunk; the others are in no row
CHUNK = 16
STEP = 5


def case(heads, kv_heads, e, page=16, dtype=jnp.float32, int8=False, mesh=None):
  """A model, and the arguments of `paged_attention`: rows of three pages, equal on every shard."""
  sizes = {"layers": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": e}
  # Otherwise GPUs multiply in TF32.
  config = dataclasses.replace(TOY, **sizes, matmul_precision="highest")
  model = Transformer(config, mesh or single_device_mesh())
  shards = batch_shards(model.mesh)
  rng = np.random.default_rng(0)
  repeat = lambda x: np.concatenate([x] * shards)
  kv = rng.normal(size=(PAGES, kv_heads, page, 2 * e)).astype(np.float32)
  scale = None
  if int8:
    kv = np.round(40 * kv).clip(-127, 127).astype(np.int8)
    scale = rng.uniform(0.01, 0.03, (PAGES, kv_heads, 2, page)).astype(np.float32)
    scale = jnp.asarray(repeat(scale))
  names = iter(rng.permutation(PAGES).reshape(-1, 3)[: len(PROMPTS) + len(COMPLETIONS)])
  rows = [
    rows_of(
      2,
      [(slots, next(names), first * page // 16, end * page // 16) for slots, first, end in PROMPTS],
    ),
    rows_of(
      1,
      [
        (slots, next(names), first * page // 16, end * page // 16)
        for slots, first, end in COMPLETIONS
      ],
    ),
    rows_of(1, [([slot], [slot], 0, 1) for slot in RUNNING], pages=1),
  ]
  idle = [slot for slot in range(SLOTS) if slot not in RUNNING]
  rows[0].slots[len(PROMPTS)] = (idle * 2)[:2]
  rows[0].end[len(PROMPTS)] = -1
  of_slot = np.full(SLOTS, -1)
  of_slot[[slot for (slot,), *_ in COMPLETIONS]] = range(len(COMPLETIONS))
  tables = PageTables(*(PageRows(*map(repeat, part)) for part in rows), None, repeat(of_slot))
  random = lambda *shape: jnp.asarray(repeat(rng.normal(size=(SLOTS, *shape))), dtype)
  q = random(1, heads, 1, e)
  chunk = random(kv_heads, CHUNK, 2 * e)
  new = KV(random(1, kv_heads, e, 1), random(1, kv_heads, 1, e))
  positions = jnp.asarray(repeat(np.arange(SLOTS)))[:, None, None] + jnp.arange(CHUNK)
  pool = Pages(jnp.asarray(repeat(kv), None if int8 else dtype), scale)
  new = NewPosition(q, new, rope_angles(positions, e, 100.0), jnp.int32(STEP))
  return model, new, pool, chunk, tables


def rows_of(width, used, pages=3):
  rows = PageRows(
    np.asarray([len(used)], np.int32),
    *(np.zeros((SLOTS, *shape), np.int32) for shape in [(width,), (pages,), (), ()]),
  )
  for row, (slots, names, start, end) in enumerate(used):
    rows.slots[row] = slots[0]
    rows.slots[row, : len(slots)] = slots
    rows.pages[row] = names
    rows.start[row], rows.end[row] = start, end
  return rows


def run(kernel, model, *arrays, window=None):
  attend = lambda *arrays: paged_attention(model, *arrays, kernel, window)
  out, chunk = jax.jit(attend)(*arrays)
  return np.asarray(out)[:, 0, :, 0], np.asarray(chunk)


def expected(new, pages, chunk, tables, window=10**9):
  """Softmax attention of the first shard's running slots in float64, [slots, h, e]; the chunk."""
  q, kv_new = rotate_new(*new)
  chunk = np.array(chunk)[:SLOTS]
  chunk[:, :, STEP] = np.concatenate([kv_new.k[:SLOTS, 0, :, :, 0], kv_new.v[:SLOTS, 0, :, 0]], -1)
  kv = np.asarray(pages.kv, np.float64)
  page, e = kv.shape[2], kv.shape[3] // 2
  if pages.scale is not None:
    scale = np.swapaxes(np.asarray(pages.scale, np.float64), 2, 3)
    kv = kv * np.repeat(scale, e, -1)
  heads = q.shape[2]
  out = np.zeros((len(RUNNING), heads, e))
  for i, slot in enumerate(RUNNING):
    at = [
      kv[rows.pages[row][position // page], :, position % page]
      for rows, row, position in positions_of(slot, tables, window)
    ]
    of_chunk = np.asarray(chunk, np.float64)[slot, :, max(STEP + 1 - window, 0) : STEP + 1]
    both = np.stack(at + list(np.moveaxis(of_chunk, 1, 0)))
    for head in range(heads):
      k, v = np.split(both[:, head // (heads // kv.shape[1])], 2, -1)
      scores = k @ np.asarray(q[slot, 0, head, 0], np.float64) / e**0.5
      weights = np.exp(scores - scores.max())
      out[i, head] = weights @ v / weights.sum()
  return out, chunk


def positions_of(slot, tables, window):
  """The (rows, row, position) in pages that a slot attends to."""
  row = tables.completion_rows[slot]
  generated = tables.completions.end[row] if row >= 0 else 0
  for rows, after in ((tables.prompts, generated), (tables.completions, 0)):
    for row in range(rows.count[0]):
      if slot in rows.slots[row]:
        first = rows.end[row] + after + STEP + 1 - window
        yield from (
          (rows, row, position) for position in range(max(rows.start[row], first), rows.end[row])
        )


@pytest.mark.parametrize(
  ("kernel", "heads", "kv_heads", "e", "page", "int8", "mesh"),
  [
    ("pallas", 6, 2, 16, 16, False, None),
    pytest.param("pallas", 9, 1, 128, 256, False, None, marks=pytest.mark.slow),
    ("pallas", 4, 2, 64, 32, True, None),
    pytest.param(
      "pallas", 4, 2, 16, 16, False, (2, 2, 1, 2), marks=[pytest.mark.slow, pytest.mark.devices]
    ),
    ("triton", 6, 2, 16, 16, False, None),
    pytest.param("triton", 7, 1, 64, 128, True, None, marks=pytest.mark.slow),
    pytest.param(
      "triton", 4, 2, 16, 16, True, (1, 2, 1, 4), marks=[pytest.mark.slow, pytest.mark.devices]
    ),
  ],
)
def test_kernels_equal_attention_over_the_positions(kernel, heads, kv_heads, e, page, int8, mesh):
  """Keys and values share a register or not; there are several blocks; heads are split or not."""
  model, *arrays = case(heads, kv_heads, e, page, int8=int8, mesh=mesh and mesh_of(*mesh))
  got, chunk = run(kernel, model, *arrays)
  want, want_chunk = expected(*arrays)
  assert np.isfinite(got).all()
  for shard in got.reshape(-1, SLOTS, *got.shape[1:]):
    np.testing.assert_allclose(shard[RUNNING], want, rtol=2e-5, atol=2e-5)
  for shard in chunk.reshape(-1, SLOTS, *chunk.shape[1:]):
    np.testing.assert_allclose(shard[RUNNING], want_chunk[RUNNING], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
  ("page", "int8", "mesh"),
  [
    (16, False, None),
    pytest.param(256, True, None, marks=pytest.mark.slow),  # the TPU kernel has several blocks
    pytest.param(16, True, (2, 2, 1, 2), marks=[pytest.mark.slow, pytest.mark.devices]),
  ],
)
@pytest.mark.parametrize("kernel", KERNEL_PLATFORMS)
def test_windows_in_pages_and_what_is_before_them_is_not_read(kernel, page, int8, mesh):
  """Windows of a part of the chunk, of its size, of pages, and of everything."""
  model, new, pages, chunk, tables = case(4, 2, 16, page, int8=int8, mesh=mesh and mesh_of(*mesh))
  for window in (STEP, page + 1) if mesh is None and page == 16 else (1, page + 1, 100 * page):
    want, _ = expected(new, pages, chunk, tables, window)
    unread = pages
    if mesh is None:
      used = {
        rows.pages[row][position // page]
        for slot in RUNNING
        for rows, row, position in positions_of(slot, tables, window)
      }
      others = np.asarray([i not in used for i in range(PAGES)])[:, None, None, None]
      nothing = 127 if int8 else np.nan
      unread = pages._replace(kv=jnp.where(others, jnp.asarray(nothing, pages.kv.dtype), pages.kv))
    got, _ = run(kernel, model, new, unread, chunk, tables, window=window)
    for shard in got.reshape(-1, SLOTS, *got.shape[1:]):
      np.testing.assert_allclose(shard[RUNNING], want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kernel", KERNEL_PLATFORMS)
def test_queries_and_keys_that_are_not_rotated(kernel):
  model, new, pages, chunk, tables = case(4, 2, 16)
  new = new._replace(rope=None)
  got, written = run(kernel, model, new, pages, chunk, tables)
  want, want_chunk = expected(new, pages, chunk, tables)
  np.testing.assert_allclose(got[RUNNING], want, rtol=2e-5, atol=2e-5)
  np.testing.assert_allclose(written[RUNNING], want_chunk[RUNNING], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kernel", KERNEL_PLATFORMS)
@pytest.mark.some(1)
def test_kernels_in_bfloat16(kernel):
  model, *arrays = case(12, 2, 128, dtype=jnp.bfloat16)
  got = run(kernel, model, *arrays)[0][RUNNING].astype(np.float32)
  np.testing.assert_allclose(got, expected(*arrays)[0], atol=2e-2)


@pytest.mark.parametrize("kernel", KERNEL_PLATFORMS)
@pytest.mark.some(1)
def test_what_others_left_in_a_page_is_not_read(kernel):
  """A page that is partly used may contain NaN from the completion that had it before."""
  model, new, pages, chunk, tables = case(4, 2, 16)
  want, _ = run(kernel, model, new, pages, chunk, tables)
  kv = np.full_like(pages.kv, np.nan)
  for rows in (tables.prompts, tables.completions):
    for row in range(rows.count[0]):
      for position in range(rows.start[row], rows.end[row]):
        at = (rows.pages[row][position // 16], slice(None), position % 16)
        kv[at] = pages.kv[at]
  got, _ = run(kernel, model, new, Pages(jnp.asarray(kv), None), chunk, tables)
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("int8", "window"), [(False, None), (True, None), (False, 200)])
def test_the_gpu_kernel_lowers_to_a_triton_program(int8, window):
  """Without a GPU, the kernel can be lowered to the program for the Triton compiler."""
  _, *arrays = case(14, 2, 64, 128, jnp.bfloat16, int8)
  attend = functools.partial(local_attention, "triton", interpret=False, window=window)
  attend = jax.jit(attend)
  try:
    program = attend.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
  except RuntimeError as error:
    if "No supported GPU devices" not in str(error):
      raise
    pytest.skip("this version of JAX queries the GPU for its type")
  assert program.count("__gpu$xla.gpu.triton") == 1


def test_the_gpu_kernel_multiplies_with_the_precision_of_the_model():
  model, *arrays = case(4, 2, 16)
  attend = lambda *arrays: paged_attention(model, *arrays, "triton")
  jaxpr = str(jax.make_jaxpr(attend)(*arrays))
  assert jaxpr.count("dot_general") == jaxpr.count("precision=(Precision.HIGHEST") > 0


# --- writing ---


def random_kv(rng, rows, kv_heads, e, positions):
  k = rng.normal(size=(rows, 1, kv_heads, e, positions)).astype(np.float32)
  v = rng.normal(size=(rows, 1, kv_heads, positions, e)).astype(np.float32)
  return KV(jnp.asarray(k), jnp.asarray(v))


def side_by_side(kv):
  """[rows, positions, k, 2e]"""
  return np.concatenate([np.moveaxis(kv.k[:, 0], 3, 1), np.moveaxis(kv.v[:, 0], 2, 1)], -1)


@pytest.mark.parametrize("mesh", [None, pytest.param((2, 2, 1, 2), marks=pytest.mark.devices)])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_prompts_and_chunks_are_written_to_their_pages(dtype, mesh):
  """Two prompts of two pages, one with an unused first page; chunks that cross a page or do not."""
  config = dataclasses.replace(TOY, layers=1)
  model = Transformer(config, mesh_of(*mesh) if mesh else single_device_mesh())
  shards = batch_shards(model.mesh)
  cache = PagedCache(model, dtype, 4, "pallas")
  rng = np.random.default_rng(0)
  repeat = lambda x: np.concatenate([np.asarray(x)] * shards)
  over_shards = lambda kv: jax.tree.map(lambda x: jnp.asarray(repeat(x)), kv)
  prompts, chunk = random_kv(rng, 2, 2, 8, 8), random_kv(rng, 3, 2, 8, 6)
  chunk_rows = np.moveaxis(side_by_side(chunk), 1, 2)
  places = [[[5, 1], [99, 7]]]
  generated = [0, 3, 5]
  written = [[2, 3, 100], [4, 6, 8], [99, 101, 102]]  # the third slot waits
  tables = PageTables(None, None, None, repeat(written), None)

  def write():
    kv = cache.zeros(10 * shards)
    kv = cache.insert(kv, [over_shards(prompts)], jnp.asarray(repeat(places)))
    return cache.append(
      kv, [jnp.asarray(repeat(chunk_rows))], tables, jnp.asarray(repeat(generated))
    )

  (pages,) = jax.jit(write)()
  kv = np.asarray(pages.kv, np.float64)
  if dtype == "int8":
    scale = np.swapaxes(np.asarray(pages.scale, np.float64), 2, 3)
    kv = kv * np.repeat(scale, 8, -1)
  want = np.zeros((10, 4, 2, 16))
  rows = side_by_side(prompts)
  want[5], want[1], want[7] = rows[0, :4], rows[0, 4:], rows[1, 4:]
  rows = side_by_side(chunk)
  want[2], want[3, :2] = rows[0, :4], rows[0, 4:]
  want[4, 3:], want[6], want[8, :1] = rows[1, :1], rows[1, 1:5], rows[1, 5:]
  for shard in kv.reshape(shards, 10, *kv.shape[1:]):
    tolerance = 1e-6 if dtype == "float32" else 0.02
    np.testing.assert_allclose(np.moveaxis(shard, 1, 2), want, atol=tolerance)
