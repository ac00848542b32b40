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

from gtpo_jax.config import Config, flatten, freeze, resolve_model, to_dict
from gtpo_jax.config.mesh_choice import all_meshes
from gtpo_jax.models.config import DTYPES, ModelConfig
from gtpo_jax.models.params import matmul_params
from gtpo_jax.models.quantize import FORMATS
from gtpo_jax.planning.collectives import Collective, send_seconds
from gtpo_jax.planning.roofline import sample_seconds, update_seconds, weight_bytes
from gtpo_jax.runtime.chips import Chip
from gtpo_jax.runtime.mesh import MESH_AXES
from gtpo_jax.sampling.params import ACCELERATOR_SLOTS

# Per layer and pass over it, how many times positions are gathered or scattered over tensor; and
# the number of passes with full remat: forward, recomputation, backward.
TENSOR_TRANSFERS = 4
PASSES = 3
IMPERFECT_OVERLAP = 0.25  # the part of sending that computing does not hide


class Candidate(NamedTuple):
  """Overrides for a run, and estimates of what they cost.

  Attributes:
    override: config values by dotted name.
    update: bytes of the update on one device.
    sampling: bytes of sampling on one device.
    seconds: of a step.
  """

  override: dict[str, Any]
  update: float
  sampling: float
  seconds: float


def candidates(
  config: Config,
  devices: int,
  chip: Chip,
  nodes: Sequence[int],
  *,
  update_memory: float,
  sampling_memory: float,
) -> list[Candidate]:
  """Returns overrides that may make a run fit, the fastest first.

  They set the mesh, the micro-batches, whether the optimizer's moments are in host memory, the
  slots, and the format of a base under adapters. For each mesh there are the fewest micro-batches
  and the most slots that are estimated to fit. A quantised base changes what is learned, so
  candidates with one come last, int8 before int4.

  Args:
    config: the config of the run.
    devices: the number of devices.
    chip: their rates, all of them known.
    nodes: the index of each device's node.
    update_memory: the bytes of a device that the update can use.
    sampling_memory: the bytes of a device that sampling can use.
  """
  architecture = resolve_model(config).config
  formats = _formats(config)
  found = []
  for quantized, mesh in itertools.product(formats, _meshes(config, architecture, devices)):
    c = dataclasses.replace(architecture, quantize=quantized)
    # The compiler knows no host memory of a GPU that is not attached.
    for offload in (False,) if chip.gpu else sorted({config.optimizer.offload, True}):
      state = _state_bytes(c, mesh, offload)
      choices = [(x, _update_bytes(config, c, mesh, x)) for x in _micro_batches(config, mesh)]
      micro_batches, update = _first_fitting(choices, update_memory - state)
      choices = [(x, _sampling_bytes(config, c, mesh, x)) for x in _slots(config, mesh)]
      slots, sampling = _first_fitting(choices, sampling_memory - state)
      if not micro_batches or not slots:
        continue
      override = {f"mesh.{name}": size for name, size in mesh.items()}
      override["batch.micro_batches"] = micro_batches
      override["optimizer.offload"] = offload
      override["model.quantize"] = quantized
      if slots != choices[0][0]:
        override["sampling.slots"] = slots
      seconds = _seconds(config, c, chip, mesh, micro_batches, slots, nodes)
      # The transfers of moments overlap with little, so a run with them is slower.
      found.append(Candidate(override, state + update, state + sampling, seconds + offload))

  def rank(candidate: Candidate) -> tuple[float, ...]:
    # Of candidates that are equally fast within one percent, the one that needs least memory.
    seconds = round(math.log(candidate.seconds), 2)
    quantized = formats.index(candidate.override["model.quantize"])
    return quantized, seconds, max(candidate.update, candidate.sampling)

  return sorted(found, key=rank)


def _first_fitting(choices: Sequence[tuple[int, float]], limit: float) -> tuple[int, float]:
  """Returns the first of (value, bytes) whose bytes are within the limit; (0, 0.0) if none is."""
  return next((choice for choice in choices if choice[1] <= limit), (0, 0.0))


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


def _meshes(config: Config, c: ModelConfig, devices: int) -> Iterator[dict[str, int]]:
  """Yields the meshes over which the model, the batch and the positions divide."""
  prompts = config.batch.prompts // config.batch.minibatches
  for sizes in all_meshes(devices):
    data, fsdp, context, tensor = sizes
    if prompts % (data * fsdp):
      continue
    both = context * tensor
    if c.heads % tensor or c.mlp % tensor or c.vocab_size % both or c.width % (fsdp * context):
      continue
    if context > 1 and config.sampling.max_tokens % both:
      continue
    yield dict(zip(MESH_AXES, sizes, strict=True))


