"""Hardware that is not attached: device descriptions from the compiler, and the chips' limits."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import jax

from gtpo_jax.runtime.errors import UserError, did_you_mean, first_line


@dataclasses.dataclass(frozen=True)
class Chip:
  """The memory and peak rates of one device.

  The values are the manufacturer's, except for the link bandwidth, which was measured for "How to
  Scale Your Model" (jax-ml.github.io/scaling-book). None means unknown.

  Attributes:
    memory: bytes.
    flops: peak bfloat16 FLOP per second.
    memory_bandwidth: bytes per second.
    link_bandwidth: bytes per second sent to the neighbours, summed over all links.
    dimensions: number of dimensions of a slice.
  """

  memory: int
  flops: float | None = None
  memory_bandwidth: float | None = None
  link_bandwidth: float | None = None
  dimensions: int = 1


CHIPS = {
  "v5e": Chip(16 * 2**30, 197e12, 819e9, 180e9, 2),
  "v5p": Chip(95 * 2**30, 459e12, 2765e9, 540e9, 3),
  "v6e": Chip(32 * 2**30, 918e12, 1640e9, 360e9, 2),
}

# libtpu prints errors if these variables are unset, but takes the topology from the topology name.
# Several processes may load libtpu at once, because no chip is used.
LIBTPU_ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5p-8",
}


def topology_devices(topology: str) -> tuple[list[Any], Chip]:
  """Returns the devices of a topology and the memory and rates of one of them.

  Args:
    topology: a TPU generation and the shape of a slice, for example "v5p:4x4x4" (libtpu must be
      installed); or "cpu:8", the virtual devices of this process. For these only the memory is
      known.

  Raises:
    UserError: the topology does not exist, or libtpu is not installed.
  """
  kind, _, shape = topology.partition(":")
  if kind == "cpu":
    return _cpu_devices(topology, shape)
  if kind not in CHIPS:
    raise UserError(
      f"unknown topology {topology!r}{did_you_mean(kind, [*CHIPS, 'cpu'])}; give one of "
      f"{', '.join(CHIPS)} with a shape, for example v5p:4x4x4, or cpu:N"
    )
  chip = CHIPS[kind]
  sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"\d+(x\d+)*", shape) else []
  if len(sizes) != chip.dimensions or 0 in sizes:
    example = "x".join(["4"] * chip.dimensions)
    raise UserError(
      f"topology {topology!r}: a slice of {kind} has {chip.dimensions} dimensions, for example "
      f"{kind}:{example}"
    )
  for name, value in LIBTPU_ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  from jax.experimental import topologies

  one_chip = {"chips_per_host_bounds": [1] * 3} if set(sizes) == {1} else {}
  try:
    description = topologies.get_topology_desc(platform="tpu", topology_name=topology, **one_chip)
  except Exception as error:  # libtpu raises types of its own
    raise UserError(
      f"topology {topology!r} cannot be described ({first_line(error)}); is libtpu installed "
      "(pip install 'gtpo_jax[plan]'), and does the shape exist, for example v5e:4x4?"
    ) from error
  return list(description.devices), chip


def _cpu_devices(topology: str, count: str) -> tuple[list[Any], Chip]:
  devices = jax.devices("cpu")
  if count != str(len(devices)):
    raise UserError(
      f"topology {topology!r}: this process has {len(devices)} CPU device(s); set "
      f"JAX_NUM_CPU_DEVICES={count or 1}"
    )
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return devices, Chip(memory // len(devices))
