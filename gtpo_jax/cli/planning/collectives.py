"""The bytes that devices send to each other in a compiled program, counted in its HLO text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gtpo_jax.runtime.chips import Chip

# The last line may name the thread of a TPU that runs the computation, such as its sparse core.
_COMPUTATION = re.compile(
  r"^(ENTRY )?%([\w.\-]+) \([^\n]*\{\n(.*?)^\}(?:, execution_thread=\S+)?$",
  re.MULTILINE | re.DOTALL,
)
_COLLECTIVE = re.compile(
  r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_WHILE = re.compile(r" while\(.*condition=%([\w.\-]+), body=%([\w.\-]+)")
_CALLED = re.compile(
  r"(?:calls|to_apply|true_computation|false_computation)=%([\w.\-]+)"
  r"|branch_computations=\{([^}]*)\}"
)
_ARRAY = re.compile(r"\b(pred|[a-z]+?)(\d*)(?:e\w+)?\[([\d,]*)\]")


class Collective(NamedTuple):
  """The bytes that one collective of a program sends in all its iterations."""

  kind: str  # for example "all-gather"
  sent: float  # bytes that one device sends
  # indices of the devices that take part together with the first one; () if unknown
  group: tuple[int, ...]


def send_seconds(program: Sequence[Collective], chip: Chip, nodes: Sequence[int]) -> float:
  """Returns the least time that a device takes to send a program's collectives.

  Within a node, all links are used. Between nodes, a collective uses the network of every member
  that a node has of its group. The two overlap. `nodes` has the index of each device's node, in
  the order of the mesh.
  """
  within = 0.0
  between = 0.0
  for _, sent, group in program:
    members = [nodes[i] for i in group]
    if len(set(members)) > 1:
      between += sent / members.count(members[0])
    else:
      within += sent
  network = chip.network_bandwidth or chip.link_bandwidth
  return max(within / chip.link_bandwidth, between / network)


def collectives(hlo: str) -> list[Collective]:
  """Returns the collectives of a program.

  A loop body is counted once per iteration, but only once if the number of iterations is not known
  before run time. If the compiler splits a collective over several fusions, the pieces have the
  same channel id and are counted once. Collectives are assumed to use a ring of n devices: each
  device sends (n - 1) / n of the bytes that it gathers or exchanges, and twice that for an
  all-reduce.
  """
  bodies = {}
  entry = ""
  for computation in _COMPUTATION.finditer(hlo):
    is_entry, name, body = computation.groups()
    bodies[name] = body.splitlines()
    entry = name if is_entry else entry
  found: dict[tuple[str, str], Collective] = {}

  def visit(name: str, times: int) -> None:
    for number, line in enumerate(bodies[name]):
      if loop := _WHILE.search(line):
        condition, body = loop.groups()
        visit(body, times * _trip_count(line, bodies, condition))
        continue
      if collective := _COLLECTIVE.search(line):
        result, kind, start = collective.groups()
        channel = re.search(r"channel_id=(\d+)", line)
        key = kind, channel[1] if channel else f"{name}:{number}"
        sent = times * _sent(kind, result, bool(start), line)
        if key not in found or found[key].sent < sent:
          found[key] = Collective(kind, sent, _group(line))
      for called in _CALLED.finditer(line):
        for callee in re.findall(r"[\w.\-]+", called[1] or called[2]):
          visit(callee, times)

  visit(entry, 1)
  return list(found.values())


def _sent(kind: str, result: str, is_start: bool, line: str) -> float:
  """Returns the bytes that one device sends in one collective with this result type."""
  sizes = [
    math.prod(map(int, filter(None, dims.split(",")))) * int(bits or 8) // 8
    for _, bits, dims in _ARRAY.findall(result)
  ]
  if is_start and kind in ("all-gather", "reduce-scatter", "collective-permute"):
    # The type is (operands, results); collective-permute appends two counters.
    arrays = sizes[:2] if kind == "collective-permute" else sizes
    sizes = arrays[len(arrays) // 2 :]
  size = sum(sizes)
  n = len(_group(line))
  share = (n - 1) / n if n else 1.0
  return {
    "all-gather": size * share,
    "all-reduce": 2 * size * share,
    "reduce-scatter": size * ((n or 2) - 1),
    "all-to-all": size * share,
    "collective-permute": size,
  }[kind]


def _group(line: str) -> tuple[int, ...]:
  """Returns the first group of devices of a collective; () if it is not in the line."""
  if explicit := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
    return tuple(map(int, explicit[1].split(",")))
  numbers = lambda text: [int(number) for number in text.split(",")]
  if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
    shape, source, order = iota.groups()
    devices = np.arange(math.prod(numbers(source))).reshape(numbers(source))
    if order:
      devices = devices.transpose(numbers(order))
    return tuple(devices.reshape(numbers(shape))[0].tolist())
  if mesh := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line):
    sizes = [(name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])]
    members = re.findall(r"'(\w+)'", mesh[2])
    devices = np.arange(math.prod(size for _, size in sizes)).reshape([size for _, size in sizes])
    first = tuple(slice(None) if name in members else 0 for name, _ in sizes)
    return tuple(devices[first].reshape(-1).tolist())
  if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line):
    return tuple(map(int, pairs.groups()))
  return ()


def _trip_count(line: str, bodies: dict[str, list[str]], condition: str) -> int:
  """Returns the number of iterations of a loop, or 1 if it is unknown.

  The number is the compiler's annotation if there is one, and otherwise the constant that the loop
  condition compares the counter with. The counter is assumed to start at 0 and to increase by 1.
  """
  if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
    return int(known[1])
  lines = bodies[condition]
  root = next(text for text in lines if "ROOT" in text)
  if fusion := re.search(r" fusion\(.*calls=%([\w.\-]+)", root):  # on GPU
    lines = bodies[fusion[1]]
    root = next(text for text in lines if "ROOT" in text)
  comparison = re.search(r"compare\((.*?)\), direction=LT", root)
  for operand in comparison[1].split(",") if comparison else ():
    name = re.escape(operand.strip().split(" ")[-1])
    for text in lines:
      if constant := re.search(rf"{name} = .* constant\((\d+)\)", text):
        return int(constant[1])
  return 1
