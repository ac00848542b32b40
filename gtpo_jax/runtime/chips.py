"""The chips that runs use: their memory, their peak rates, and how JAX names them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

VOLTA = (7, 0)  # the first compute capability with units for float16 matrices
AMPERE = (8, 0)  # the first one with units for bfloat16 matrices, and with cuDNN's flash attention
# Names of units for bfloat16 matrices in /proc/cpuinfo, the faster one first.
CPU_BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16")
GB = 10**9
TB = 10**12
TFLOPS = 10**12
# The share of a GPU's memory that JAX takes; the rest is for CUDA, NCCL and CUDA graphs. JAX's own
# default is 0.75.
GPU_MEMORY_FRACTION = 0.9
# The memory limits of this process's container, cgroup v2 and v1.
CONTAINER_LIMITS = (
  Path("/sys/fs/cgroup/memory.max"),
  Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclasses.dataclass(frozen=True)
class Gpu:
  """What XLA's compiler asks about an NVIDIA GPU, from NVIDIA's data sheets and tuning guides."""

  name: str  # the name that the driver reports
  capability: tuple[int, int]  # the compute capability, (major, minor)
  cores: int  # streaming multiprocessors
  fpus_per_core: int  # float32 units of a multiprocessor
  threads_per_core: int  # the most threads of a multiprocessor
  shared_memory: int  # bytes of a multiprocessor
  l2_cache: int  # bytes
  clock_ghz: float  # boost clock


@dataclasses.dataclass(frozen=True)
class Chip:
  """The memory and peak rates of one device. None means unknown.

  The values are the manufacturer's. The TPUs' link bandwidth was measured for "How to Scale Your
  Model" (jax-ml.github.io/scaling-book).
  """

  memory: int  # bytes
  # peak FLOP per second in bfloat16, or in float16 if the chip has no bfloat16 units
  flops: float | None = None
  memory_bandwidth: float | None = None  # bytes per second
  # bytes per second that a device sends to its slice or node, over all links
  link_bandwidth: float | None = None
  # bytes per second that a device sends to other nodes; None for TPUs, whose slices are not
  # divided
  network_bandwidth: float | None = None
  dimensions: int = 1  # number of dimensions of a TPU slice
  device_kind: str = ""  # the start of JAX's name of the device
  gpu: Gpu | None = None  # the description of a GPU; None for other chips

  @property
  def usable_memory(self) -> int:
    """The bytes that programs can use; the rest of a GPU's memory is for CUDA and its libraries."""
    return int(self.memory * GPU_MEMORY_FRACTION) if self.gpu else self.memory


def _gpu_chip(
  memory: int, flops: float, memory_bandwidth: float, link: float, network: float, gpu: Gpu
) -> Chip:
  return Chip(memory, flops, memory_bandwidth, link, network, device_kind=gpu.name, gpu=gpu)


def _ampere(name: str) -> Gpu:
  return Gpu(name, (8, 0), 108, 64, 2048, 164 * 2**10, 40 * 2**20, 1.41)


def _hopper(name: str) -> Gpu:
  return Gpu(name, (9, 0), 132, 128, 2048, 228 * 2**10, 50 * 2**20, 1.98)


