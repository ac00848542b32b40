"""The paged kernel and the writing of pages, compiled for TPUs that are not attached."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from plan_cases import needs_libtpu
from toys import TOY

from gtpo_jax.cli.planning.topology import compile_deviceless, topology_devices
from gtpo_jax.models import Transformer
from gtpo_jax.models.attention.sources import KV
from gtpo_jax.models.kinds import LayerKind
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.sampling.paged.cache import PagedCache
from gtpo_jax.sampling.paged.tables import PageRows, PageTables

SLOTS = 64
PAGES = 500
PAGE = 128
GEMMA3 = {"model_type": "gemma3_text", "biases": (), "kinds": (LayerKind(1024, rope_theta=1e4),)}


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
  ("topology", "heads", "kv_heads", "head_dim", "dtype", "family"),
  [
    ("v5e:1x1", 14, 2, 64, "int8", {}),
    pytest.param("v5p:2x2x1", 28, 4, 128, "bfloat16", {}, marks=pytest.mark.manual),
    ("v5e:1x1", 8, 4, 256, "bfloat16", GEMMA3),
  ],
)
def test_a_step_and_the_writing_of_a_chunk_compile_without_a_loop(
  topology, heads, kv_heads, head_dim, dtype, family
):
  devices, _ = topology_devices(topology)
  mesh = make_mesh(data=1, fsdp=-1, devices=devices)
  sizes = {"layers": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
  config = dataclasses.replace(TOY, **sizes, compute_dtype="bfloat16", **family)
  model = Transformer(config, mesh)
  cache = PagedCache(model, dtype, PAGE, "pallas")
  shards = len(devices)
  sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))

  def array(kind, rows, *shape):
    return jax.ShapeDtypeStruct((shards * rows, *shape), kind, sharding=sharding)

  integers = lambda *shape: array(jnp.int32, *shape)
  rows = lambda width, pages: PageRows(
    integers(1), integers(SLOTS, width), integers(SLOTS, pages), integers(SLOTS), integers(SLOTS)
  )
  tables = PageTables(rows(16, 4), rows(1, 16), rows(1, 1), integers(SLOTS, 2), integers(SLOTS))
  like = lambda x: array(x.dtype, x.shape[0] // shards, *x.shape[1:])
  kv = jax.tree.map(like, jax.eval_shape(lambda: cache.zeros(shards * PAGES)))
  chunk = jax.tree.map(like, jax.eval_shape(lambda: cache.zero_chunk(shards * SLOTS, 64)))
  new = KV(
    array(jnp.bfloat16, SLOTS, 1, kv_heads, head_dim, 1),
    array(jnp.bfloat16, SLOTS, 1, kv_heads, 1, head_dim),
  )
  q = array(jnp.bfloat16, SLOTS, 1, heads, 1, head_dim)
  rope = (array(jnp.float32, SLOTS, 1, 64, head_dim // 2),) * 2

  def attend(kv, tables, chunk, q, new, rope, step):
    ropes = {config.kinds[0].rope_theta or 0.0: rope}
    return cache.attention(kv, tables, None, ropes)(0, q, new, chunk[0], step)

  step = jax.ShapeDtypeStruct((), jnp.int32)
  attended = jax.jit(attend).lower(kv, tables, chunk, q, new, rope, step)
  written = jax.jit(cache.append, donate_argnums=0).lower(kv, chunk, tables, integers(SLOTS))
  programs = [compile_deviceless(lowered, devices).as_text() for lowered in (attended, written)]
  assert re.findall(r'custom_call_target="tpu_custom_call"', programs[0])
  for program in programs:
    assert " while(" not in program
    assert not re.search(r" (all-gather|all-reduce|collective-permute)(-start)?\(", program)
