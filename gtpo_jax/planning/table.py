"""Formats the result of `gtpo plan` as text."""

from __future__ import annotations

from typing import Any

GIB = 2**30
MIB = 2**20


def format_table(result: dict[str, Any]) -> str:
  """Returns the result of `plan` as a table of names and values."""

  def size(key: str) -> str:
    unit, divisor = ("GiB", GIB) if result[key] >= GIB // 2 else ("MiB", MIB)
    return f"{result[key] / divisor:9.2f} {unit}"

  def seconds(key: str) -> str:
    value = result[key]
    return "unknown" if value is None else f"at least {value:.3g} s (roofline)"

  mesh = " x ".join(f"{name} {count}" for name, count in result["mesh"].items())
  topology = (
    f"{result['topology']}: {result['devices']} device(s) of {result['hbm_bytes'] / GIB:.2f} GiB, "
    f"mesh {mesh}"
  )
  rows = [
    ("topology", topology),
    ("attention", result["attention"]),
    ("parameters", f"{result['params'] / 1e9:9.3f} billion"),
    ("per device: parameters", size("params.bytes")),
    ("per device: optimizer", size("optimizer.bytes")),
    ("per device: KV cache", size("cache.bytes")),
    ("per device: activations", size("update.activation_bytes")),
    ("per device: peak, update", size("update.peak_bytes")),
    ("per device: peak, sampling", size("sample.peak_bytes")),
    (
      "per device: bytes sent",
      "-" if result["update.sent_bytes"] is None else size("update.sent_bytes"),
    ),
    ("update", f"{result['update.flops']:.3e} model FLOP, {seconds('update.seconds')}"),
    ("sampling, full length", seconds("sample.seconds")),
    ("compile time", f"{result['seconds_compile']:.1f} s"),
    ("fits", "yes" if result["fits"] else _advice(result["override"])),
  ]
  return "\n".join(f"{name:<28} {value}" for name, value in rows)


def _advice(override: str | None) -> str:
  """Returns the line `fits` of a run that does not fit: what to change."""
  if override:
    return f"no, but it fits with {override} (checked by compiling)"
  return (
    "no; smaller micro-batches, optimizer moments in host memory and larger context or tensor axes "
    "were tried and do not make it fit; use more devices, a smaller sampling.max_tokens, or "
    "model.lora_rank"
  )
