"""Estimates of a step on given chips: lower bounds on its time (roofline), and its memory.

A bound is the number of FLOP, bytes read or bytes sent, divided by the peak rate of the chips.
Nothing is measured, and a real step is slower. In this file `c` is the model's architecture.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from gtpo_jax.checkpoint.opening import teacher_architecture
from gtpo_jax.config import Config, resolve_model
from gtpo_jax.config.updates import update_bytes
from gtpo_jax.models.config import DTYPES, ModelConfig
from gtpo_jax.models.delta.rule import rule_flops
from gtpo_jax.models.number_formats import FORMATS
from gtpo_jax.models.params import active_params, matmul_params
from gtpo_jax.runtime.chips import Chip
from gtpo_jax.sampling.engine import triton_refusal
from gtpo_jax.sampling.paged.memory import LOGITS_COPIES
from gtpo_jax.sampling.settings import ACCELERATOR_CHUNK, DEFAULT_PAGE

REMAT_FACTOR = 4 / 3  # forward and backward take 3 forward passes; remat recomputes one more


def weight_bytes(c: ModelConfig, dtype: str, quantized: str, expert: int = 1) -> float:
  """Returns the bytes of the matrices and the head, without adapters and the embedding lookup.

  Args:
    c: the architecture.
    dtype: format of the head, and of the matrices if they are not quantised.
    quantized: "int8", "int4" or "". The scales are left out.
    expert: the number of devices that share the experts.
  """
  head = c.vocab_size * c.width
  bits = 8 * DTYPES[dtype](0).itemsize
  matrix_bits = jnp.iinfo(FORMATS[quantized]).bits if quantized else bits
  matrices = matmul_params(c) - head - c.expert_params + c.expert_params / expert
  return (matrices * matrix_bits + head * bits) / 8


def update_flops(config: Config, c: ModelConfig) -> int:
  """Returns the model FLOP of a step's updates, without recomputation.

  All prompts and completions have their maximum length. The FLOP per token are
  3 (2 N + 2 layers heads head_dim S), with N the number of matrix parameters that compute a token,
  and S the positions. With a window of w positions, w (2 S - w) / S takes the place of S. In a
  gated delta net, the chunked rule takes the place of attention.
  """
  prompts = config.batch.prompts
  prompt_tokens = prompts * config.data.max_prompt_tokens
  completion_tokens = prompts * config.batch.group * config.sampling.max_tokens
  length = config.data.max_prompt_tokens + config.sampling.max_tokens
  windows = [min(kind.window or length, length) for kind in c.attention_kinds]
  attention = 2 * c.heads * c.head_dim * sum(w * (2 * length - w) // length for w in windows)
  rule = c.delta_layers * rule_flops(c.delta) if c.delta else 0
  per_token = 3 * (2 * active_params(c) + attention + rule)
  return (prompt_tokens + completion_tokens) * per_token * config.batch.epochs


def update_seconds(
  config: Config, c: ModelConfig, chip: Chip, devices: int, send_s: float
) -> float:
  """Returns the minimum seconds of a step's updates.

  This is the larger of the compute time (of `update_flops`, a third more with remat) and `send_s`,
  the least seconds that each device takes to send its part (`collectives.send_seconds`).
  """
  factor = 1.0 if config.model.remat == "none" else REMAT_FACTOR
  compute = update_flops(config, c) * factor / devices / chip.flops
  return max(compute, send_s)


def sample_seconds(
  config: Config, c: ModelConfig, chip: Chip, mesh: dict[str, int], slots: int
) -> float:
  """Returns the minimum seconds of sampling a step's completions, all of the maximum length.

  Each decode step reads the weights and all cached keys and values within the windows of their
  layers, and the states of gated delta nets. Weights are replicated over data and fsdp and sharded
  over tensor, experts' over expert too, and all experts are read. `slots` completions are
  decoded at once over all devices.
  """
  shards = mesh["data"] * mesh["expert"] * mesh["fsdp"]
  devices = shards * mesh["tensor"]
  itemsize = DTYPES[c.compute_dtype](0).itemsize
  quantized = c.quantize or config.sampling.weights_dtype
  weights = weight_bytes(c, c.compute_dtype, quantized, mesh["expert"]) / mesh["tensor"]
  rows = config.batch.prompts * config.policy_completions / shards
  length = config.sampling.max_tokens
  prompt_length = config.data.max_prompt_tokens
  rounds = math.ceil(rows / (slots / shards))
  rows /= rounds
  kv_shards = min(mesh["tensor"], c.kv_heads)
  kv_bytes = 2 * c.kv_heads * c.head_dim * itemsize / kv_shards  # per position and layer
  positions = 0.0  # of all layers, on average over the steps
  for kind in c.attention_kinds:
    window = min(kind.window or length, length)
    positions += rows * window * (2 * length - window) / (2 * length)
    in_prompt = np.clip((kind.window or math.inf) - np.arange(length), 0, prompt_length).mean()
    positions += rows / config.policy_completions * in_prompt
  bytes_read = weights + kv_bytes * positions
  if c.delta:  # states are read, and written again
    bytes_read += 2 * rows * c.delta_layers * c.delta.memory_bytes / mesh["tensor"]
  decode_flops = 2 * active_params(c) * rows / mesh["tensor"]
  prefill_flops = 2 * active_params(c) * config.batch.prompts * prompt_length / devices
  token_seconds = max(bytes_read / chip.memory_bandwidth, decode_flops / chip.flops)
  return prefill_flops / chip.flops + rounds * length * token_seconds


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
