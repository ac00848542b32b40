"""Attention over full sequences: every kernel equals a full softmax, in value and gradient."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of

from gtpo_jax.models import PRESETS
from gtpo_jax.models.attention import flash, kernels
from gtpo_jax.models.attention.causal import attend_causally, attention_kind
from gtpo_jax.models.attention.flash import attend_in_blocks, balanced_queries, exchange_halves
from gtpo_jax.models.attention.kernels import attend_with_cudnn, attend_with_splash
from gtpo_jax.models.attention.sources import KV, AttentionContext, RowRanges
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import MESH_AXES, partition_spec, single_device_mesh

N = 2
G = 3
S = 150  # three blocks of 64, the last one partial
P = 21
E = 16


@functools.cache
def inputs(heads=4, kv_heads=2, prompt=True, s=S):
  rng = np.random.default_rng(0)
  array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  g, real = (G, None) if prompt else (1, jnp.arange(s) >= jnp.asarray([[[7]], [[0]]]))
  q = array(N, g, heads, s, E)
  own = KV(array(N, g, kv_heads, E, s), array(N, g, kv_heads, s, E))
  if not prompt:
    return q, AttentionContext(own, real)
  return q, AttentionContext(
    own,
    real,
    KV(array(N, 1, kv_heads, E, P), array(N, 1, kv_heads, P, E)),
    (jnp.arange(P) >= jnp.asarray([[[5]], [[0]]])) & (jnp.arange(P) < P - 1),
  )


def full_softmax(q, context):
  """Attention from all scores at once, with keys and values repeated for every query head."""
  _, g, h, s, e = q.shape
  k, v, segment = context.concatenate(g)
  k, v = (jnp.repeat(x, h // x.shape[2], axis=2) for x in (k, v))
  prompt_length = k.shape[3] - s
  visible = jnp.arange(prompt_length + s) <= prompt_length + jnp.arange(s)[:, None]
  visible = (
    visible
    & (segment[:, :, None, None] == segment[:, :, None, -s:, None])
    & (segment > 0)[:, :, None, None]
  )
  scores = jnp.einsum("nghse,nghte->nghst", q, k, precision="highest") / e**0.5
  return jnp.einsum(
    "nghst,nghte->nghse", jax.nn.softmax(jnp.where(visible, scores, -1e30)), v, precision="highest"
  )


def value_and_gradient(attend, q, context):
  """The outputs of unmasked queries, and the gradient of a weighted sum of them in all inputs."""
  real = True if context.own_mask is None else context.own_mask[:, :, None, :, None]
  if context.segment is not None:
    real = (context.segment < 2)[:, :, None, :, None]
  weights = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

  def loss(q, own, prompt):
    out = jnp.where(real, attend(q, context._replace(own=own, prompt=prompt)), 0)
    return (out * weights).sum(), out

  (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(
    q, context.own, context.prompt
  )
  return out, *jax.tree.leaves(grads)


@functools.cache
def expected(make, **options):
  """What `value_and_gradient` returns for the full softmax of the inputs that `make` returns."""
  return value_and_gradient(full_softmax, *make(**options))


def assert_same(attend, make, **options):
  got_arrays = value_and_gradient(attend, *make(**options))
  for got, want in zip(got_arrays, expected(make, **options), strict=True):
    assert np.abs(want).max() > 0.3
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
  "attend",
  [
    functools.partial(attend_in_blocks, precision="highest"),
    functools.partial(attend_with_splash, interpret=True),
    functools.partial(attend_with_cudnn, implementation="xla"),
  ],
  ids=["blocks", "splash", "cudnn"],
)
@pytest.mark.some(3)
def test_every_kernel_equals_the_full_softmax(attend, prompt):
  assert_same(attend, inputs, prompt=prompt)


@functools.cache
def in_two_segments(s=S):
  """Rows of two completions, each a segment of its own. The second row is padded on the right."""
  q, context = inputs(s=s)
  positions = jnp.arange(s)
  ends = jnp.asarray([[s // 3, s], [s // 2, s - 9], [5, s]])
  segment = jnp.broadcast_to((positions >= ends[..., None]).sum(1), (N, G, s))
  # Completion 2 i + j is segment j of row i; the third segment is padding.
  starts = jnp.pad(ends[:, :-1], [(0, 0), (1, 0)])
  ranges = RowRanges(
    *(
      jnp.broadcast_to(x.reshape(-1), (N, 2 * G))
      for x in (starts + s * jnp.arange(G)[:, None], ends - starts)
    ),
    jnp.where(segment < 2, 2 * jnp.arange(G)[:, None] + segment, -1),
  )
  return q, context._replace(
    prompt_mask=jnp.repeat(context.prompt_mask, 2, axis=1), segment=segment, ranges=ranges
  )


@pytest.mark.parametrize(
  "attend",
  [
    functools.partial(attend_in_blocks, precision="highest"),
    functools.partial(attend_with_splash, interpret=True),
    functools.partial(attend_with_cudnn, implementation="xla"),
  ],
  ids=["blocks", "splash", "cudnn"],
)
def test_segments_attend_to_the_prompt_and_to_themselves(attend):
  assert_same(attend, in_two_segments)
  q, context = in_two_segments()
  alone = context._replace(
    own=jax.tree.map(lambda x: x[:, 1:2], context.own),
    prompt_mask=context.prompt_mask[:, :1],
    segment=None,
    ranges=None,
  )
  cut = alone._replace(
    own=KV(alone.own.k[..., S // 2 : S - 9], alone.own.v[..., S // 2 : S - 9, :])
  )
  attend = jax.jit(attend)
  np.testing.assert_allclose(
    attend(q, context)[:, 1:2, :, S // 2 : S - 9],
    attend(q[:, 1:2, :, S // 2 : S - 9], cut),
    rtol=1e-5,
    atol=2e-5,
  )


@pytest.mark.devices
@pytest.mark.parametrize(
  ("heads", "kv_heads", "shape"),
  [(8, 4, (2, 1, 1, 4)), (8, 2, (1, 2, 1, 4)), (24, 3, (1, 1, 1, 8)), (6, 2, (2, 1, 1, 1))],
)
@pytest.mark.some(1, slow=1)
def test_heads_on_a_mesh(heads, kv_heads, shape):
  """The tensor axis divides the key/value heads, or there are fewer, or two shards share one."""
  config = dataclasses.replace(
    PRESETS["tiny"], heads=heads, kv_heads=kv_heads, matmul_precision="highest"
  )
  mesh = mesh_of(*shape)
  attend = functools.partial(attend_causally, config, mesh)
  assert_same(attend, inputs, heads=heads, kv_heads=kv_heads, s=70)


@pytest.mark.devices
@pytest.mark.parametrize(("kind", "loop"), [("blocks", False), ("blocks", True), ("splash", False)])
@pytest.mark.some(1, slow=1)
def test_positions_on_a_mesh(kind, loop, monkeypatch):
  """Each shard has its part of the queries, and gathers the keys of all positions."""
  if loop:
    monkeypatch.setattr(flash, "MAX_UNROLLED_POSITIONS", 16)
    monkeypatch.setattr(flash, "LOOP_BLOCK", 32)
  config = dataclasses.replace(
    PRESETS["tiny"], attention=kind, matmul_precision="highest" if kind == "blocks" else "default"
  )
  attend = functools.partial(attend_causally, config, mesh_of(1, 1, 3, 2))
  assert_same(attend, inputs)
  assert_same(attend, in_two_segments)
  if not loop:
    assert_same(attend, inputs, s=153, prompt=False)  # an odd number per shard cannot be halved


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize("s", [pytest.param(786, marks=pytest.mark.manual), 783])
def test_shards_of_several_blocks(s, monkeypatch):
  """A shard's queries, balanced and contiguous, take three of the kernel's blocks."""
  monkeypatch.setattr(kernels, "LARGEST_BLOCK", 128)
  config = dataclasses.replace(PRESETS["tiny"], attention="splash")
  attend = functools.partial(attend_causally, config, mesh_of(1, 1, 3, 1))
  assert_same(attend, inputs, s=s)
  assert_same(attend, in_two_segments, s=s)


@pytest.mark.devices
@pytest.mark.parametrize("shards", [2, 3, 4, 5])
def test_balanced_queries_have_equally_many_keys_and_return(shards):
  mesh = mesh_of(1, 1, shards, 1)
  s = 4 * shards
  by_shard = []
  spec = partition_spec((None, None, None, "position"))

  def there_and_back(x):
    balanced = balanced_queries(s, shards)
    by_shard.append(balanced.positions)
    moved = exchange_halves(x, shards)
    own = jnp.asarray(balanced.positions)[balanced.index]
    return moved, own[None, None, None, :, None], exchange_halves(moved, shards)

  positions = jnp.arange(s).reshape(1, 1, 1, s, 1)
  mapped = jax.shard_map(there_and_back, mesh=mesh, in_specs=spec, out_specs=(spec,) * 3)
  moved, own, back = jax.jit(mapped)(positions)
  np.testing.assert_array_equal(moved, own)
  np.testing.assert_array_equal(back, positions)
  assert sorted(by_shard[0].ravel()) == list(range(s))
  assert set(by_shard[0].sum(1)) == {s * (s - 1) // 2 // shards}


@pytest.mark.devices
def test_positions_that_do_not_divide_are_on_every_shard():
  config = dataclasses.replace(PRESETS["tiny"], matmul_precision="highest")
  attend = functools.partial(attend_causally, config, mesh_of(1, 2, 4, 1))
  assert_same(attend, inputs, s=70)


@pytest.mark.devices
def test_rows_that_do_not_divide_are_on_every_device():
  config = dataclasses.replace(PRESETS["tiny"], matmul_precision="highest")
  attend = functools.partial(attend_causally, config, mesh_of(8, 1, 1, 1))
  assert_same(attend, inputs, s=9)


def test_no_buffer_of_positions_by_positions():
  """Temporary memory is linear in the length, and no array of the program has two axes of it."""

  def compiled(attend, s):
    q, context = inputs(s=s)
    program = (
      jax.jit(jax.grad(lambda q, own: attend(q, context._replace(own=own)).sum(), argnums=(0, 1)))
      .lower(q, context.own)
      .compile()
    )
    return program.as_text(), program.memory_analysis().temp_size_in_bytes

  twice = re.compile(r",(1500|1520|3000|3020),(1500|1520|3000|3020)\]")
  assert twice.search(compiled(full_softmax, 1500)[0])  # the pattern matches
  (text, small) = compiled(attend_in_blocks, 1500)
  (longer, large) = compiled(attend_in_blocks, 3000)
  assert not twice.search(text) and not twice.search(longer)
  assert large < 2.2 * small


def test_the_loop_equals_unrolled_blocks(monkeypatch):
  monkeypatch.setattr(flash, "MAX_UNROLLED_POSITIONS", 64)
  attend = functools.partial(attend_in_blocks, precision="highest")
  assert_same(attend, inputs, s=300)
  assert_same(attend, in_two_segments, s=300)


@pytest.mark.devices
def test_the_kind_follows_the_platform():
  tiny = PRESETS["tiny"]
  mesh = single_device_mesh()
  assert attention_kind(tiny, mesh) == "blocks"
  assert attention_kind(dataclasses.replace(tiny, attention="splash"), mesh) == "splash"
  rejection = (
    r"model\.attention = 'cudnn' does not run on cpu with compute_dtype float32.*use 'blocks'"
  )
  with pytest.raises(UserError, match=rejection):
    attention_kind(dataclasses.replace(tiny, attention="cudnn"), mesh)
  wide = mesh_of(2, 2, 2, 1)
  with pytest.raises(UserError, match=r"'cudnn' does not run on cpu with .*mesh\.context 2"):
    attention_kind(dataclasses.replace(tiny, attention="cudnn", compute_dtype="bfloat16"), wide)
  with pytest.raises(
    UserError, match=r"'splash' does not run on cpu with .*matmul_precision highest"
  ):
    attention_kind(dataclasses.replace(tiny, attention="splash", matmul_precision="highest"), mesh)
  with pytest.raises(
    UserError, match=r"model\.attention must be one of blocks, splash, cudnn; got 'flash'"
  ):
    dataclasses.replace(tiny, attention="flash")


def unattached_mesh(platform, kind, capability=None):
  """Stands for a mesh of one device that is not attached."""
  device = types.SimpleNamespace(
    platform=platform, device_kind=kind, compute_capability=capability, process_index=0
  )
  return types.SimpleNamespace(
    devices=np.asarray([device], object), shape=dict.fromkeys(MESH_AXES, 1)
  )


@pytest.mark.parametrize(
  ("kind", "capability", "changes", "expected"),
  [
    ("NVIDIA H100 80GB HBM3", "9.0", {"compute_dtype": "bfloat16"}, "cudnn"),
    ("NVIDIA A100-SXM4-80GB", "8.0", {"compute_dtype": "float16"}, "cudnn"),
    ("NVIDIA A100-SXM4-80GB", "8.0", {"compute_dtype": "float32"}, "blocks"),
    ("NVIDIA H100 80GB HBM3", "9.0", {"compute_dtype": "bfloat16", "head_dim": 256}, "blocks"),
    ("Tesla T4", "7.5", {"compute_dtype": "float16"}, "blocks"),
    ("Tesla T4", "7.5", {"compute_dtype": "float32"}, "blocks"),
  ],
)
def test_the_kernel_follows_the_compute_capability(kind, capability, changes, expected):
  config = dataclasses.replace(PRESETS["tiny"], **changes)
  assert attention_kind(config, unattached_mesh("gpu", kind, capability)) == expected


def test_a_gpu_without_bfloat16_units_is_refused():
  config = dataclasses.replace(PRESETS["tiny"], compute_dtype="bfloat16")
  with pytest.raises(UserError, match=r"T4 has no bfloat16 .*dtype=float16, which auto chooses"):
    attention_kind(config, unattached_mesh("gpu", "Tesla T4", "7.5"))


@pytest.mark.parametrize(
  ("length", "block"), [(1, 128), (128, 128), (700, 768), (1024, 1024), (1025, 640), (2176, 768)]
)
def test_splash_divides_a_length_into_few_blocks(length, block):
  assert kernels._block(length) == block