# The memory of a GPU is what the driver leaves to programs. Its links are NVLink, in one direction;
# T4 and L4 have PCI Express instead. Its network is what cloud machines with eight such GPUs have.
CHIPS = {
  "v5e": Chip(16 * 2**30, 197e12, 819e9, 180e9, None, 2, "TPU v5 lite"),
  "v5p": Chip(95 * 2**30, 459e12, 2765e9, 540e9, None, 3, "TPU v5"),
  "v6e": Chip(32 * 2**30, 918e12, 1640e9, 360e9, None, 2, "TPU v6"),
  "t4": _gpu_chip(
    15_828_320_256,
    65 * TFLOPS,
    320 * GB,
    16 * GB,
    1.5 * GB,
    Gpu("Tesla T4", (7, 5), 40, 64, 1024, 64 * 2**10, 4 * 2**20, 1.59),
  ),
  "l4": _gpu_chip(
    23_580_639_232,
    121 * TFLOPS,
    300 * GB,
    32 * GB,
    1.5 * GB,
    Gpu("NVIDIA L4", (8, 9), 58, 128, 1536, 100 * 2**10, 48 * 2**20, 2.04),
  ),
  "a100-40": _gpu_chip(
    42_331_013_120, 312 * TFLOPS, 1555 * GB, 300 * GB, 12.5 * GB, _ampere("NVIDIA A100-SXM4-40GB")
  ),
  "a100": _gpu_chip(
    85_094_825_984, 312 * TFLOPS, 2039 * GB, 300 * GB, 25 * GB, _ampere("NVIDIA A100-SXM4-80GB")
  ),
  "h100": _gpu_chip(
    84_942_979_072, 989 * TFLOPS, 3.35 * TB, 450 * GB, 50 * GB, _hopper("NVIDIA H100 80GB HBM3")
  ),
  "h200": _gpu_chip(
    150_109_880_320, 989 * TFLOPS, 4.8 * TB, 450 * GB, 50 * GB, _hopper("NVIDIA H200")
  ),
  "b200": _gpu_chip(
    191_514_411_008,
    2250 * TFLOPS,
    7.7 * TB,
    900 * GB,
    50 * GB,
    Gpu("NVIDIA B200", (10, 0), 148, 128, 2048, 228 * 2**10, 126 * 2**20, 1.965),
  ),
}


def chip_of(device: Any) -> Chip | None:
  """Returns the chip of a JAX device; None if it is not in `CHIPS`."""
  kind = device.device_kind
  names = [name for name, chip in CHIPS.items() if kind.startswith(chip.device_kind)]
  # "TPU v5" is also the start of "TPU v5 lite".
  longest = max(names, key=lambda name: len(CHIPS[name].device_kind), default=None)
  return CHIPS[longest] if longest else None


def compute_capability(device: Any) -> tuple[int, int] | None:
  """Returns the compute capability of an NVIDIA GPU, such as (9, 0); None for other devices."""
  text = getattr(device, "compute_capability", None)
  if device.platform != "gpu" or not isinstance(text, str) or "." not in text:
    return None
  major, minor = text.split(".")
  return int(major), int(minor)


@functools.cache
def cpu_bfloat16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
  """Returns the name of this machine's units for bfloat16 matrices; "" if no known ones are there.

  Args:
    cpuinfo: Linux's description of the processors. Other systems have none.
  """
  try:
    lines = cpuinfo.read_text().splitlines()
  except OSError:
    return ""
  flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
  return next((unit for unit in CPU_BFLOAT16_UNITS if unit in flags), "")


def cores_of(device: Any) -> int:
  """Returns the number of cores that run a TPU's kernels as one device; 1 for other devices."""
  two_cores = device.device_kind in ("TPU v4", "TPU v5", "TPU v5p")
  return 2 if two_cores else 1


def memory_of(device: Any) -> int | None:
  """Returns the bytes of memory that an attached device lets programs use; None if unknown."""
  statistics = device.memory_stats() or {}
  return statistics.get("bytes_limit")


def usable_memory(device: Any, devices: int) -> int | None:
  """Returns the bytes that programs can use on an attached device; None if unknown.

  Args:
    device: a device of this process.
    devices: the number of devices of this process. Those of a CPU share its memory.
  """
  return host_memory() // devices if device.platform == "cpu" else memory_of(device)


def host_memory() -> int:
  """Returns the bytes of memory of this machine, or of the container if it has a limit."""
  limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  for file in CONTAINER_LIMITS:
    with contextlib.suppress(OSError, ValueError):  # the file is missing, or says "max"
      limits.append(int(file.read_text()))
  return min(limits)