def _formats(config: Config) -> tuple[str, ...]:
  """Returns the formats of the base: the config's own, and smaller ones if only adapters learn."""
  m = config.model
  if m.quantize or not m.lora_rank or config.sampling.weights_dtype:
    return (m.quantize,)
  return ("", *FORMATS)


def _micro_batches(config: Config, mesh: dict[str, int]) -> list[int]:
  """Returns the numbers of micro-batches into which a minibatch can be split, ascending."""
  prompts = config.batch.prompts // config.batch.minibatches // (mesh["data"] * mesh["fsdp"])
  return [parts for parts in range(1, prompts + 1) if prompts % parts == 0]


def _slots(config: Config, mesh: dict[str, int]) -> list[int]:
  """Returns numbers of slots, over all devices, from the config's own down to one per shard."""
  shards = mesh["data"] * mesh["fsdp"]
  most = config.sampling.slots or ACCELERATOR_SLOTS * shards
  most = min(most, config.batch.prompts * config.policy_completions)
  halves = [most // 2**i // shards * shards for i in range(most.bit_length())]
  return [config.sampling.slots or ACCELERATOR_SLOTS * shards] + [x for x in halves[1:] if x]


def _state_bytes(c: ModelConfig, mesh: dict[str, int], offload: bool) -> float:
  """Estimates the bytes of parameters and moments on one device."""
  shards = mesh["fsdp"] * mesh["context"] * mesh["tensor"]
  moments = 0 if offload or c.lora.rank else 8
  return (weight_bytes(c, c.param_dtype, c.quantize) + moments * matmul_params(c)) / shards


def _update_bytes(
  config: Config, c: ModelConfig, mesh: dict[str, int], micro_batches: int
) -> float:
  """Estimates the bytes that an update needs beside the state on one device, with full remat."""
  _, fsdp, context, tensor = mesh.values()
  gradient = 0 if c.lora.rank else 4 * matmul_params(c) / (fsdp * context * tensor)
  itemsize = DTYPES[c.compute_dtype](0).itemsize
  tokens = _tokens(config, mesh, micro_batches) / context
  residual = c.layers * tokens * c.width * itemsize / tensor
  features = 3 * c.mlp + 2 * (c.heads + c.kv_heads) * c.head_dim
  layer = tokens * itemsize * (2 * features / tensor + 4 * c.width)
  head = c.vocab_size * c.width / (context * tensor) * (itemsize + 4)
  return gradient + residual + layer + head


def _sampling_bytes(config: Config, c: ModelConfig, mesh: dict[str, int], slots: int) -> float:
  """Estimates the bytes that sampling needs beside the state on one device."""
  data, fsdp, _, tensor = mesh.values()
  itemsize = DTYPES[c.compute_dtype](0).itemsize
  quantized = c.quantize or config.sampling.weights_dtype
  weights = weight_bytes(c, c.compute_dtype, quantized) / tensor
  rows = min(slots, config.batch.prompts * config.policy_completions) / (data * fsdp)
  kv = 2 * c.layers * c.kv_heads * c.head_dim * itemsize
  if c.kv_heads % tensor == 0:
    kv /= tensor
  positions = config.sampling.max_tokens + config.data.max_prompt_tokens / 4
  positions *= config.sampling.cache_fraction
  return weights + rows * kv * positions


def _tokens(config: Config, mesh: dict[str, int], micro_batches: int) -> float:
  """Returns the tokens of a micro-batch on one batch shard, at full length."""
  parts = config.batch.minibatches * micro_batches * mesh["data"] * mesh["fsdp"]
  lengths = config.data.max_prompt_tokens + config.batch.group * config.sampling.max_tokens
  return config.batch.prompts / parts * lengths


def _seconds(
  config: Config,
  c: ModelConfig,
  chip: Chip,
  mesh: dict[str, int],
  micro_batches: int,
  slots: int,
  nodes: Sequence[int],
) -> float:
  """Estimates the seconds of a step: the roofline, with an estimate of what is sent."""
  data, fsdp, context, tensor = mesh.values()
  devices = math.prod(mesh.values())
  itemsize = DTYPES[c.compute_dtype](0).itemsize
  weights = matmul_params(c) / tensor
  updates = config.batch.updates
  gathers = updates * micro_batches
  tokens = _tokens(config, mesh, micro_batches) / context * gathers
  share = lambda size: (size - 1) / size
  trained = 0 if c.lora.rank else 4
  shards = fsdp * context
  kv = 2 * c.kv_heads * c.head_dim * c.layers
  sent = [  # (devices of a group, bytes)
    # Weights are gathered for the forward pass and for recomputation; their gradient is scattered.
    (shards * tensor, gathers * weights * (2 * itemsize + trained) * share(shards)),
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
