"""Formats the result of `gtpo plan` as text."""

from __future__ import annotations

from typing import Any

GIB = 2**30
MIB = 2**20


def format_table(result: dict[str, Any]) -> str:
  """Returns the result of `plan` as a table of names and values."""

  def seconds(key: str) -> str:
    value = result[key]
    return "unknown" if value is None else f"at least {value:.3g} s (roofline)"

  mesh = " x ".join(f"{name} {count}" for name, count in result["mesh"].items())
  memory = f"{result['hbm_bytes'] / GIB:.2f} GiB"
  if result["usable_bytes"] < result["hbm_bytes"]:
    memory += f" ({result['usable_bytes'] / GIB:.2f} GiB usable)"
  topology = f"{result['topology']}: {result['devices']} device(s) of {memory}, mesh {mesh}"
  rows = [
    ("topology", topology),
    ("computing in", f"{result['compute_dtype']}, because {result['compute_dtype.reason']}"),
    ("attention", f"{result['attention']}; when sampling: {result['sample.attention']}"),
    ("update in", f"{result['micro_batches']} micro-batch(es), remat {result['remat']}"),
    ("slots", f"{result['slots']:9d} over all devices (sampling.slots)"),
    ("parameters", f"{result['params'] / 1e9:9.3f} billion"),
    ("logits in memory", f"{result['head_chunk']:9d} tokens per device (batch.head_chunk)"),
    ("per device: parameters", _size(result["params.bytes"])),
    ("per device: optimizer", _size(result["optimizer.bytes"])),
    ("per device: KV cache", _size(result["cache.bytes"])),
    ("per device: activations", _size(result["update.activation_bytes"])),
  ]
  for program in result["programs"]:
    size = _size(program["peak_bytes"])
    rows.append((f"peak, {program['name']}", f"{size}   {_programs(program['count'])}"))
  sent = result["update.sent_bytes"]
  count = sum(program["count"] for program in result["programs"])
  rows += [
    ("update sends, per device", "-" if sent is None else _size(sent)),
    ("update", f"{result['update.flops']:.3e} model FLOP, {seconds('update.seconds')}"),
    ("sampling, full length", seconds("sample.seconds")),
    ("compile time", f"{result['seconds_compile']:.1f} s for the programs above"),
    (
      "compile time of a run",
      f"about {result['compile_minutes']:.0f} min at this machine's speed, if all {count} programs "
      "are needed; restarts read them from the compile cache",
    ),
  ]
  if result["refused"]:
    rows.append(("the config's mesh", f"refused: {result['refused']}"))
    rows.append(("planned with", result["override"]))
  for trial in result["tried"]:
    verdict = "fits" if trial["fits"] else "does not fit"
    peak = f"{trial['program']} needs {trial['peak_bytes'] / GIB:.2f} GiB"
    rows.append(("tried", f"{trial['override']}: {verdict}, {peak}"))
  rows.append(("fits", "yes" if result["fits"] else _advice(result)))
  return "\n".join(f"{name:<28} {value}" for name, value in rows)


def _size(size: int) -> str:
  unit, divisor = ("GiB", GIB) if size >= GIB // 2 else ("MiB", MIB)
  return f"{size / divisor:9.2f} {unit}"


def _programs(count: int) -> str:
  return "1 program" if count == 1 else f"up to {count} programs"


def _advice(result: dict[str, Any]) -> str:
  """Returns the text of the line `fits` for a run that does not fit: what to change."""
  if result["override"]:
    return f"no, but it fits with {result['override']} (checked by compiling)"
  if not result["tried"]:
    return "no; use more devices, a smaller sampling.max_tokens or a smaller batch"
  return (
    "no; nor does any other combination of meshes, micro-batches, numbers of slots, places of the "
    "optimizer's moments and, under adapters, formats of the base: the one that needs least memory "
    "is among those tried; use more devices, a smaller sampling.max_tokens or model.lora_rank"
  )
