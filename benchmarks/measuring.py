"""What the scripts that time something share: medians, and how results are shown and stored.

JAX is imported by the functions that need it, after a script has called `prepare_jax`.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def median_seconds(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
  """Returns the seconds of the first call, which compiles, and the median of `repeats` others."""
  import jax

  seconds = []
  for _ in range(repeats + 1):
    began = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - began)
  return seconds[0], float(np.median(seconds[1:] or [np.nan]))


def versions() -> dict[str, Any]:
  """Returns what a time depends on besides the arguments: the device and the versions."""
  import jax

  return {
    "jax": jax.__version__,
    "python": platform.python_version(),
    "device": jax.devices()[0].device_kind,
    "devices": jax.device_count(),
  }


def show(result: Mapping[str, Any]) -> None:
  """Prints a line for each number."""
  for name, value in result.items():
    print(f"{name:<26} {value:.4g}" if isinstance(value, float) else f"{name:<26} {value}")


def store(result: Any, file: str | Path | None) -> None:
  """Writes a result as JSON if a file was named (`--json`)."""
  if file:
    Path(file).write_text(json.dumps(result, indent=2) + "\n")
