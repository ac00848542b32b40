"""Compiles the decode loop of a Qwen2.5 architecture for TPUs that are not attached.

    python benchmarks/decode_aot.py [--json FILE] [--preset qwen2.5-1.5b] [--topology v5e:4x4] \\
      [--tensor 1] [--slots 64] ...

Reports the peak memory of a chip and the memory traffic of one decode step, which generates one
token for every slot. No weights are created. The lower bound of a step (`floor`) is to read every
weight, and every key and value of the completions at full length, once from the chip's memory.
It is compared with the traffic of the compiled loop: the bytes of the operands and results of its
instructions, except arrays in on-chip memory. An instruction that gathers rows of a table counts
twice the size of its result, not the size of the table.
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

from gtpo_jax.models import PRESETS, Qwen2
from gtpo_jax.models.params import abstract_params
from gtpo_jax.planning.programs import bytes_per_device, compile_with_peak
from gtpo_jax.planning.topology import topology_devices
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.params import EngineConfig, SamplingParams

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
ARRAY = re.compile(r"\b(pred|[a-z]+?)(\d*)(?:e\w+)?\[([\d,]*)\](\{[^}]*\})?")
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


def bytes_per_step(hlo: str) -> int:
  """Returns the bytes that one decode step reads from and writes to a chip's main memory."""
  moved = 0
  types = {}
  traffic = lambda type_: sum(array_bytes(type_, in_main_memory=True))
  for line in loop_body(hlo):
    match = INSTRUCTION.match(line)
    if not match:
      continue
    name, result, kind, rest = match.groups()
    types[name] = result
    if kind in MOVES_NOTHING or kind.endswith("-done"):
      continue
    arguments = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
    operands = [types[argument] for argument in arguments if argument in types]
    if kind.endswith("-start"):
      # An asynchronous copy between main and on-chip memory, of type (operand, result, ...). Only
      # one end is in main memory.
      moved += array_bytes(result)[1]
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
  parser.add_argument("--json")
  return parser.parse_args()


def main() -> None:
  args = parse_args()
  devices, chip = topology_devices(args.topology)
  shards = len(devices) // args.tensor
  slots = args.slots * shards
  c = dataclasses.replace(PRESETS[args.preset], compute_dtype="bfloat16")
  model = Qwen2(c, make_mesh(1, shards, args.tensor, devices))
  engine = Engine(
    model,
    stop=(0, 1),
    pad=0,
    max_prompt_tokens=args.prompt_len,
    max_tokens=args.tokens,
    engine_config=EngineConfig(slots=slots),
  )
  *_, (_, lowered, arguments) = engine.programs.lower(
    abstract_params(model), slots // args.group, group=args.group, sampling_params=SamplingParams()
  )
  started = time.perf_counter()
  peak, compiled = compile_with_peak(lowered, arguments)
  compile_s = time.perf_counter() - started

  params, prompt_cache, slot_cache = arguments
  kv_bytes = bytes_per_device((prompt_cache.kv, slot_cache.kv))
  # An embedding that is not tied to the head does not count: only a few of its rows are read.
  unread = 0 if c.tied else bytes_per_device(params.outer["embedding"])
  floor = bytes_per_device(params) - unread + kv_bytes
  floor_s = floor / chip.memory_bandwidth
  moved = None if compiled is None else bytes_per_step(compiled.as_text())
  result = {
    "peak_bytes": peak,
    "fits": peak <= chip.memory,
    "weights_bytes": bytes_per_device(params),
    "kv_bytes": kv_bytes,
    "floor_bytes": floor,
    "moved_bytes": moved,
    "times_the_floor": moved and moved / floor,
    "floor_ms": floor_s * 1e3,
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
