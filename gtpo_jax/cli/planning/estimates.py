"""Estimates of the memory of a step on given chips. In this file `c` is the architecture."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from gtpo_jax.checkpoint.opening import teacher_architecture
from gtpo_jax.config import Config, resolve_model
from gtpo_jax.config.roofline import weight_bytes
from gtpo_jax.config.updates import update_bytes
from gtpo_jax.models.config import DTYPES, ModelConfig
from gtpo_jax.models.params import matmul_params
from gtpo_jax.runtime.chips import Chip
from gtpo_jax.sampling.engine import triton_refusal
from gtpo_jax.sampling.paged.memory import LOGITS_COPIES
from gtpo_jax.sampling.settings import ACCELERATOR_CHUNK, DEFAULT_PAGE

# Positions of each slot in the temporaries of decoding, as in `paged.memory.temporary_bytes`.
WRITTEN_POSITIONS = ACCELERATOR_CHUNK + 4 * DEFAULT_PAGE


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
