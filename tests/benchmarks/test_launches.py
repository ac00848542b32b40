"""What benchmarks/launches.py counts ahead of time, and upper bounds of it."""

import importlib.util
import sys

import launches
import pytest

needs_cuda_plugin = pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda13_plugin") is None, reason="JAX's CUDA plugin is not installed"
)
PROGRAM = """
HloModule small
%multiply (p: f32[4,8], q: f32[8,2]) -> f32[4,2] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[8,2]{1,0} parameter(1)
  ROOT %dot = f32[4,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%cut (p.1: f32[100,8], i: s32[]) -> f32[4,8] {
  %p.1 = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[4,8]{1,0} dynamic-slice(%p.1, %i, %zero), dynamic_slice_sizes={4,8}
}
%body (state: (s32[], f32[100,8], f32[8,2])) -> (s32[], f32[100,8], f32[8,2]) {
  %state = (s32[], f32[100,8]{1,0}, f32[8,2]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %x = f32[100,8]{1,0} get-tuple-element(%state), index=1
  %y = f32[8,2]{1,0} get-tuple-element(%state), index=2
  %part = f32[4,8]{1,0} fusion(%x, %n), kind=kLoop, calls=%cut
  %product = f32[4,2]{1,0} fusion(%part, %y), kind=kCustom, calls=%multiply
  ROOT %next = (s32[], f32[100,8]{1,0}, f32[8,2]{1,0}) tuple(%n, %x, %y)
}
%cond (state.1: (s32[], f32[100,8], f32[8,2])) -> pred[] {
  %state.1 = (s32[], f32[100,8]{1,0}, f32[8,2]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}
ENTRY %main (a: f32[100,8], b: f32[8,2]) -> f32[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = f32[8,2]{1,0} parameter(1)
  %start = s32[] constant(0)
  %tuple = (s32[], f32[100,8]{1,0}, f32[8,2]{1,0}) tuple(%start, %a, %b)
  %loop = (s32[], f32[100,8]{1,0}, f32[8,2]{1,0}) while(%tuple), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %result = f32[100,8]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_a_program_is_counted():
  """Five iterations of a slice of 4 x 8 and a product of 4 x 8 and 8 x 2."""
  assert launches.count_update(launches.Hlo(PROGRAM)) == {
    "product_flops": 5 * 2 * 4 * 8 * 2,
    "elementwise_launches": 5,
    "elementwise_bytes": 5 * (4 + 2 * 4 * 4 * 8),
  }


def measured(monkeypatch, *options):
  monkeypatch.setattr(sys, "argv", ["launches.py", *options])
  return launches.measure(launches.parse())


@pytest.mark.manual
@needs_cuda_plugin
def test_bounds_of_decoding(monkeypatch):
  counted = measured(monkeypatch, "--what=decode")
  assert counted["launches_per_token"] <= 260
  assert counted["logits_reads"] <= 2
  assert counted["weight_copies_bytes"] == 0


@pytest.mark.manual
@needs_cuda_plugin
@pytest.mark.parametrize(
  ("options", "flops", "nbytes", "peak"),
  [
    (["--remat=full", "--micro_batches=8"], 932e12, 1.95e12, 12.4),
    (["--remat=none", "--micro_batches=8"], 795e12, 1.50e12, 44.5),
  ],
)
def test_bounds_of_updates(monkeypatch, options, flops, nbytes, peak):
  counted = measured(monkeypatch, "--what=update", *options)
  assert counted["product_flops"] <= flops
  assert counted["elementwise_bytes"] <= nbytes
  assert counted["peak_bytes"] <= peak * 2**30


@pytest.mark.manual
@needs_cuda_plugin
def test_decoding_fits_in_the_shared_memory_of_small_gpus(monkeypatch):
  """With heads of 128 features, on a GPU that has 99 KiB for a program of the kernel's grid."""
  options = ("--what=decode", "--topology=l4:1", "--preset=qwen2.5-1.5b", "--slots=64")
  assert measured(monkeypatch, *options)["launches_per_token"] > 0
