"""The least time that a step can take on given chips: what it computes, reads and sends over what they can do.

The formulas are those of arithmetic alone. Nothing here is measured, and no real step is as fast.
"""

from __future__ import annotations

import math

from gtpo_jax.config import Config
from gtpo_jax.models.presets import DTYPES
from gtpo_jax.planning.topology import Chip


def update_flops(config: Config) -> int:
  """FLOP of a step's updates at full length: 3 (2 N + 2 layers heads head_dim S) a token, recomputation not counted."""
  c = config.model_config
  prompts = config.batch.prompts
  tokens = (
    prompts * config.data.max_prompt_tokens
    + prompts * config.batch.group * config.sampling.max_tokens
  )
  length = config.data.max_prompt_tokens + config.sampling.max_tokens
  return (
    3
    * tokens
    * (2 * c.matmul_params + 2 * c.layers * c.heads * c.head_dim * length)
    * config.batch.epochs
  )


def update_seconds(config: Config, chip: Chip, devices: int, sent: int) -> float:
  """Seconds of a step's updates: the larger of computing (with remat a third more than `update_flops`) and sending `sent` bytes."""
  recomputed = 1.0 if config.model.remat == "none" else 4 / 3
  return max(update_flops(config) * recomputed / devices / chip.flops, sent / chip.links)


def sample_seconds(config: Config, chip: Chip, mesh: dict[str, int], slots: int) -> float:
  """Seconds of sampling a step's completions, all at full length: each token reads the weights and the keys and values before it.

  Weights are whole over data and fsdp and split over tensor; every device decodes its share of the `slots` completions at once.
  """
  c = config.model_config
  devices = mesh["data"] * mesh["fsdp"] * mesh["tensor"]
  shards = mesh["data"] * mesh["fsdp"]
  size = DTYPES[c.compute_dtype](0).itemsize
  rows = config.batch.prompts * config.policy_completions / shards
  length = config.sampling.max_tokens
  prompt = config.data.max_prompt_tokens
  rounds = math.ceil(rows / (slots / shards))
  rows /= rounds
  kv = (
    2 * c.layers * c.kv_heads * c.head_dim * size / min(mesh["tensor"], c.kv_heads)
  )  # bytes a position
  read = c.matmul_params * size / mesh["tensor"] + kv * (
    rows * length / 2 + rows / config.policy_completions * prompt
  )
  computed = 2 * c.matmul_params * rows / mesh["tensor"]
  prefill = 2 * c.matmul_params * config.batch.prompts * prompt / devices / chip.flops
  return prefill + rounds * length * max(read / chip.bandwidth, computed / chip.flops)
