"""The optimizer and the update that a config describes, and the memory beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.config.run_config import Config
from gtpo_jax.models.config import DTYPES
from gtpo_jax.models.lora import without_lora
from gtpo_jax.models.params import abstract_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import axis_size, bytes_per_device, sampling_mesh
from gtpo_jax.sampling.settings import Demand
from gtpo_jax.training.state import Optimizer, abstract_state, make_optimizer
from gtpo_jax.training.update import Update, make_update

# The share of a device's memory that sampling leaves free, for fragments between arrays, the
# buffers of collectives, and what the compiler's estimates leave out. A CPU shares its memory with
# other programs, and with the host's side of the run.
RESERVE = 1 / 16
CPU_RESERVE = 1 / 3


def run_optimizer(config: Config) -> Optimizer:
  """Returns the optimizer of the run."""
  coef = config.resolved_algorithm.recipe.entropy_bonus.initial_coef
  return make_optimizer(config.optimizer, config.steps, config.batch.updates, coef)


def run_update(
  config: Config, model: Transformer, optimizer: Optimizer, teacher: Transformer | None = None
) -> Update:
  """Returns the training step of the run for `model`, on its mesh, with its `teacher`."""
  return make_update(
    model,
    config.resolved_algorithm,
    optimizer,
    temperature=config.sampling.temperature,
    minibatches=config.batch.minibatches,
    epochs=config.batch.epochs,
    micro_batches=config.batch.micro_batches,
    head_chunk=config.batch.head_chunk,
    teacher=teacher if config.resolved_algorithm.recipe.matches_distributions else None,
  )


def run_demand(
  config: Config,
  model: Transformer,
  memory: int | None,
  trains: bool = True,
  teacher: Transformer | None = None,
) -> Demand:
  """Returns what the run samples, and the memory that is left for it.

  Args:
    config: the config of the run.
    model: its model, on the training mesh.
    memory: the bytes of each device that programs can use; None if unknown.
    trains: whether the model is trained, so that its state is in memory too.
    teacher: the teacher, if there is one.
  """
  demand = config.sampling_demand
  if memory is None:
    return demand
  reserve = CPU_RESERVE if model.mesh.devices.flat[0].platform == "cpu" else RESERVE
  kept = abstract_params(model)
  if trains:
    kept = abstract_state(model, run_optimizer(config))
  left = int(memory * (1 - reserve)) - bytes_per_device(kept)
  if trains:
    left -= frozen_bytes(config, model, teacher)
  return demand._replace(memory=max(left, 0))


def frozen_bytes(config: Config, model: Transformer, teacher: Transformer | None) -> int:
  """Returns the bytes per device of the frozen policies, which are always in memory.

  Reference and guide are taken to be as large as the policy. The guide is stored in the compute
  dtype.
  """
  settings = config.resolved_algorithm.settings
  params = abstract_params(model if model.config.quantize else without_lora(model))
  kept = teacher and config.teacher.is_frozen
  total = bytes_per_device(abstract_params(teacher)) if kept else 0
  if settings.kl_weight:
    total += bytes_per_device(params)
  if settings.guide_completions:
    dtype = DTYPES[model.config.compute_dtype]
    kept = lambda x: x.dtype if jnp.issubdtype(x.dtype, jnp.integer) else dtype
    guide = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, kept(x), sharding=x.sharding), params
    )
    # The sampler keeps the guide's weights gathered over this axis.
    mesh = sampling_mesh(model.mesh, model.config.kv_heads, model.config.mlp)
    total += bytes_per_device(guide) * axis_size(mesh, "embed")
  return total
