"""The bytes sent by programs for eight CPU devices, and by lines from the TPU compiler."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from plan_cases import collective_bytes

from gtpo_jax.cli.planning.collectives import Collective, collectives, send_seconds
from gtpo_jax.runtime.chips import CHIPS

pytestmark = pytest.mark.devices

ONES = jnp.ones((64, 16))


def sent(body, out_specs):
  """The bytes that one of eight devices sends in `body` over the fsdp axis."""
  sharded = jax.shard_map(
    body, mesh=mesh_of(1, 8, 1, 1), in_specs=P("fsdp"), out_specs=out_specs, check_vma=False
  )
  return collective_bytes(jax.jit(sharded).lower(ONES).compile().as_text())


def test_an_all_gather_sends_seven_eighths():
  gather = lambda x: jax.lax.all_gather(x, "fsdp", tiled=True)
  assert sent(gather, P()) == {"all-gather": 64 * 16 * 4 * 7 // 8}


def test_an_all_reduce_sends_twice_that():
  reduce = lambda x: jax.lax.psum(x, "fsdp")
  assert sent(reduce, P()) == {"all-reduce": 2 * 8 * 16 * 4 * 7 // 8}


def test_a_scan_counts_every_iteration():
  ring = functools.partial(
    jax.lax.ppermute, axis_name="fsdp", perm=[(i, (i + 1) % 8) for i in range(8)]
  )
  inner = lambda x: jax.lax.fori_loop(0, 3, lambda _, y: ring(jnp.sin(y)), x)
  body = lambda x: jax.lax.scan(lambda x, _: (inner(x), None), x, None, 5)[0]
  assert sent(body, P("fsdp")) == {"collective-permute": 5 * 3 * 8 * 16 * 4}


def test_one_device_sends_nothing():
  program = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
  assert collective_bytes(program.as_text()) == {}


COUNTED_LOOP = """%count = s32[] constant(28)
  ROOT %lt = pred[] compare(%i, %count), direction=LT"""


def hlo(*lines, condition=COUNTED_LOOP):
  """A program that runs two fusions of these lines in a loop."""
  fusion_body = "\n".join(f"  {line}" for line in lines)
  return f"""HloModule m

%cond (p: (s32[])) -> pred[] {{
  {condition}
}}

%fused (p: bf16[96]) -> bf16[1536] {{
{fusion_body}
}}

%body (p: (s32[])) -> (s32[]) {{
  %f.1 = bf16[1536]{{0}} fusion(%p), kind=kCustom, calls=%fused
  %f.2 = bf16[1536]{{0}} fusion(%p), kind=kCustom, calls=%fused
}}

ENTRY %main (p: s32[]) -> s32[] {{
  %w = (s32[]) while(%t), condition=%cond, body=%body
}}
"""


@pytest.mark.parametrize(
  ("line", "expected"),
  [
    (
      "%a = bf16[1536]{0:T(8,128)(2,1)} all-gather(%p), channel_id=7, "
      "replica_groups=mesh['axis_0'=16,'axis_1'=1] {'axis_0'}",
      {"all-gather": 28 * 1536 * 2 * 15 // 16},
    ),
    (
      "%a = (bf16[96]{0}, bf16[1536]{0}) all-gather-start(%p), channel_id=7, "
      "replica_groups=[4,16]<=[64]",
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
      "%a = (bf16[96]{0}, bf16[96]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), "
      "channel_id=7, source_target_pairs={{0,1}}",
      {"collective-permute": 28 * 96 * 2},
    ),
  ],
)
def test_lines_of_the_tpu_compiler(line, expected):
  """The two fusions have one channel id, so they are one collective; the loop runs 28 times."""
  assert collective_bytes(hlo(line)) == expected


def test_a_loop_without_a_known_trip_count_counts_once():
  line = "%a = f32[96]{0} collective-permute(%p), channel_id=7, source_target_pairs={{0,1}}"
  program = hlo(line, condition="ROOT %going = pred[] and(%x, %y)")
  assert collective_bytes(program) == {"collective-permute": 96 * 4}


def test_a_condition_may_be_a_fusion():
  """The GPU compiler fuses the comparison, and drops its annotation from some loops."""
  line = "%a = f32[96]{0} collective-permute(%p), channel_id=7, source_target_pairs={{0,1}}"
  fused = f"%fused_compare (p: s32[]) -> pred[] {{\n  {COUNTED_LOOP}\n}}\n\n"
  condition = "ROOT %c = pred[] fusion(%i), kind=kLoop, calls=%fused_compare"
  program = hlo(line, condition=condition).replace("%cond (", fused + "%cond (", 1)
  assert collective_bytes(program) == {"collective-permute": 28 * 96 * 4}


def test_a_computation_of_a_sparse_core_ends_where_it_ends():
  """The compiler names the thread that runs it after the closing brace (v5p)."""
  line = "%a = f32[96]{0} collective-permute(%p), channel_id=7, source_target_pairs={{0,1}}"
  sparse = '%scatter (p: s32[]) -> s32[] {\n  %p = s32[] parameter(0)\n}, execution_thread="sc"\n\n'
  program = hlo(line).replace("%fused (", sparse + "%fused (", 1)
  assert collective_bytes(program) == {"collective-permute": 28 * 96 * 4}


def test_a_line_break_within_a_kernel_hides_nothing():
  """The compiler breaks the line of a Pallas kernel within its metadata."""
  kernel = (
    '%k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", kernel_metadata={\n'
    '"block": "512"\n'
    "}}, metadata={}"
  )
  line = "%a = f32[96]{0} reduce-scatter(%p), channel_id=7, replica_groups={{0,1,2,3}}"
  assert collective_bytes(hlo(kernel, line)) == {"reduce-scatter": 28 * 96 * 4 * 3}


@pytest.mark.parametrize(
  ("groups", "expected"),
  [
    ("replica_groups={{0,2},{1,3}}", (0, 2)),
    ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4)),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", (0, 1, 4, 5)),
  ],
)
def test_the_first_group_of_devices(groups, expected):
  (collective,) = collectives(hlo(f"%a = f32[96]{{0}} all-reduce(%p), channel_id=7, {groups}"))
  assert collective.group == expected


def test_seconds_on_two_nodes_by_hand():
  """H100: 450 GB/s within a node; 50 GB/s for each of a group's four devices in a node."""
  chip = CHIPS["h100"]
  nodes = [0] * 8 + [1] * 8
  within = Collective("all-gather", 9e12, tuple(range(8)))
  between = Collective("all-gather", 4e12, (0, 2, 4, 6, 8, 10, 12, 14))
  assert send_seconds([within], chip, nodes) == pytest.approx(20)
  assert send_seconds([between], chip, nodes) == pytest.approx(20)
  assert send_seconds([within, between, between], chip, nodes) == pytest.approx(40)
  assert send_seconds([within, between], chip, [0] * 16) == pytest.approx(13 / 0.45)
