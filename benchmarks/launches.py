"""Counts what a GPU launches, reads and multiplies in decoding and updates, without a GPU.

    python benchmarks/launches.py --what decode [--preset qwen2.5-0.5b] [--topology h100:1] \\
      [--slots 256] [--json FILE]
    python benchmarks/launches.py --what update [--remat none] [--micro_batches 8] [--json FILE]

It compiles a program ahead of time, as `gtpo plan` does, with the extra plan-gpu. A launch is an
instruction that runs on the device. It counts once for every iteration of its loop, and not at all
in a branch. An instruction moves the bytes that it must read and write; if it slices an array, only
the slice counts. Nothing is autotuned ahead of time, so a GPU may use other kernels for matrix
products. For Qwen2.5-0.5B, an H100 launched 440 kernels a token where 449 were counted, and needed
12.3 GiB where the compiler said 12.30.
"""

from __future__ import annotations

import argparse
import collections
import math
import re
from typing import Any, NamedTuple

from measuring import show, store

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

from gtpo_jax.cli.planning.run_programs import RunPrograms, build_model
from gtpo_jax.cli.planning.topology import topology_devices, without_compile_cache
from gtpo_jax.config import default_config, freeze

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
ARRAY = re.compile(r"\b(pred|[a-z]+?)(\d*)(?:e\w+)?\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
TRIPS = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
# Instructions that only name, group or order arrays.
NO_LAUNCH = {
  "parameter",
  "get-tuple-element",
  "tuple",
  "bitcast",
  "constant",
  "after-all",
  "partition-id",
  "while",
  "conditional",
  "call",
  "opt-barrier",
  "replica-id",
  "add-dependency",
}
SLICES = ("dynamic-slice", "gather", "slice")


class Instruction(NamedTuple):
  """One line of an optimised program."""

  name: str
  shape: str
  op: str
  rest: str  # the operands and attributes

  @property
  def operands(self) -> list[str]:
    """The names of the operands."""
    return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

  @property
  def called(self) -> str:
    """The computation that a fusion or a call consists of, or ""."""
    found = CALLED.search(self.rest)
    return found[1] if found else ""


class Hlo:
  """An optimised program: its computations, and how often each runs.

  Attributes:
    computations: the instructions of each, by name.
    trips: how often the entry and the bodies of loops run; an unknown number counts as 1.
  """

  def __init__(self, text: str):
    """Parses the text of a compiled program."""
    self.computations: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
      if not name:
        if found := COMPUTATION.match(line):
          name = found[2]
          self.computations[name] = []
          entry = name if found[1] else entry
      elif line.startswith("}"):
        name = ""
      elif found := INSTRUCTION.match(line):
        self.computations[name].append(Instruction(*found.groups()))
    self.trips = {entry: 1}
    order = [entry]
    for computation in order:
      for x in self.computations[computation]:
        if x.op == "while":
          body = re.search(r"body=%?([\w.\-]+)", x.rest)[1]
          count = TRIPS.search(x.rest)
          self.trips[body] = self.trips[computation] * (int(count[1]) if count else 1)
          order.append(body)

  def launches(self, computation: str) -> list[Instruction]:
    """Returns the instructions of a computation that a device runs."""
    return [
      x
      for x in self.computations[computation]
      if x.op not in NO_LAUNCH and not x.op.endswith("-done")
    ]

  def product_flops(self, computation: str) -> int:
    """Returns the FLOP of the matrix products in a computation and in all that it calls."""
    shapes = {x.name: x.shape for x in self.computations[computation]}
    total = 0
    for x in self.computations[computation]:
      contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.rest)
      if x.op == "dot" and contracted:
        left = _dimensions(shapes[x.operands[0]])
        inner = math.prod(left[int(i)] for i in contracted[1].split(","))
        total += 2 * inner * math.prod(_dimensions(x.shape))
      if x.called in self.computations:
        total += self.product_flops(x.called)
    return total

  def moved_bytes(self, computation: str, x: Instruction) -> int:
    """Returns the bytes that an instruction of a computation must read and write."""
    shapes = {y.name: y.shape for y in self.computations[computation]}
    full = [_nbytes(shapes.get(name, "")) for name in x.operands]
    inside = self.computations.get(x.called, []) if x.op == "fusion" else []
    written = _nbytes(x.shape)
    updates = [y for y in inside if y.op == "dynamic-update-slice"]
    if updates:  # in place: only the new part is written
      inner = {y.name: y.shape for y in inside}
      written -= sum(_nbytes(y.shape) for y in updates)
      written = max(written, 0) + sum(_nbytes(inner[y.operands[1]]) for y in updates)
    return written + sum(
      min(size, self._read_bytes(inside, i, size)) for i, size in enumerate(full)
    )

  def _read_bytes(self, inside: list[Instruction], index: int, full: int) -> int:
    """Returns the bytes that a fusion reads of an operand of `full` bytes."""
    parameter = next(
      (x.name for x in inside if x.op == "parameter" and x.rest.startswith(f"{index})")), None
    )
    if parameter is None:
      return full
    uses = _uses(inside, parameter)
    if not uses or not all(
      x.op in SLICES or (x.op == "dynamic-update-slice" and at == 0) for x, at in uses
    ):
      return full
    return sum(_nbytes(x.shape) for x, _ in uses if x.op in SLICES)


def _uses(inside: list[Instruction], name: str) -> list[tuple[Instruction, int]]:
  """Returns the instructions that use a value, past bitcasts, and which operand it is."""
  found = []
  for x in inside:
    if x.op == "parameter":
      continue
    for at, operand in enumerate(x.operands):
      if operand == name:
        found += _uses(inside, x.name) if x.op in ("bitcast", "reshape") else [(x, at)]
  return found


