"""Compiles a run's update and sampler ahead of time and returns their peak memory per device."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

from gtpo_jax.arrays import Rewards, Rollouts
from gtpo_jax.config import Config, resolve_model
from gtpo_jax.models.config import DTYPES
from gtpo_jax.models.lora import without_lora
from gtpo_jax.models.params import abstract_params
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.rollout.groups import batch_like
from gtpo_jax.runtime.mesh import axis_size, make_mesh, named_sharding
from gtpo_jax.runtime.startup import use_compile_cache
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.training.micro_batches import check_batch_divisible, check_positions_divisible
from gtpo_jax.training.state import Optimizer, abstract_state, make_optimizer
from gtpo_jax.training.update import make_update


def build_model(config: Config, devices: list[Any]) -> Qwen2:
  """Returns the run's model on a mesh of these devices.

  Raises:
    UserError: the mesh does not fit the devices, or batch or positions cannot be sharded over it.
  """
  mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
  model = Qwen2(resolve_model(config).config, mesh)
  check_batch_divisible("batch.prompts", config.batch.prompts, config.batch.parts, model)
  check_positions_divisible(config.sampling.max_tokens, model)
  return model


def build_engine(config: Config, model: Qwen2) -> Engine:
  """Returns the run's engine. Its stop tokens are arbitrary: they do not change the programs."""
  return Engine(
    model,
    stop=(0, 1),
    pad=0,
    max_prompt_tokens=config.data.max_prompt_tokens,
    max_tokens=config.sampling.max_tokens,
    engine_config=config.engine_config,
  )


def build_optimizer(config: Config) -> Optimizer:
  """Returns the run's optimizer."""
  coef = config.resolved_algorithm.initial_entropy_coef
  return make_optimizer(config.optimizer, config.steps, config.batch.updates, coef)


def abstract_batch(config: Config, model: Qwen2) -> tuple[Rollouts, Rewards]:
  """Returns the shapes of one step's rollouts and rewards on the mesh, without allocating them."""
  sharding = named_sharding(model.mesh, "batch")
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch_like(config)
  )


def compile_programs(
  config: Config, model: Qwen2
) -> Iterator[tuple[int, jax.stages.Compiled | None]]:
  """Compiles the update, then the sampler, each when the iterator reaches it.

  Yields:
    The peak bytes on one device while the program runs, including everything else that is in memory
    at that time, and the program. If compilation fails for lack of memory, the program is None, and
    the bytes are those that the compiler reports.
  """
  yield _compile_update(config, model)
  yield _compile_sampler(config, model)


def _compile_update(config: Config, model: Qwen2) -> tuple[int, jax.stages.Compiled | None]:
  optimizer = build_optimizer(config)
  arguments = (abstract_state(model, optimizer), *abstract_batch(config, model))
  update = make_update(
    model,
    config.resolved_algorithm,
    optimizer,
    temperature=config.sampling.temperature,
    minibatches=config.batch.minibatches,
    epochs=config.batch.epochs,
    micro_batches=config.batch.micro_batches,
    head_chunk=config.batch.head_chunk,
  )
  peak, program = compile_with_peak(update.lower(*arguments), arguments)
  return peak + frozen_bytes(config, model), program


def _compile_sampler(config: Config, model: Qwen2) -> tuple[int, jax.stages.Compiled | None]:
  state = abstract_state(model, build_optimizer(config))
  lowered_programs = build_engine(config, model).programs.lower(
    state.params,
    config.batch.prompts,
    group=config.policy_completions,
    sampling_params=config.sampling_params,
  )
  peaks = []
  for name, lowered, arguments in lowered_programs:
    peak, program = compile_with_peak(lowered, arguments)
    # The peak of the layout program includes the parameters, its argument. They stay in memory
    # during the later programs too.
    resident = 0 if name == "layout" else bytes_per_device(state.params)
    peaks.append(peak + resident)
    if program is None:
      break  # the next program takes the output of this one
  resident = frozen_bytes(config, model) + bytes_per_device(state.opt_state)
  return max(peaks) + resident, program


def compile_with_peak(
  lowered: jax.stages.Lowered, arguments: Any
) -> tuple[int, jax.stages.Compiled | None]:
  """Compiles a program.

  Returns:
    The peak bytes on one device, including the arguments, and the program. If compilation fails for
    lack of memory, the program is None, and the bytes are those that the compiler reports.
  """
  try:
    with _no_compile_cache():
      compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    needed = re.search(r"temporaries \(([\d.]+)([KMGT])\)|Used ([\d.]+)([KMGT]) of", str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or not needed:
      raise
    temporaries, temporaries_unit, total, total_unit = needed.groups()
    if temporaries:
      return _to_bytes(temporaries, temporaries_unit) + bytes_per_device(arguments), None
    return _to_bytes(total, total_unit), None
  analysis = compiled.memory_analysis()
  device, *_ = jax.tree.leaves(arguments)[0].sharding.device_set
  # The peak that XLA reports for a CPU program does not include its temporaries.
  omitted = analysis.temp_size_in_bytes if device.platform == "cpu" else 0
  return analysis.peak_memory_in_bytes + omitted, compiled


def _to_bytes(number: str, unit: str) -> int:
  return int(float(number) * 1024 ** ("KMGT".index(unit) + 1))


@contextlib.contextmanager
def _no_compile_cache() -> Iterator[None]:
  """Turns off JAX's compile cache, which cannot load programs for devices that are not attached."""
  before = jax.config.jax_enable_compilation_cache
  use_compile_cache(False)
  try:
    yield
  finally:
    use_compile_cache(before)


def frozen_bytes(config: Config, model: Qwen2) -> int:
  """Returns the bytes per device of the frozen reference and guide, which are always in memory.

  Each has as many parameters as the policy. The guide is stored in the compute dtype.
  """
  settings = config.resolved_algorithm.settings
  params = abstract_params(without_lora(model))
  total = 0
  if settings.kl_weight:
    total += bytes_per_device(params)
  if settings.guide_completions:
    dtype = DTYPES[model.config.compute_dtype]
    guide = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), params
    )
    # The sampler keeps the guide's weights gathered over this axis.
    gathered = axis_size(build_engine(config, model).model.mesh, "embed")
    total += bytes_per_device(guide) * gathered
  return total


def bytes_per_device(tree: Any) -> int:
  """Returns the bytes of `tree` on one device; arrays in host memory do not count."""
  on_device = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != "pinned_host"]
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in on_device)
