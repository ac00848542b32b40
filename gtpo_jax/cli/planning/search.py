"""Searches meshes and memory-saving settings for a run that does not fit, by estimates.

The estimates only order and filter the candidates; `gtpo plan` compiles the best of them. In this
file `c` is the model's architecture.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gtpo_jax.checkpoint.opening import teacher_architecture
from gtpo_jax.cli.planning.collectives import Collective, send_seconds
from gtpo_jax.config import Config, flatten, freeze, resolve_model, to_dict
from gtpo_jax.config.mesh_choice import all_meshes
from gtpo_jax.config.roofline import sample_seconds, update_seconds, weight_bytes
from gtpo_jax.config.updates import micro_batch_counts, tokens_per_part, update_bytes
from gtpo_jax.models.config import DTYPES, ModelConfig
from gtpo_jax.models.number_formats import FORMATS
from gtpo_jax.models.params import matmul_params
from gtpo_jax.runtime.chips import Chip
from gtpo_jax.runtime.fields import AUTO
from gtpo_jax.runtime.mesh import MESH_AXES
from gtpo_jax.sampling.engine import triton_refusal
from gtpo_jax.sampling.paged.memory import LOGITS_COPIES
from gtpo_jax.sampling.settings import ACCELERATOR_CHUNK, DEFAULT_PAGE

# Per layer and pass over it, how many times positions are gathered or scattered over tensor; and
# the number of passes with full remat: forward, recomputation, backward.
TENSOR_TRANSFERS = 4
PASSES = 3
IMPERFECT_OVERLAP = 0.25  # the part of sending that computing does not hide

# Positions of each slot in the temporaries of decoding, as in `paged.memory.temporary_bytes`.
WRITTEN_POSITIONS = ACCELERATOR_CHUNK + 4 * DEFAULT_PAGE


class Candidate(NamedTuple):
  """Overrides for a run, and estimates of their costs."""

  override: dict[str, Any]  # config values by dotted name
  update: float  # bytes of the update on one device
  sampling: float  # the fewest bytes of sampling on one device
  seconds: float  # of a step


class Base(NamedTuple):
  """The levers that both the update and sampling depend on."""

  mesh: dict[str, int]  # axis -> size
  offload: bool  # whether the optimizer's moments are in host memory
  quantize: str  # format of a base under adapters


class MemoryModel:
  """Estimates the bytes that the update and sampling need on one device.

  Attributes:
    architecture: the model's, with the config's own format.
  """

  def __init__(self, config: Config, chip: Chip):
    """Args:
    config: the config of the run.
    chip: the kind of device.
    """
    self._config = config
    self._gpu = chip.gpu
    self.architecture = resolve_model(config).config
    self._teacher = teacher_architecture(config, self.architecture)

  def update_bytes(self, base: Base, micro_batches: int) -> float:
    """Estimates the bytes of the update on one device."""
    c = self.architecture_of(base)
    needed = update_bytes(self._config, c, base.mesh, self._config.model.remat, micro_batches)
    return self.state_bytes(base) + needed

  def sampling_bytes(self, base: Base, slots: int) -> float:
    """Estimates the fewest bytes of sampling on one device.

    Pages need not hold more than a prompt and a completion, because others wait. Arrays hold all
    slots.
    """
    config = self._config
    c = self.architecture_of(base)
    shards, tensor = self.sampling_shards(base.mesh)
    itemsize = DTYPES[c.compute_dtype](0).itemsize
    stored = c.quantize or config.sampling.weights_dtype
    weights = weight_bytes(c, c.compute_dtype, stored, base.mesh["expert"]) / tensor
    if not c.tied:  # the embedding lookup
      weights += c.vocab_size * c.width * itemsize / tensor
    if self._can_share(base):
      weights = 0
    rows = -(-min(slots, max(config.sampling_demand.completions, shards)) // shards)
    kv = self._kv_bytes(tensor)
    completion = self.completion_bytes(tensor)
    if self.is_paged:
      temporaries = rows * kv * WRITTEN_POSITIONS
      cache = completion + kv * config.data.max_prompt_tokens
    else:
      temporaries = 0.5 * rows * completion  # arrays that grow
      cache = rows * completion
    logits = 4 * LOGITS_COPIES * rows * c.vocab_size / tensor
    if c.delta:  # of slots and of cached prompts
      share = 1 + 1.5 / self._config.policy_completions
      cache += rows * share * c.delta_layers * c.delta.memory_bytes / tensor
    return self.state_bytes(base) + weights + cache + temporaries + logits

  @property
  def is_paged(self) -> bool:
    """Whether keys and values are in pages, as the engine decides."""
    attention = self._config.sampling.attention
    gpu = self._gpu
    if attention or not gpu:
      return attention != "xla"
    return not triton_refusal(gpu.capability, self.architecture.head_dim)

  def _can_share(self, base: Base) -> bool:
    """Whether the sampler reads the base itself if memory is short; see `model.base_layout`."""
    config = self._config
    divided = math.prod(base.mesh[axis] for axis in ("expert", "fsdp", "context")) > 1
    merges = not base.quantize and config.sampling.merge_adapters == "always"
    stays = config.model.base_layout == "stacked" or config.sampling.weights_dtype
    return bool(config.model.lora_rank and not (divided or merges or stays))

  def architecture_of(self, base: Base) -> ModelConfig:
    """Returns the architecture with a format of the base."""
    return dataclasses.replace(self.architecture, quantize=base.quantize)

  def sampling_shards(self, mesh: dict[str, int]) -> tuple[int, int]:
    """Returns the shards of the batch and of the heads while sampling, as in `sampling_mesh`."""
    c = self.architecture
    shards = mesh["data"] * mesh["expert"] * mesh["fsdp"]
    both = mesh["context"] * mesh["tensor"]
    if all(size % both == 0 for size in (c.kv_heads, *c.mlps)):
      return shards, both
    return shards * mesh["context"], mesh["tensor"]

  def _kv_bytes(self, tensor: int) -> float:
    """Estimates the bytes of keys and values of one position on one of `tensor` shards."""
    c = self.architecture
    dtype = self._config.sampling.kv_dtype or c.compute_dtype
    itemsize = 1 if dtype == "int8" else DTYPES[dtype](0).itemsize
    kv = 2 * len(c.attention_kinds) * c.kv_heads * c.head_dim * itemsize
    return kv / tensor if c.kv_heads % tensor == 0 else kv

  def completion_bytes(self, tensor: int) -> float:
    """Estimates the bytes of one completion of the maximum length, with its share of a prompt."""
    prompt = self._config.data.max_prompt_tokens / self._config.policy_completions
    return self._kv_bytes(tensor) * (self._config.sampling.max_tokens + prompt)

  def state_bytes(self, base: Base) -> float:
    """Estimates the bytes of parameters, moments and frozen policies on one device."""
    c = self.architecture_of(base)
    mesh = base.mesh
    shards = math.prod(mesh.values()) // mesh["data"]
    moments = 0 if base.offload or c.lora.rank else 8
    params = weight_bytes(c, c.param_dtype, c.quantize)
    config = self._config
    settings = config.resolved_algorithm.settings
    shares = bool(c.lora.rank) and not config.reference.path
    frozen = params / shards if settings.kl_weight and not shares else 0
    if settings.guide_completions:
      frozen += weight_bytes(c, c.compute_dtype, c.quantize, mesh["expert"]) / mesh["tensor"]
    if config.teacher.is_frozen and not (c.lora.rank and config.teacher.policy):
      teacher = self._teacher
      frozen += weight_bytes(teacher, teacher.param_dtype, teacher.quantize) / shards
    return (params + moments * matmul_params(c)) / shards + frozen


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
