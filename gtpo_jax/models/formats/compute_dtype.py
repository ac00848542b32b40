"""Chooses the format of activations and matrix products for a device, if it is left to "auto".

| device | format |
|---|---|
| a TPU | bfloat16 |
| a GPU with compute capability 8.0 or above, or with none (not NVIDIA) | bfloat16 |
| a GPU with compute capability 7.0 to 7.5, such as a T4 | float16 |
| an older GPU | float32 |
| a CPU with units for bfloat16, and a model of width 512 or above | bfloat16 |
| any other CPU | float32 |

On two cores with `avx512_bf16`, a step takes 0.81 times as long in bfloat16 as in float32 at width
128, 0.91 at 256, 0.71 at 512, 0.67 at 768, and 0.6 for SmolLM2-135M (576 wide, 30 layers, a
vocabulary of 49,152). Below 512 the models are those that learn from random weights; they stay in
float32, so that their runs are the same on every CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gtpo_jax.runtime.chips import AMPERE, VOLTA, compute_capability, cpu_bfloat16_units
from gtpo_jax.runtime.fields import AUTO

MIN_CPU_WIDTH = 512  # of models that CPUs compute in bfloat16


class ComputeDtype(NamedTuple):
  """A format and the reason for it.

  Attributes:
    name: "float32", "bfloat16" or "float16".
    reason: completes "computing in NAME, because ...".
  """

  name: str
  reason: str


def compute_dtype_for(requested: str, device: Any, width: int) -> ComputeDtype:
  """Returns the format in which a device computes a model.

  Args:
    requested: `model.compute_dtype`; anything but "auto" is used as it is.
    device: a JAX device, which need not be attached.
    width: the model's features.
  """
  if requested != AUTO:
    return ComputeDtype(requested, f"model.compute_dtype is {requested}")
  name = device.device_kind
  if device.platform == "cpu":
    return _of_cpu(width)
  capability = compute_capability(device) or AMPERE
  if capability >= AMPERE:
    return ComputeDtype("bfloat16", f"{name} has units for it")
  if capability >= VOLTA:
    return ComputeDtype("float16", f"{name} has no bfloat16 units")
  return ComputeDtype("float32", f"{name} has no units for 16-bit formats")


def usable_compute_dtype(recorded: str, device: Any) -> str:
  """Returns the format that a run recorded, or "auto" if this device cannot compute in it."""
  is_old_gpu = (compute_capability(device) or AMPERE) < AMPERE
  return AUTO if is_old_gpu and recorded == "bfloat16" else recorded


def _of_cpu(width: int) -> ComputeDtype:
  units = cpu_bfloat16_units()
  if not units:
    return ComputeDtype("float32", "this CPU has no bfloat16 units")
  if width < MIN_CPU_WIDTH:
    return ComputeDtype(
      "float32", f"on CPUs, models below width {MIN_CPU_WIDTH} gain little from bfloat16"
    )
  return ComputeDtype("bfloat16", f"this CPU has units for it ({units})")
