"""Options of XLA's compiler for the programs of an update, by platform.

They are given to programs and not to the process, because what pays in an update may cost time or
memory in sampling. docs/hardware.md says where each comes from, and what was left at its default.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from gtpo_jax.runtime.mesh import island_of

FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class _Option(NamedTuple):
  """An option, and where it pays."""

  platform: str  # JAX's platform
  # "devices" if it pays with several devices, "islands" if with several TPU slices, "" if always
  across: str
  values: Mapping[str, Any]  # its value by its name; XLA's versions have different names for it


OPTIONS = (
  # By default, XLA for CPUs orders instructions so that many can run at once, which keeps more
  # arrays in memory. Those of an update are large enough to use all cores by themselves.
  _Option("cpu", "", {"xla_cpu_enable_concurrency_optimized_scheduler": False}),
  # The weights of the next layer are gathered while a layer is computed. Within the loop over the
  # layers, XLA's scheduler alone cannot do this, because it moves nothing across iterations.
  _Option(
    "gpu",
    "devices",
    {
      "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
      "xla_gpu_enable_pipelined_all_gather": True,  # before jax 0.12
    },
  ),
  # Gradients are summed over the slow network between slices while other layers are computed.
  _Option("tpu", "islands", {"xla_tpu_enable_data_parallel_all_reduce_opt": True}),
  _Option("tpu", "islands", {"xla_tpu_data_parallel_opt_different_sized_ops": True}),
)


def update_options(devices: Sequence[Any]) -> dict[str, Any]:
  """Returns the options for the programs of an update, for `jax.jit(compiler_options=...)`.

  An option that is set in `XLA_FLAGS` or `LIBTPU_INIT_ARGS` is left to these.

  Args:
    devices: the devices of the mesh; they need not be attached.
  """
  flags = " ".join(os.environ.get(name, "") for name in FLAG_VARIABLES)
  counts = {"devices": len(devices), "islands": len({island_of(device) for device in devices})}
  chosen = {}
  for option in OPTIONS:
    applies = option.platform == devices[0].platform and counts.get(option.across) != 1
    if not applies or any(name in flags for name in option.values):
      continue
    name = next(iter(option.values))
    if len(option.values) > 1:
      name = next((known for known in option.values if _is_known(known)), "")
    if name:
      chosen[name] = option.values[name]
  return chosen


@functools.cache
def _is_known(name: str) -> bool:
  """Whether the installed XLA has the option `name`. Options of the TPU compiler are not found."""
  values = next(option.values for option in OPTIONS if name in option.values)
  program = jax.jit(lambda: 0, compiler_options={name: values[name]})
  try:
    program.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "No such compile option" not in str(error):
      raise
    return False
  return True
