"""The cache and the attention kernel of an engine, by its settings, its model and its devices."""

from __future__ import annotations

import dataclasses
import functools

from gtpo_jax.models.lora import without_lora
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.chips import compute_capability
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import batch_shards, sampling_mesh
from gtpo_jax.sampling.dense.programs import DensePrograms
from gtpo_jax.sampling.paged.programs import PagedPrograms
from gtpo_jax.sampling.programs import Programs, ProgramSettings
from gtpo_jax.sampling.settings import Demand, EngineConfig

# The number of engines whose programs a process caches: policy, guide and evaluation of two runs.
SHARED_PROGRAMS = 6
MIN_TRITON_HEAD_DIM = 16  # the smallest matrix that a tensor core multiplies
MIN_TRITON_CAPABILITY = (8, 0)  # Ampere


@functools.lru_cache(maxsize=SHARED_PROGRAMS)
def make_programs(
  model: Transformer,
  stop: tuple[int, ...],
  pad: int,
  max_prompt_tokens: int,
  max_tokens: int,
  vocab_limit: int | None,
  config: EngineConfig,
  demand: Demand,
) -> Programs:
  """Returns the programs of an engine; engines with equal arguments share them.

  Raises:
    UserError: the attention kernel does not support this platform or head width.
  """
  c = model.config
  device = model.mesh.devices.flat[0]
  refusal = triton_refusal(compute_capability(device), c.head_dim)
  # Merging adapters into a quantised base would dequantise it.
  merged = model.config if c.quantize else without_lora(model).config
  if config.weights_dtype:
    merged = dataclasses.replace(merged, quantize=config.weights_dtype)
  on_sampling_mesh = Transformer(merged, sampling_mesh(model.mesh, c.kv_heads, c.mlp))
  shards = batch_shards(on_sampling_mesh.mesh)
  config = config.resolve(device.platform, shards, c.compute_dtype, triton=not refusal)
  if config.attention == "triton" and refusal:
    raise UserError(f"sampling.attention = 'triton' needs {refusal}; set it to 'xla'")
  make = DensePrograms if config.attention == "xla" else PagedPrograms
  return make(
    ProgramSettings(
      model, on_sampling_mesh, stop, pad, max_prompt_tokens, max_tokens, vocab_limit, config, demand
    )
  )


def triton_refusal(capability: tuple[int, int] | None, head_dim: int) -> str:
  """Returns what the Triton kernel needs and does not have; "" if it supports a GPU and a model.

  Args:
    capability: the compute capability of the GPU; None if unknown.
    head_dim: the features of a head.
  """
  if head_dim & (head_dim - 1) or head_dim < MIN_TRITON_HEAD_DIM:
    return f"a head width that is a power of two from {MIN_TRITON_HEAD_DIM}, not {head_dim}"
  if capability and capability < MIN_TRITON_CAPABILITY:
    return f"a GPU of compute capability 8.0 or later, not {'.'.join(map(str, capability))}"
  return ""
