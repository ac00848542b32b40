"""Bytes that devices send, from the text of compiled programs: of eight CPU devices, and lines as the TPU compiler writes them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from gtpo_jax.planning.collectives import collective_bytes
from gtpo_jax.runtime.mesh import make_mesh


def sent(body, x, out):
  """What one of eight devices sends, by the compiled program of `body` over the axis `fsdp`."""
  mesh = make_mesh(1, 8, 1)
  program = jax.jit(
    jax.shard_map(body, mesh=mesh, in_specs=P("fsdp"), out_specs=out, check_vma=False)
  )
  return collective_bytes(program.lower(x).compile().as_text())


def test_an_all_gather_sends_seven_eighths():
  assert sent(lambda x: jax.lax.all_gather(x, "fsdp", tiled=True), jnp.ones((64, 16)), P()) == {
    "all-gather": 64 * 16 * 4 * 7 // 8
  }


def test_an_all_reduce_sends_twice_that():
  assert sent(lambda x: jax.lax.psum(x, "fsdp"), jnp.ones((64, 16)), P()) == {
    "all-reduce": 2 * 8 * 16 * 4 * 7 // 8
  }


def test_a_scan_counts_every_turn():
  ring = functools.partial(
    jax.lax.ppermute, axis_name="fsdp", perm=[(i, (i + 1) % 8) for i in range(8)]
  )
  inner = lambda x: jax.lax.fori_loop(0, 3, lambda _, y: ring(jnp.sin(y)), x)
  body = lambda x: jax.lax.scan(lambda x, _: (inner(x), None), x, None, 5)[0]
  assert sent(body, jnp.ones((64, 16)), P("fsdp")) == {"collective-permute": 5 * 3 * 8 * 16 * 4}


def test_one_device_sends_nothing():
  assert (
    collective_bytes(jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile().as_text()) == {}
  )


def hlo(
  *lines,
  condition="%count = s32[] constant(28)\n  ROOT %lt = pred[] compare(%i, %count), direction=LT",
):
  body = "\n".join(f"  {line}" for line in lines)
  return (
    f"HloModule m\n\n%cond (p: (s32[])) -> pred[] {{\n  {condition}\n}}\n\n%fused (p: bf16[96]) -> bf16[1536] {{\n{body}\n}}\n\n"
    "%body (p: (s32[])) -> (s32[]) {\n  %f.1 = bf16[1536]{0} fusion(%p), kind=kCustom, calls=%fused\n"
    "  %f.2 = bf16[1536]{0} fusion(%p), kind=kCustom, calls=%fused\n}\n\n"
    "ENTRY %main (p: s32[]) -> s32[] {\n  %w = (s32[]) while(%t), condition=%cond, body=%body\n}\n"
  )


@pytest.mark.parametrize(
  ("line", "expected"),
  [
    (
      "%a = bf16[1536]{0:T(8,128)(2,1)} all-gather(%p), channel_id=7, replica_groups=mesh['axis_0'=16,'axis_1'=1] {'axis_0'}",
      {"all-gather": 28 * 1536 * 2 * 15 // 16},
    ),
    (
      "%a = (bf16[96]{0}, bf16[1536]{0}) all-gather-start(%p), channel_id=7, replica_groups=[4,16]<=[64]",
      {"all-gather": 28 * 1536 * 2 * 15 // 16},
    ),
    (
      "%a = f32[96]{0} reduce-scatter(%p), channel_id=7, replica_groups={{0,1,2,3}}",
      {"reduce-scatter": 28 * 96 * 4 * 3},
    ),
    (
      "%a = (f32[96]{0}, bf16[12,8]{1,0}) all-reduce(%p, %q), channel_id=7, replica_groups={{0,1}}",
      {"all-reduce": 28 * 96 * 6},
    ),
    (
      "%a = (bf16[96]{0}, bf16[96]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), channel_id=7, source_target_pairs={{0,1}}",
      {"collective-permute": 28 * 96 * 2},
    ),
  ],
)
def test_lines_of_the_tpu_compiler(line, expected):
  """Two fusions are steps of one collective, by its channel; the loop turns 28 times."""
  assert collective_bytes(hlo(line)) == expected


def test_a_loop_that_ends_by_itself_counts_once():
  line = "%a = f32[96]{0} collective-permute(%p), channel_id=7, source_target_pairs={{0,1}}"
  assert collective_bytes(hlo(line, condition="ROOT %going = pred[] and(%x, %y)")) == {
    "collective-permute": 96 * 4
  }


def test_a_kernel_whose_line_is_broken_hides_nothing():
  """The compiler breaks the line of a Pallas kernel within its metadata."""
  kernel = '%k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", kernel_metadata={\n"block": "512"\n}}, metadata={}'
  line = "%a = f32[96]{0} reduce-scatter(%p), channel_id=7, replica_groups={{0,1,2,3}}"
  assert collective_bytes(hlo(kernel, line)) == {"reduce-scatter": 28 * 96 * 4 * 3}
