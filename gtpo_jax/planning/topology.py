"""Hardware that is not here: its devices as the compiler knows them, and what one of them can do."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import jax

from gtpo_jax.runtime.errors import UserError, first_line, nearest


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device, as its maker states it; links as measured for "How to Scale Your Model" (jax-ml.github.io/scaling-book)."""

  memory: int  # bytes
  flops: float | None = None  # bf16, a second
  bandwidth: float | None = None  # of its memory, bytes a second
  links: float | None = (
    None  # bytes a second that it can send to its neighbours, all links together
  )
  dimensions: int = 1  # of the torus that its slices are cut from


CHIPS = {
  "v5e": Chip(16 * 2**30, 197e12, 819e9, 180e9, 2),
  "v5p": Chip(95 * 2**30, 459e12, 2765e9, 540e9, 3),
  "v6e": Chip(32 * 2**30, 918e12, 1640e9, 360e9, 2),
}


def topology_devices(topology: str) -> tuple[list[Any], Chip]:
  """The devices of a topology, and what one of them can do.

  Args:
    topology: a TPU generation with the shape of a slice, as "v5p:4x4x4" (described by libtpu); or "cpu:8", the virtual devices of this
      process, of which nothing but their memory is known.

  Raises:
    UserError: a topology that does not exist, or libtpu is not installed.
  """
  kind, _, shape = topology.partition(":")
  if kind == "cpu":
    devices = jax.devices("cpu")
    if shape != str(len(devices)):
      raise UserError(
        f"topology {topology!r}: this process has {len(devices)} CPU device(s); set JAX_NUM_CPU_DEVICES={shape or 1}"
      )
    return devices, Chip(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices))
  if kind not in CHIPS:
    raise UserError(
      f"unknown topology {topology!r}{nearest(kind, [*CHIPS, 'cpu'])}; give one of {', '.join(CHIPS)} with a "
      f"shape, as v5p:4x4x4, or cpu:N"
    )
  chip = CHIPS[kind]
  sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"\d+(x\d+)*", shape) else []
  if len(sizes) != chip.dimensions or 0 in sizes:
    example = "x".join(["4"] * chip.dimensions)
    raise UserError(
      f"topology {topology!r}: a slice of {kind} has {chip.dimensions} dimensions, as {kind}:{example}"
    )
  # No chip is used: another process may have libtpu too. It complains where the others are not set; the topology named decides, not these.
  for name, value in (
    ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ("TPU_SKIP_MDS_QUERY", "1"),
    ("TPU_WORKER_HOSTNAMES", "localhost"),
    ("TPU_ACCELERATOR_TYPE", "v5p-8"),
  ):
    os.environ.setdefault(name, value)
  from jax.experimental import topologies

  one_chip = {"chips_per_host_bounds": [1] * 3} if set(sizes) == {1} else {}
  try:
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **one_chip)
  except Exception as error:  # libtpu raises its own kinds, absent or displeased
    raise UserError(
      f"topology {topology!r} cannot be described ({first_line(error)}); is libtpu installed (pip install 'gtpo_jax[plan]') "
      f"and the shape one that exists, as v5e:4x4?"
    ) from error
  return list(described.devices), chip