def _dimensions(shape: str) -> list[int]:
  return [int(x) for x in ARRAY.search(shape)[3].split(",") if x]


def _nbytes(shapes: str) -> int:
  return sum(
    math.prod(int(x) for x in sizes.split(",") if x) * max(int(bits or 8), 8) // 8
    for _, bits, sizes in ARRAY.findall(shapes)
  )


def count_decode(hlo: Hlo, layers: int, logits: int, weights: set[int]) -> dict[str, Any]:
  """Counts one token of all slots.

  Args:
    hlo: the program of a chunk. Its largest loop is that over tokens.
    layers: of the model.
    logits: the bytes of the logits of all slots.
    weights: the bytes of the layers' matrices, and of what a compiler may join them to.
  """
  body = max(hlo.trips, key=lambda name: len(hlo.launches(name)))
  launches = hlo.launches(body)
  kinds = collections.Counter(_kind(hlo, x) for x in launches)
  shapes = {x.name: x.shape for x in hlo.computations[body]}
  whole_logits = lambda x: any(_nbytes(shapes.get(name, "")) == logits for name in x.operands)
  return {
    "launches_per_token": len(launches),
    "launches_per_layer": len(launches) // layers,
    "launches_by_kind": dict(kinds.most_common()),
    "logits_reads": sum(whole_logits(x) and hlo.moved_bytes(body, x) >= logits for x in launches),
    "weight_copies_bytes": sum(
      _nbytes(x.shape)
      for x in launches
      if _kind(hlo, x) in ("copy", "concatenate", "transpose") and _nbytes(x.shape) in weights
    ),
  }


def count_update(hlo: Hlo) -> dict[str, Any]:
  """Counts one update, every iteration of its loops."""
  total = collections.Counter()
  for name, trips in hlo.trips.items():
    for x in hlo.launches(name):
      flops = hlo.product_flops(x.called) if x.called in hlo.computations else 0
      total["product_flops"] += trips * flops
      if not flops and x.op != "custom-call":
        total["elementwise_launches"] += trips
        total["elementwise_bytes"] += trips * hlo.moved_bytes(name, x)
  return dict(total)


def _kind(hlo: Hlo, x: Instruction) -> str:
  """Returns what an instruction does: a kernel's name, "product", "reduce" and so on."""
  if x.op == "custom-call":
    return re.search(r'custom_call_target="([^"]+)"', x.rest)[1]
  if x.op != "fusion":
    return x.op
  ops = {y.op for y in hlo.computations.get(x.called, [])}
  if "dot" in ops or "gemm" in x.name:
    return "product"
  named = ("reduce", "scatter", "dynamic-update-slice", "gather", "concatenate", "transpose")
  return next((op for op in named if op in ops), "element-wise")


def run_programs(args: argparse.Namespace) -> RunPrograms:
  """Returns the programs of GTPO on random weights, with everything sharded over all devices."""
  devices, _ = topology_devices(args.topology)
  config = default_config()
  values = {
    "model.preset": args.preset,
    "model.random_weights": True,
    "model.compute_dtype": "bfloat16",
    "model.remat": args.remat,
    "mesh.data": 1,
    "mesh.fsdp": -1,
    "data.max_prompt_tokens": args.prompt_tokens,
    "sampling.max_tokens": args.tokens,
    "sampling.slots": args.slots,
    "batch.prompts": max(args.slots // args.group, 1) if args.what == "decode" else args.prompts,
    "batch.group": args.group,
    "batch.micro_batches": int(args.micro_batches) if args.micro_batches.isdigit() else "auto",
    "warm_start.steps": 0,
    "steps": args.steps,
  }
  if args.merge_adapters:
    values |= {"model.lora_rank": 16, "sampling.merge_adapters": args.merge_adapters}
    values |= {"model.param_dtype": "bfloat16", "model.base_layout": "apart"}
  with config.unlocked():
    config.update_from_flattened_dict(values)
  config = freeze(config)
  return RunPrograms(config, build_model(config, devices))


@without_compile_cache()  # programs for absent devices cannot be read from it
def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Compiles a program and returns what it launches, reads and multiplies."""
  run = run_programs(args)
  c = run.model.config
  result = {"what": args.what, "preset": args.preset, "topology": args.topology}
  if args.what == "update":
    program = run.compile_update()
    result |= {"remat": run.config.model.remat, "micro_batches": run.config.batch.micro_batches}
    counted = count_update(Hlo(program.executable.as_text()))
  else:
    program = run.compile_decode()
    result["slots"] = args.slots
    heads = (c.heads + 2 * c.kv_heads) * c.head_dim
    widths = (heads, c.heads * c.head_dim, c.mlp, 2 * c.mlp)
    weights = {2 * c.width * width for width in widths}
    logits = 4 * args.slots * c.vocab_size
    counted = count_decode(Hlo(program.executable.as_text()), c.layers, logits, weights)
  return result | {"peak_bytes": program.peak, "seconds_compile": program.seconds} | counted


def parse() -> argparse.Namespace:
  """Returns the options of the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--what", choices=("decode", "update"), default="decode")
  parser.add_argument("--preset", default="qwen2.5-0.5b")
  parser.add_argument("--topology", default="h100:1")
  parser.add_argument("--remat", default="auto")
  parser.add_argument("--micro_batches", default="auto", help="a number, or auto")
  merges = ("always", "never")
  parser.add_argument("--merge_adapters", choices=merges, help="with adapters of rank 16")
  sizes = {"slots": 256, "prompts": 16, "group": 16, "prompt_tokens": 512, "tokens": 1024}
  for name, default in {**sizes, "steps": 1000}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--json")
  return parser.parse_args()


def main() -> None:
  args = parse()
  result = measure(args)
  show(result)
  store(result, args.json)


if __name__ == "__main__":
  main()
