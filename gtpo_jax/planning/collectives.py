"""The bytes that devices send to each other in a compiled program, counted in its HLO text."""

from __future__ import annotations

import math
import re

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \([^\n]*\{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
_COLLECTIVE = re.compile(
  r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_WHILE = re.compile(r" while\(.*condition=%([\w.\-]+), body=%([\w.\-]+)")
_CALLED = re.compile(
  r"(?:calls|to_apply|true_computation|false_computation)=%([\w.\-]+)"
  r"|branch_computations=\{([^}]*)\}"
)
_ARRAY = re.compile(r"\b(pred|[a-z]+?)(\d*)(?:e\w+)?\[([\d,]*)\]")


def collective_bytes(hlo: str) -> dict[str, int]:
  """Returns the bytes that one device sends in one run of a program, by kind of collective.

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
  sent: dict[tuple[str, str], float] = {}

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
        sent[key] = max(sent.get(key, 0), times * _sent(kind, result, bool(start), line))
      for called in _CALLED.finditer(line):
        for callee in re.findall(r"[\w.\-]+", called[1] or called[2]):
          visit(callee, times)

  visit(entry, 1)
  total: dict[str, float] = {}
  for (kind, _), size in sent.items():
    total[kind] = total.get(kind, 0) + size
  return {kind: round(size) for kind, size in total.items()}


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
  n = _group_size(line)
  share = (n - 1) / n if n else 1.0
  return {
    "all-gather": size * share,
    "all-reduce": 2 * size * share,
    "reduce-scatter": size * ((n or 2) - 1),
    "all-to-all": size * share,
    "collective-permute": size,
  }[kind]


def _group_size(line: str) -> int | None:
  """Returns the number of devices in each group of a collective; None if it is not in the line."""
  if group := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
    return group[1].count(",") + 1
  if shape := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
    return int(shape[1])
  if mesh := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", mesh[2]))
  return None


def _trip_count(line: str, bodies: dict[str, list[str]], condition: str) -> int:
  """Returns the number of iterations of a loop, or 1 if it is unknown.

  It is the compiler's annotation, or else the constant with which the loop condition compares the
  loop counter. The counter is assumed to start at 0 and to increase by 1.
  """
  if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
    return int(known[1])
  root = next(text for text in bodies[condition] if "ROOT" in text)
  comparison = re.search(r"compare\((.*?)\), direction=LT", root)
  for operand in comparison[1].split(",") if comparison else ():
    name = re.escape(operand.strip().split(" ")[-1])
    for text in bodies[condition]:
      if constant := re.search(rf"{name} = .* constant\((\d+)\)", text):
        return int(constant[1])
  return 1
