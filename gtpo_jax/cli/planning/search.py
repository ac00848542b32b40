"""Searches meshes and memory-saving settings for a run that does not fit, by estimates.

The estimates only order and filter the candidates; `gtpo plan` compiles the best of them. In this
file `c` is the model's architecture.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gtpo_jax.cli.planning.collectives import Collective, send_seconds
from gtpo_jax.cli.planning.estimates import Base, MemoryModel
from gtpo_jax.config import Config, flatten, freeze, to_dict
from gtpo_jax.config.mesh_choice import all_meshes
from gtpo_jax.config.roofline import sample_seconds, update_seconds
from gtpo_jax.config.updates import micro_batch_counts, tokens_per_part
from gtpo_jax.models.config import DTYPES, ModelConfig
from gtpo_jax.models.number_formats import FORMATS
from gtpo_jax.models.params import matmul_params
from gtpo_jax.runtime.chips import Chip
from gtpo_jax.runtime.fields import AUTO
from gtpo_jax.runtime.mesh import MESH_AXES

# Per layer and pass over it, how many times positions are gathered or scattered over tensor; and
# the number of passes with full remat: forward, recomputation, backward.
TENSOR_TRANSFERS = 4
PASSES = 3
IMPERFECT_OVERLAP = 0.25  # the part of sending that computing does not hide


class Candidate(NamedTuple):
  """Overrides for a run, and estimates of their costs."""

  override: dict[str, Any]  # config values by dotted name
  update: float  # bytes of the update on one device
  sampling: float  # the fewest bytes of sampling on one device
  seconds: float  # of a step


class Search:
  """Estimates the costs of changing a run's levers, and lists the changes that may make it fit.

  The levers are the mesh, the micro-batches, whether the optimizer's moments are in host memory,
  the slots, and the format of a base under adapters. Pages take the memory that is left.

  Attributes:
    memory: estimates the bytes that they need.
  """

  def __init__(self, config: Config, devices: int, chip: Chip, nodes: Sequence[int]):
    """Args:
    config: the config of the run.
    devices: the number of devices.
    chip: their rates, all of them known.
    nodes: the index of each device's node.
    """
    self.config = config
    self.devices = devices
    self.chip = chip
    self.nodes = nodes
    self.memory = MemoryModel(config, chip)
    self.architecture = self.memory.architecture

  def candidates(self, update_memory: float, sampling_memory: float) -> list[Candidate]:
    """Returns overrides that may make a run fit, the fastest first.

    For each mesh there are the fewest micro-batches and the most slots that are estimated to fit. A
    quantised base changes what is learned, so candidates with one come last, int8 before int4.
    """
    found = []
    memory = self.memory
    for base in self.bases():
      parts = (x for x in self.micro_batches(base) if memory.update_bytes(base, x) <= update_memory)
      slots = (x for x in self.slots(base) if memory.sampling_bytes(base, x) <= sampling_memory)
      first_parts = next(parts, None)
      first_slots = next(slots, None)
      if first_parts and first_slots:
        found.append(self.candidate(base, first_parts, first_slots, sampling_memory))
    formats = self.formats()

    def rank(candidate: Candidate) -> tuple[float, ...]:
      # Of candidates that are equally fast within one percent, the one that needs least memory.
      seconds = round(math.log(candidate.seconds), 2)
      quantized = formats.index(candidate.override["model.quantize"])
      return quantized, seconds, max(candidate.update, candidate.sampling)

    return sorted(found, key=rank)

  def by_memory(self) -> list[Candidate]:
    """Returns the combination that needs least memory of every mesh and format, the least first."""
    found = (
      self.candidate(base, self.micro_batches(base)[-1], self.slots(base)[-1], 0)
      for base in self.bases()
    )
    return sorted(found, key=lambda x: max(x.update, x.sampling))

  def candidate(
    self, base: Base, micro_batches: int, slots: int, sampling_memory: float
  ) -> Candidate:
    """Returns one combination of the levers, with its costs."""
    mesh = base.mesh
    override = {f"mesh.{name}": size for name, size in mesh.items()}
    override["batch.micro_batches"] = micro_batches
    override["optimizer.offload"] = base.offload
    if self.chip.gpu and self.config.model.remat == AUTO:
      override["model.remat"] = "full"
    override["model.quantize"] = base.quantize
    if slots != self.slots(base)[0]:
      override["sampling.slots"] = slots
    needed = self.memory.sampling_bytes(base, slots)
    at_once = slots
    if self.memory.is_paged:
      override["sampling.cache_fraction"] = AUTO
      shards, tensor = self.memory.sampling_shards(mesh)
      more = max(sampling_memory - needed, 0) / self.memory.completion_bytes(tensor)
      at_once = min(slots, shards * (1 + int(more)))
    c = self.memory.architecture_of(base)
    seconds = _seconds(self.config, c, self.chip, mesh, micro_batches, at_once, self.nodes)
    # The transfers of moments overlap with little, so a run with them is slower.
    seconds += base.offload
    return Candidate(override, self.memory.update_bytes(base, micro_batches), needed, seconds)

  def bases(self) -> Iterator[Base]:
    """Yields every combination of format, mesh, and place of the moments."""
    meshes = list(self.meshes())
    for quantize, mesh, offload in itertools.product(self.formats(), meshes, self.offloads()):
      yield Base(mesh, offload, quantize)

  def formats(self) -> tuple[str, ...]:
    """Returns the formats of the base: the config's own, and smaller ones under adapters."""
    m = self.config.model
    if m.quantize or not m.lora_rank or self.config.sampling.weights_dtype:
      return (m.quantize,)
    return ("", *FORMATS)

  def meshes(self) -> Iterator[dict[str, int]]:
    """Yields the meshes over which the model, the batch and the positions divide."""
    config = self.config
    c = self.architecture
    prompts = config.batch.prompts // config.batch.minibatches
    for sizes in all_meshes(self.devices, c):
      data, expert, fsdp, context, tensor = sizes
      if prompts % (data * expert * fsdp):
        continue
      both = context * tensor
      if c.heads % tensor or any(mlp % tensor for mlp in c.mlps) or c.vocab_size % both:
        continue
      if c.width % (expert * fsdp * context):
        continue
      if context > 1 and (c.delta or config.sampling.max_tokens % both):
        continue
      if c.delta and c.delta.key_heads % tensor:
        continue
      yield dict(zip(MESH_AXES, sizes, strict=True))

  def offloads(self) -> tuple[bool, ...]:
    """Returns whether the moments are in host memory: as in the config first, then True."""
    # The compiler knows no host memory of a GPU that is not attached.
    if self.chip.gpu:
      return (False,)
    return tuple(sorted({self.config.optimizer.offload, True}))

  def slots(self, base: Base) -> list[int]:
    """Returns numbers of slots, over all devices, from the config's own down to one per shard."""
    shards, _ = self.memory.sampling_shards(base.mesh)
    own = self.config.engine_config.most_slots("gpu" if self.chip.gpu else "tpu", shards)
    most = min(own, max(self.config.sampling_demand.completions, shards))
    halves = [most // 2**i // shards * shards for i in range(1, most.bit_length())]
    return [own, *(x for x in halves if x)]

  def micro_batches(self, base: Base) -> list[int]:
    """Returns the numbers of micro-batches into which a minibatch can be split, ascending."""
    return micro_batch_counts(self.config, base.mesh)


def with_overrides(config: Config, override: dict[str, Any]) -> Config:
  """Returns the config with the values of `override`, which are given by dotted name."""
  values: dict[str, Any] = {}
  for name, value in (flatten(to_dict(config)) | override).items():
    *sections, key = name.split(".")
    section = values
    for section_name in sections:
      section = section.setdefault(section_name, {})
    section[key] = value
  return freeze(values)


def changed(config: Config, override: dict[str, Any]) -> dict[str, Any]:
  """Returns the values of `override` that `config` does not have already."""
  values = flatten(to_dict(config))
  return {name: value for name, value in override.items() if values[name] != value}


def _seconds(
  config: Config,
  c: ModelConfig,
  chip: Chip,
  mesh: dict[str, int],
  micro_batches: int,
  slots: int,
  nodes: Sequence[int],
) -> float:
  """Estimates the seconds of a step: the roofline, with an estimate of the bytes sent."""
  data, expert, fsdp, context, tensor = mesh.values()
  devices = math.prod(mesh.values())
  itemsize = DTYPES[c.compute_dtype](0).itemsize
  weights = matmul_params(c) / tensor
  updates = config.batch.updates
  gathers = updates * micro_batches
  tokens = tokens_per_part(config, mesh, micro_batches) / context * gathers
  share = lambda size: (size - 1) / size
  trained = 0 if c.lora.rank else 4
  shards = expert * fsdp * context
  dense = weights - c.expert_params / tensor  # experts' is not gathered over their shards
  kv = 2 * c.kv_heads * c.head_dim * len(c.attention_kinds)
  sent = [  # (devices of a group, bytes)
    # Weights are gathered for the forward pass and for recomputation; their gradient is scattered.
    (shards * tensor, gathers * dense * (2 * itemsize + trained) * share(shards)),
    (
      fsdp * context * tensor,
      gathers * (weights - dense) / expert * (2 * itemsize + trained) * share(fsdp * context),
    ),
    # Tokens are gathered over the shards of experts, and their outputs are scattered.
    (
      expert * fsdp * context * tensor,
      PASSES * 2 * len(c.expert_layers) * tokens * c.width * itemsize * (expert - 1),
    ),
    (devices, updates * 2 * trained * weights / shards * share(data)),
    (tensor, PASSES * TENSOR_TRANSFERS * c.layers * tokens * c.width * itemsize * share(tensor)),
    (context * tensor, PASSES * kv * tokens * itemsize * share(context)),
  ]
  program = [Collective("", size, tuple(range(width))) for width, size in sent]
  send_s = send_seconds(program, chip, nodes)
  update = update_seconds(config, c, chip, devices, send_s)
  # Sending and computing do not overlap completely, so less is better even below the compute time.
  imperfect = IMPERFECT_OVERLAP * min(send_s, update)
  return update + imperfect + sample_seconds(config, c, chip, mesh, slots)
