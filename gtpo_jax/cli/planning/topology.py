"""Hardware that is not attached: the devices that a compiler describes for a topology's name."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import jax

from gtpo_jax.runtime.chips import CHIPS, Chip, Gpu, host_memory
from gtpo_jax.runtime.errors import UserError, did_you_mean, first_line
from gtpo_jax.runtime.installing import install_command
from gtpo_jax.runtime.startup import use_compile_cache

# libtpu prints errors if these variables are unset, but takes the topology from the topology name.
# Several processes may load libtpu at once, because no chip is used.
LIBTPU_ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5p-8",
}
# A compiler without a GPU cannot time kernels to choose among them. XLA then generates matrix
# products with Triton, which fails for some shapes; it uses cuBLAS for all if that is so.
GPU_COMPILER_OPTIONS: tuple[dict[str, Any], ...] = (
  {"xla_gpu_autotune_level": 0},
  {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
)
RESERVED_SHARED_MEMORY = 1024  # bytes of a multiprocessor that a block cannot use, from Ampere on
# XLA's description of a GPU, a GpuTargetConfigProto. The limits of blocks and threads are the same
# for all GPUs of `CHIPS`.
GPU_DESCRIPTION = """
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {cores}
  fpus_per_core: {fpus_per_core}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory}
  memory_bandwidth: {memory_bandwidth}
  l2_cache_size: {l2_cache}
  shared_memory_per_core: {shared_memory}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_memory_per_block}
  threads_per_core_limit: {threads_per_core}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{name}"
"""


def topology_devices(topology: str) -> tuple[list[Any], Chip]:
  """Returns the devices of a topology and the memory and rates of one of them.

  The topology is a TPU generation and the shape of a slice, such as "v5p:4x4x4" (libtpu must be
  installed); a GPU and the number of GPUs in one node, such as "h100:8", or the numbers of nodes
  and GPUs, such as "h100:4x8" (JAX's CUDA plugin must be installed); or "cpu:8" for the virtual
  devices of this process. Only the memory of a CPU is known.
  """
  kind, _, shape = topology.partition(":")
  if kind == "cpu":
    devices = jax.devices("cpu")
    if shape != str(len(devices)):
      raise UserError(
        f"topology {topology!r}: this process has {len(devices)} CPU device(s); set "
        f"JAX_NUM_CPU_DEVICES={shape or 1}"
      )
    return devices, Chip(host_memory() // len(devices))
  if kind not in CHIPS:
    raise UserError(
      f"unknown topology {topology!r}{did_you_mean(kind, [*CHIPS, 'cpu'])}; give one of "
      f"{', '.join(CHIPS)} with a shape, for example v5p:4x4x4 or h100:8, or cpu:N"
    )
  chip = CHIPS[kind]
  sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"\d+(x\d+)*", shape) else []
  if chip.gpu:
    return _gpu_devices(topology, sizes, chip, chip.gpu), chip
  return _tpu_devices(topology, sizes, chip), chip


def compile_deviceless(lowered: jax.stages.Lowered, devices: list[Any]) -> jax.stages.Compiled:
  """Compiles a program for devices that need not be attached, without the compile cache."""
  with without_compile_cache():
    if devices[0].platform != "gpu":
      return lowered.compile()
    first, second = GPU_COMPILER_OPTIONS
    try:
      return lowered.compile(compiler_options=first)
    except jax.errors.JaxRuntimeError as error:
      if not str(error).startswith("INTERNAL"):
        raise
    return lowered.compile(compiler_options=second)


@contextlib.contextmanager
def without_compile_cache() -> Iterator[None]:
  """Turns off JAX's compile cache, which cannot load programs for devices that are not attached."""
  before = jax.config.jax_enable_compilation_cache
  use_compile_cache(False)
  try:
    yield
  finally:
    use_compile_cache(before)


def _tpu_devices(topology: str, sizes: list[int], chip: Chip) -> list[Any]:
  if len(sizes) != chip.dimensions or 0 in sizes:
    kind = topology.partition(":")[0]
    example = "x".join(["4"] * chip.dimensions)
    raise UserError(
      f"topology {topology!r}: a slice of {kind} has {chip.dimensions} dimensions, for example "
      f"{kind}:{example}"
    )
  for name, value in LIBTPU_ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  one_chip = {"chips_per_host_bounds": [1] * 3} if set(sizes) == {1} else {}
  advice = f"libtpu installed ({install_command('plan')}), and does the shape exist, for example"
  return _described("tpu", topology, f"is {advice} v5e:4x4?", one_chip)


def _gpu_devices(topology: str, sizes: list[int], chip: Chip, gpu: Gpu) -> list[Any]:
  if len(sizes) not in (1, 2) or 0 in sizes:
    kind = topology.partition(":")[0]
    raise UserError(
      f"topology {topology!r}: give the number of GPUs in one node, for example {kind}:8, or the "
      f"numbers of nodes and GPUs in each, for example {kind}:4x8"
    )
  nodes, gpus = sizes if len(sizes) == 2 else (1, *sizes)
  major, minor = gpu.capability
  text = GPU_DESCRIPTION.format(
    **vars(gpu),
    major=major,
    minor=minor,
    memory=chip.memory,
    memory_bandwidth=int(chip.memory_bandwidth or 0),
    shared_memory_per_block=gpu.shared_memory - (RESERVED_SHARED_MEMORY if major >= 8 else 0),
  )
  advice = f"is JAX's CUDA plugin installed ({install_command('plan-gpu')})?"
  shape = {"topology": f"1x{nodes}x{gpus}", "target_config": text}
  return _described("cuda", topology, advice, shape)


def _described(platform: str, topology: str, advice: str, settings: dict[str, Any]) -> list[Any]:
  from jax.experimental import topologies

  try:
    found = topologies.get_topology_desc(platform=platform, topology_name=topology, **settings)
  except Exception as error:  # libtpu and the plugin raise types of their own, and JAX others
    raise UserError(
      f"topology {topology!r} cannot be described ({first_line(error)}); {advice}"
    ) from error
  return list(found.devices)
