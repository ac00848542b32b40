"""The decode program of a real Qwen2.5 shape, compiled for TPUs that are not here: what a chip holds, and what a token moves.

    python benchmarks/decode_aot.py [--json FILE] [--preset qwen2.5-1.5b] [--topology v5e:4x4] [--tensor 1] [--slots 64] ...

Random weights are not even made. A token's floor is every weight, and every key and value of the running completions at full length, read
once from a chip's memory. Against it stands what the compiled loop reads and writes there: operands and results of its instructions that do
not lie in on-chip memory. An instruction that gathers rows of a table counts its result alone.
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
from gtpo_jax.models.qwen2 import abstract_params
from gtpo_jax.planning.plan import compile_peak, shard_bytes
from gtpo_jax.planning.topology import topology_devices
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.filters import SamplingParams
from gtpo_jax.sampling.slots import EngineConfig

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


def in_memory(types: str) -> list[int]:
  """Bytes of each array of a type that lies in the chip's main memory."""
  return [
    math.prod(int(size) for size in dims.split(",") if size) * int(bits or 8) // 8
    for _, bits, dims, layout in ARRAY.findall(types)
    if "S(" not in (layout or "")
  ]


def bytes_a_token(hlo: str) -> int:
  """What one turn of the program's longest loop reads and writes in main memory."""
  bodies = {
    name: re.search(rf"^%{re.escape(name)} \([^\n]*\{{\n(.*?)^\}}", hlo, re.MULTILINE | re.DOTALL)[
      1
    ].splitlines()
    for name in re.findall(r" while\(.*body=%([\w.\-]+)", hlo)
  }
  types = {}
  moved = 0
  for line in max(bodies.values(), key=len):
    if not (found := INSTRUCTION.match(line)):
      continue
    name, result, kind, rest = found.groups()
    types[name] = result
    if kind in MOVES_NOTHING or kind.endswith("-done"):
      continue
    operands = [types[x] for x in re.findall(r"%([\w.\-]+)", rest.split("), ")[0]) if x in types]
    if kind.endswith("-start"):  # (operand, result, ...): what is copied crosses main memory once
      whole = [
        math.prod(int(n) for n in dims.split(",") if n) * int(bits or 8) // 8
        for _, bits, dims, _ in ARRAY.findall(result)
      ]
      moved += whole[1]
    elif "gather" in name:
      moved += 2 * sum(in_memory(result))
    else:
      moved += sum(sum(in_memory(x)) for x in [result, *operands])
  return moved


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--preset", default="qwen2.5-1.5b", choices=PRESETS)
  parser.add_argument("--topology", default="v5e:4x4")
  for name, default in {
    "tensor": 1,
    "slots": 64,
    "group": 16,
    "prompt_len": 512,
    "tokens": 1024,
  }.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--json")
  args = parser.parse_args()

  devices, chip = topology_devices(args.topology)
  shards = len(devices) // args.tensor
  c = dataclasses.replace(PRESETS[args.preset], compute_dtype="bfloat16")
  model = Qwen2(c, make_mesh(1, shards, args.tensor, devices))
  engine = Engine(
    model,
    (0, 1),
    0,
    args.prompt_len,
    args.tokens,
    engine_config=EngineConfig(slots=args.slots * shards),
  )
  prompts = args.slots * shards // args.group
  *_, (_, lowered, held) = engine.programs(
    abstract_params(model), prompts, group=args.group, sampling_params=SamplingParams()
  )
  began = time.perf_counter()
  peak, compiled = compile_peak(lowered, held)
  took = time.perf_counter() - began
  params, prompt_cache, slots = held
  kept = shard_bytes((prompt_cache.kv, slots.kv))
  table = 0 if c.tied else shard_bytes(params.outer["embedding"])  # a few of its rows are read
  floor = shard_bytes(params) - table + kept
  moved = None if compiled is None else bytes_a_token(compiled.as_text())
  result = {
    "peak_bytes": peak,
    "fits": peak <= chip.memory,
    "weights_bytes": shard_bytes(params),
    "kv_bytes": kept,
    "floor_bytes": floor,
    "moved_bytes": moved,
    "times_the_floor": moved and moved / floor,
    "floor_ms": floor / chip.bandwidth * 1e3,
    "tokens_per_s_at_the_floor": args.slots * shards / (floor / chip.bandwidth),
    "seconds_compile": took,
    "jax": jax.__version__,
  }
  result |= {name: value for name, value in vars(args).items() if name != "json"}
  for name, value in result.items():
    print(
      f"{name:<26} {value / 2**30:.3f} GiB"
      if name.endswith("_bytes") and value
      else f"{name:<26} {value:.4g}"
      if isinstance(value, float)
      else f"{name:<26} {value}"
    )
  if args.json:
    Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
  main()
