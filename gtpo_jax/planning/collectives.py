"""What the devices of a compiled program send one another, read from its HLO text."""

from __future__ import annotations

import math
import re

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \([^\n]*\{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
_COLLECTIVE = re.compile(
  r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_WHILE = re.compile(r" while\(.*condition=%([\w.\-]+), body=%([\w.\-]+)")
_CALLED = re.compile(
  r"(?:calls|to_apply|true_computation|false_computation)=%([\w.\-]+)|branch_computations=\{([^}]*)\}"
)
_ARRAY = re.compile(r"\b(pred|[a-z]+?)(\d*)(?:e\w+)?\[([\d,]*)\]")


def collective_bytes(hlo: str) -> dict[str, int]:
  """Bytes that one device sends in one run of a program, by kind of collective.

  A loop's body counts as often as the loop turns; a loop whose number of turns is decided while it runs counts once. The steps of a
  collective that the compiler spread over several fusions carry one channel number and count once. A ring is assumed: of n devices each
  sends (n - 1) / n of what it gathers or exchanges, twice that of what it reduces.
  """
  bodies = {}
  entry = ""
  for found in _COMPUTATION.finditer(hlo):
    bodies[found[2]] = found[3].splitlines()
    entry = found[2] if found[1] else entry
  sent: dict[tuple[str, str], float] = {}

  def visit(name: str, times: int) -> None:
    for number, line in enumerate(bodies[name]):
      if loop := _WHILE.search(line):
        visit(loop[2], times * _turns(line, bodies, loop[1]))
        continue
      if collective := _COLLECTIVE.search(line):
        channel = re.search(r"channel_id=(\d+)", line)
        key = collective[2], channel[1] if channel else f"{name}:{number}"
        sent[key] = max(
          sent.get(key, 0), times * _sent(collective[2], collective[1], bool(collective[3]), line)
        )
      for called in _CALLED.finditer(line):
        for part in re.findall(r"[\w.\-]+", called[1] or called[2]):
          visit(part, times)

  visit(entry, 1)
  total: dict[str, float] = {}
  for (kind, _), size in sent.items():
    total[kind] = total.get(kind, 0) + size
  return {kind: round(size) for kind, size in total.items()}


def _sent(kind: str, result: str, begun: bool, line: str) -> float:
  """Bytes that one device sends in one collective with this result type."""
  sizes = [
    math.prod(map(int, filter(None, dims.split(",")))) * int(bits or 8) // 8
    for _, bits, dims in _ARRAY.findall(result)
  ]
  if begun and kind in (
    "all-gather",
    "reduce-scatter",
    "collective-permute",
  ):  # (operands, results[, two counters])
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
  """Devices that take part in one collective; None where the text does not say."""
  if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
    return found[1].count(",") + 1
  if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
    return int(found[1])
  if found := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
    return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", found[2]))
  return None


def _turns(line: str, bodies: dict[str, list[str]], condition: str) -> int:
  """How often a loop turns: as the compiler notes it, or the constant that its counter, from 0 by 1, is compared with."""
  if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
    return int(known[1])
  root = next(text for text in bodies[condition] if "ROOT" in text)
  compared = re.search(r"compare\((.*?)\), direction=LT", root)
  for operand in compared[1].split(",") if compared else ():
    name = re.escape(operand.strip().split(" ")[-1])
    for text in bodies[condition]:
      if constant := re.search(rf"{name} = .* constant\((\d+)\)", text):
        return int(constant[1])
  return 1
