"""Compiles the decode loop of a Qwen2.5 architecture for TPUs or GPUs that are not attached.

    python benchmarks/decode_aot.py [--json FILE] [--preset qwen2.5-1.5b] [--topology v5e:4x4] \\
      [--tensor 1] [--slots 64] ...

Reports the peak memory of a device and the memory traffic of one decode step, which generates one
token for every slot. No weights are created. The lower bound of a step (`floor`) is to read every
weight, and every key and value of the completions at full length and of one prompt per group, once
from the device's memory. It is compared with the traffic of the compiled loop: the bytes of the
operands and results of its instructions, except arrays in on-chip memory. An instruction that
gathers rows of a table counts twice the size of its result, not the size of the table. One that
changes a slice of an array counts twice the slice: the loop's arrays are changed in place. The
branches that only greedy sampling and temperatures other than 1 take are not counted. The kernel
of paged attention counts the pages that it reads, not the pool. The steps of a TPU kernel's grid
take `GRID_STEP` each besides.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import time
from pathlib import Path

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

import jax

from gtpo_jax.models import PRESETS, Transformer
from gtpo_jax.models.params import abstract_params
from gtpo_jax.planning.compile import compile_with_peak
from gtpo_jax.planning.topology import compile_deviceless, topology_devices
from gtpo_jax.runtime.chips import cores_of
from gtpo_jax.runtime.mesh import bytes_per_device, make_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.inventory import Workload
from gtpo_jax.sampling.programs import abstract_decode_params
from gtpo_jax.sampling.settings import Demand, EngineConfig, SamplingParams

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
ARRAY = re.compile(r"\b(pred|[a-z]+?)(\d*)(?:e\w+)?\[([\d,]*)\](\{[^}]*\})?")
GRID_STEP = 0.35e-6  # seconds that a step of a kernel's grid takes on a TPU, whatever it does
MOVES_NOTHING = {
  "parameter",
  "get-tuple-element",
  "tuple",
  "bitcast",
  "constant",
  "iota",
  "after-all",
  "partition-id",
  "while",
}


def array_bytes(types: str, in_main_memory: bool = False) -> list[int]:
  """Returns the bytes of each array in an HLO type, optionally only of arrays in main memory."""
  return [
    math.prod(int(size) for size in dims.split(",") if size) * int(bits or 8) // 8
    for _, bits, dims, layout in ARRAY.findall(types)
    if not (in_main_memory and "S(" in (layout or ""))
  ]


def loop_body(hlo: str) -> list[str]:
  """Returns the lines of the longest loop body in the program, the decode step."""
  bodies = []
  for name in re.findall(r" while\(.*body=%([\w.\-]+)", hlo):
    pattern = rf"^%{re.escape(name)} \([^\n]*\{{\n(.*?)^\}}"
    bodies.append(re.search(pattern, hlo, re.MULTILINE | re.DOTALL)[1].splitlines())
  return max(bodies, key=len)


def bytes_per_step(hlo: str, pools: set[int], pages_read: float) -> float:
  """Returns the bytes that one decode step reads from and writes to a device's main memory.

  Args:
    hlo: the compiled decode program.
    pools: the bytes of each layer's pool of pages (and of its scales), on one device.
    pages_read: the bytes of the pages that one call of the kernel reads.
  """
  moved = 0.0
  types = {}
  traffic = lambda type_: sum(array_bytes(type_, in_main_memory=True))
  for line in loop_body(hlo):
    match = INSTRUCTION.match(line)
    if not match:
      continue
    name, result, kind, rest = match.groups()
    types[name] = result
    if kind in MOVES_NOTHING or kind.endswith("-done") or "ConcatBitcast" in rest:
      continue
    arguments = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
    operands = [types[argument] for argument in arguments if argument in types]
    if kind.endswith("-start"):
      # An asynchronous copy between main and on-chip memory, of type (operand, result, ...). Only
      # one end is in main memory. A GPU's collective has one type, for operand and result.
      arrays = array_bytes(result)
      moved += arrays[1] if len(arrays) > 1 else 2 * arrays[0]
    elif kind == "custom-call" and any(sum(array_bytes(x)) in pools for x in operands):
      others = [x for x in operands if sum(array_bytes(x)) not in pools]
      moved += pages_read + sum(traffic(type_) for type_ in [result, *others])
    elif kind == "conditional":
      moved += traffic(result)
    elif kind == "dynamic-update-slice" or "dynamic_update_slice" in name:
      moved += 2 * sum(traffic(type_) for type_ in operands if type_ != result)
    elif "gather" in name:
      moved += 2 * traffic(result)
    else:
      moved += sum(traffic(type_) for type_ in [result, *operands])
  return moved


def print_result(result: dict[str, object]) -> None:
  for name, value in result.items():
    if name.endswith("_bytes") and value:
      print(f"{name:<26} {value / 2**30:.3f} GiB")
    elif isinstance(value, float):
      print(f"{name:<26} {value:.4g}")
    else:
      print(f"{name:<26} {value}")


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--preset", default="qwen2.5-1.5b", choices=PRESETS)
  parser.add_argument("--topology", default="v5e:4x4")
  sizes = {"tensor": 1, "slots": 64, "group": 16, "prompt_len": 512, "tokens": 1024}
  for name, default in sizes.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--kv_dtype", default="")
  parser.add_argument("--weights_dtype", default="")
  parser.add_argument("--json")
  return parser.parse_args()


def main() -> None:
  args = parse_args()
  devices, chip = topology_devices(args.topology)
  shards = len(devices) // args.tensor
  slots = args.slots * shards
  c = dataclasses.replace(PRESETS[args.preset], compute_dtype="bfloat16")
  model = Transformer(c, make_mesh(data=1, fsdp=shards, tensor=args.tensor, devices=devices))
  engine = Engine(
    model,
    stop=(0, 1),
    pad=0,
    max_prompt_tokens=args.prompt_len,
    max_tokens=args.tokens,
    engine_config=EngineConfig(
      slots=slots, kv_dtype=args.kv_dtype, weights_dtype=args.weights_dtype
    ),
    demand=Demand(slots, args.group),
  )
  programs = engine.programs
  stored = abstract_params(model)
  layout = compile_deviceless(programs.layout.lower(stored), devices)
  params = abstract_decode_params(programs, stored, layout)
  workload = Workload(slots // args.group, args.group, SamplingParams())
  decode = next(x for x in programs.inventory(workload) if x.kind == "decode")
  lowered = decode.lower(params)
  started = time.perf_counter()
  peak, compiled = compile_with_peak(lowered, decode.in_memory(params))
  compile_s = time.perf_counter() - started

  state = programs.abstract_state(workload)
  pools = {bytes_per_device(x) for x in jax.tree.leaves(state.kv)}
  layer_pages = bytes_per_device(state.kv[0])
  page_bytes = layer_pages / programs.pool.pages
  position_bytes = c.layers * page_bytes / programs.pool.page
  kv_bytes = args.slots * (args.tokens + args.prompt_len / args.group) * position_bytes
  # A row of the kernel reads a prompt for at most so many slots.
  rows = args.slots / min(args.group, programs.pool.slots_per_row)
  pages = args.slots * programs.pool.completion_pages + rows * programs.pool.prompt_pages
  # An embedding that is not tied to the head does not count: only a few of its rows are read.
  unread = 0 if c.tied else bytes_per_device(params.outer["embedding"])
  floor = bytes_per_device(params) - unread + kv_bytes
  floor_s = floor / chip.memory_bandwidth
  pages_read = pages * page_bytes
  moved = compiled and bytes_per_step(compiled.as_text(), pools, pages_read)
  grid_steps = cores_of(devices[0]) * c.layers if programs.config.attention == "pallas" else 0
  result = {
    "peak_bytes": peak,
    "fits": peak <= chip.memory,
    "weights_bytes": bytes_per_device(params),
    "kv_bytes": kv_bytes,
    "floor_bytes": floor,
    "moved_bytes": moved,
    "times_the_floor": moved and moved / floor,
    "floor_ms": floor_s * 1e3,
    "grid_overhead_ms": grid_steps * GRID_STEP * 1e3,
    "tokens_per_s_at_the_floor": slots / floor_s,
    "seconds_compile": compile_s,
    "jax": jax.__version__,
  }
  result |= {name: value for name, value in vars(args).items() if name != "json"}
  print_result(result)
  if args.json:
    Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
  main()
