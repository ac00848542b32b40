"""`gtpo plan`: compiles a run for hardware that is not attached; reports memory and time bounds."""

from __future__ import annotations

import time
from typing import Any

import jax

from gtpo_jax.config import Config
from gtpo_jax.models.causal import attention_kind
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.planning.collectives import collective_bytes
from gtpo_jax.planning.overrides import candidate_overrides, with_overrides
from gtpo_jax.planning.programs import (
  abstract_batch,
  build_engine,
  build_model,
  build_optimizer,
  bytes_per_device,
  compile_programs,
  frozen_bytes,
)
from gtpo_jax.planning.roofline import sample_seconds, update_flops, update_seconds
from gtpo_jax.planning.topology import Chip, topology_devices
from gtpo_jax.training.state import abstract_state


def plan(config: Config, topology: str) -> dict[str, Any]:
  """Compiles a run's update and sampler ahead of time; if they do not fit, tries overrides.

  Args:
    config: the config of the run.
    topology: for example "v5p:4x4x4" (through libtpu), or "cpu:8" for virtual devices of this
      machine.

  Returns:
    The result of `measure`, `topology`, and `override`: flags with which the run fits, checked by
    compiling; "" if it fits without flags, None if it fits with no candidate.

  Raises:
    UserError: the topology does not exist, or mesh, batch or positions cannot be sharded over it.
  """
  devices, chip = topology_devices(topology)
  result = measure(config, build_model(config, devices), chip)
  result |= {"topology": topology, "override": ""}
  if not result["fits"]:
    result["override"] = _fitting_override(config, devices, result["mesh"], chip)
  return result


def _fitting_override(
  config: Config, devices: list[Any], mesh: dict[str, int], chip: Chip
) -> str | None:
  """Returns the flags of the first candidate that fits, or None."""
  for override in candidate_overrides(config, mesh):
    candidate = with_overrides(config, override)
    programs = compile_programs(candidate, build_model(candidate, devices))
    if all(peak <= chip.memory for peak, _ in programs):
      return " ".join(f"--config.{name}={value}" for name, value in override.items())
  return None


def measure(config: Config, model: Qwen2, chip: Chip) -> dict[str, Any]:
  """Compiles a run on its mesh and returns its memory, communication and lower bounds on its time.

  Returns:
    For the run: `fits`, `devices`, `mesh`, `hbm_bytes` (memory of one device), `attention` (the
    kernel used for full sequences), `params` (number of parameters), `seconds_compile`.
    Per device: `params.bytes`, `optimizer.bytes` (in device memory), `cache.bytes` (the KV cache of
    the completions that are sampled concurrently), `update.peak_bytes`, `update.activation_bytes`
    (`update.peak_bytes` without state, batch and frozen models), `sample.peak_bytes` (including the
    state), `update.sent_bytes` (to other devices; None if the compiler ran out of memory).
    `update.flops` is the model FLOP of all devices together, without recomputation.
    `update.seconds` and `sample.seconds` are lower bounds (roofline), None if the speed of the chip
    is unknown.
  """
  started = time.perf_counter()
  state = abstract_state(model, build_optimizer(config))
  batch = abstract_batch(config, model)
  (update_peak, update), (sample_peak, _) = compile_programs(config, model)
  seconds_compile = time.perf_counter() - started
  devices = model.mesh.size
  sent = None if update is None else sum(collective_bytes(update.as_text()).values())
  engine = build_engine(config, model)
  caches = engine.programs.caches(
    config.batch.prompts, group=config.policy_completions, sampling_params=config.sampling_params
  )
  resident = frozen_bytes(config, model) + bytes_per_device((state, batch))
  seconds: dict[str, float | None] = {"update.seconds": None, "sample.seconds": None}
  if chip.flops is not None:
    seconds["update.seconds"] = update_seconds(config, model.config, chip, devices, sent or 0)
    seconds["sample.seconds"] = sample_seconds(
      config, model.config, chip, engine.model.mesh.shape, engine.programs.config.slots
    )
  return {
    "devices": devices,
    "mesh": dict(model.mesh.shape),
    "hbm_bytes": chip.memory,
    "attention": attention_kind(model.config, model.mesh),
    "params": sum(x.size for x in jax.tree.leaves(state.params)),
    "params.bytes": bytes_per_device(state.params),
    "optimizer.bytes": bytes_per_device(state.opt_state),
    "cache.bytes": bytes_per_device([cache.kv for cache in caches]),
    "update.peak_bytes": update_peak,
    "sample.peak_bytes": sample_peak,
    "update.sent_bytes": sent,
    "update.activation_bytes": update_peak - resident,
    "update.flops": update_flops(config, model.config),
    **seconds,
    "fits": max(update_peak, sample_peak) <= chip.memory,
    "seconds_compile": seconds_compile,
  }
