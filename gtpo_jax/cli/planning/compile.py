"""Compiles one program ahead of time and returns the memory that it takes on a device."""

from __future__ import annotations

import re
from typing import Any

import jax

from gtpo_jax.cli.planning.topology import compile_deviceless
from gtpo_jax.runtime.mesh import bytes_per_device


def compile_with_peak(
  lowered: jax.stages.Lowered, arguments: Any
) -> tuple[int, jax.stages.Compiled | None]:
  """Compiles a program for devices that need not be present.

  Args:
    lowered: the program.
    arguments: its abstract arguments that are in device memory.

  Returns:
    The peak bytes on one device, including the arguments, and the program. If compilation fails for
    lack of memory, the program is None, and the bytes are those that the compiler reports.
  """
  devices = list(jax.tree.leaves(arguments)[0].sharding.device_set)
  try:
    compiled = compile_deviceless(lowered, devices)
  except jax.errors.JaxRuntimeError as error:
    needed = re.search(r"temporaries \(([\d.]+)([KMGT])\)|Used ([\d.]+)([KMGT]) of", str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or not needed:
      raise
    temporaries, temporaries_unit, total, total_unit = needed.groups()
    if temporaries:
      return _to_bytes(temporaries, temporaries_unit) + bytes_per_device(arguments), None
    return _to_bytes(total, total_unit), None
  analysis = compiled.memory_analysis()
  # The peak that XLA reports for a CPU program does not include its temporaries.
  omitted = analysis.temp_size_in_bytes if devices[0].platform == "cpu" else 0
  return analysis.peak_memory_in_bytes + omitted, compiled


def _to_bytes(number: str, unit: str) -> int:
  return int(float(number) * 1024 ** ("KMGT".index(unit) + 1))
