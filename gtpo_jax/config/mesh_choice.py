"""Proposes a mesh for a run that cannot be sharded over its own."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from gtpo_jax.config import Config, resolve_model
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.params import abstract_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import MESH_AXES, batch_shards, make_mesh
from gtpo_jax.training.packing import check_batch_divisible, check_positions_divisible, group_parts

Sizes = tuple[int, ...]  # of the mesh axes, in the order of `MESH_AXES`


@contextlib.contextmanager
def proposing_mesh(config: Config, devices: Sequence[Any] | None = None) -> Iterator[None]:
  """Adds a mesh that works to a UserError of the body, if the config's own mesh does not.

  Args:
    config: the run's config.
    devices: the devices of the mesh, which need not be attached; default: all of this run.
  """
  try:
    yield
  except UserError as error:
    sizes = working_mesh(config, jax.devices() if devices is None else devices)
    if sizes is None:
      raise
    flags = " ".join(
      f"--config.mesh.{name}={size}" for name, size in zip(MESH_AXES, sizes, strict=True)
    )
    raise UserError(f"{error}; a mesh that works: {flags}") from error


def working_mesh(config: Config, devices: Sequence[Any]) -> Sizes | None:
  """Returns the mesh most like the config's over which its model and batches can be sharded.

  Returns None if the config's own mesh works, if it does not fit the devices, or if none works.
  """
  try:
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
    model = resolve_model(config, devices[0]).config
  except UserError:  # whose message says what to do
    return None
  wanted = mesh.devices.shape
  for sizes in sorted(all_meshes(len(devices), model), key=lambda sizes: _distance(sizes, wanted)):
    shape = dict(zip(MESH_AXES, sizes, strict=True))
    if _works(config, Transformer(model, make_mesh(**shape, devices=devices))):
      return None if sizes == wanted else sizes
  return None


def check_divisible(config: Config, model: Transformer) -> None:
  """Checks that a run's batches and positions can be sharded over the mesh of its model."""
  if model.mesh.shape["expert"] > 1 and model.config.mixture is None:
    raise UserError(
      f"mesh.expert = {model.mesh.shape['expert']}, but the model has no experts; use mesh.fsdp"
    )
  batch = config.batch
  shards = batch_shards(model.mesh)
  groups = group_parts(batch.prompts, batch.parts, shards)
  whole = batch.minibatches if groups > 1 else batch.parts
  check_batch_divisible("batch.prompts", batch.prompts, whole, model)
  uneven = batch.prompts * groups % (batch.parts * shards) or batch.group % groups
  if groups > 1 and (uneven or config.env.agent):
    prompts = batch.prompts // batch.minibatches // shards
    evenly = f"groups of batch.group = {batch.group} do not divide evenly into so many parts"
    reason = "an agent's conversations cannot be divided" if config.env.agent else evenly
    raise UserError(
      f"batch.micro_batches = {batch.micro_batches} is more than the {prompts} prompts of a "
      f"device, and {reason}; lower it to {prompts}"
    )
  check_positions_divisible(config.sampling.max_tokens, model)
  if config.warm_start.steps:
    check_batch_divisible("warm_start.batch", config.warm_start.batch, 1, model)


def _works(config: Config, model: Transformer) -> bool:
  try:
    check_divisible(config, model)
    abstract_params(model)
  except UserError:
    return False
  return True


def all_meshes(count: int, model: ModelConfig) -> list[Sizes]:
  """Returns the sizes of all meshes of `count` devices over which the model's experts divide."""
  divisors = [size for size in range(1, count + 1) if count % size == 0]
  several = itertools.product(divisors, repeat=len(MESH_AXES))
  experts = model.mixture.experts if model.mixture else 1
  fits = lambda sizes: experts % sizes[MESH_AXES.index("expert")] == 0
  return [sizes for sizes in several if math.prod(sizes) == count and fits(sizes)]


def _distance(sizes: Sizes, wanted: Sizes) -> tuple[float, Sizes]:
  """Returns by which factors the axes differ, in bits. Of equals, less tensor comes first."""
  factors = [abs(math.log2(a / b)) for a, b in zip(sizes, wanted, strict=True)]
  return sum(factors), sizes[::-1]
