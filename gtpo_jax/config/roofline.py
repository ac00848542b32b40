"""The time of a step on given chips: lower bounds (roofline), and what to expect.

A bound is the number of FLOP, bytes read or bytes sent, divided by the peak rate of the chips. A
real step is slower: what is expected is the bound over the share of it that was measured
(docs/benchmarks.md). In this file `c` is the model's architecture.
"""

from __future__ import annotations

import functools
import math
import os
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.config.run_config import Config
from gtpo_jax.models.config import DTYPES, ModelConfig
from gtpo_jax.models.delta.rule import rule_flops
from gtpo_jax.models.number_formats import FORMATS, einsum
from gtpo_jax.models.params import active_params, matmul_params
from gtpo_jax.runtime.chips import CHIPS, Chip, cpu_bfloat16_units

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


# Shares of the bounds that one H100 reached.
SAMPLING_SHARE = 0.3
UPDATE_SHARE = 0.34
# What a core of a CPU reached, in float32: FLOP per second of matrix products, and beside these the
# seconds of a token and layer in the update, and of a step of decoding and a layer.
CPU_UPDATE_FLOPS = 220e9
CPU_SAMPLING_FLOPS = 110e9
CPU_TOKEN_S = 18e-6
CPU_DECODE_S = 1e-3


class CpuSpeed(NamedTuple):
  """The speed of a CPU, from products of matrices of the size of a small model's."""

  products: float = 228e9  # float32 FLOP per second and core; the default is that CPU's
  gain: float = 1.95  # how many times as fast they are in the compute dtype if it is bfloat16


class Expected(NamedTuple):
  """The seconds that the parts of a run are expected to take, all completions at full length."""

  sample: float  # of a step
  update: float  # of a step
  evaluation: float  # of one
  warm_start: float  # of all its steps
  factor: float  # by which the seconds can be wrong either way
  basis: str  # what they are computed from

  @property
  def step(self) -> float:
    """The seconds of a step."""
    return self.sample + self.update

  def rest(self, config: Config, done: int) -> float:
    """Returns the seconds of a run of which `done` steps and their evaluations are complete."""
    steps = range(done + 1, config.steps + 1)
    evaluations = sum(config.eval.is_due(step, config.steps) for step in steps) + (done == 0)
    warm_start = 0 if done else self.warm_start
    return warm_start + len(steps) * self.step + evaluations * self.evaluation


def cpu_speed(dtype: str) -> CpuSpeed:
  """Measures the speed of this CPU now, in a tenth of a second for each format.

  Args:
    dtype: the compute dtype.
  """

  def flops(dtype: str) -> float:
    x = jnp.ones((2048, 576), dtype)
    y = jnp.ones((576, 576), dtype)
    multiply = jax.jit(functools.partial(einsum, "td,dv->tv", precision="default"))
    seconds = []
    for _ in range(16):
      began = time.perf_counter()
      multiply(x, y).block_until_ready()
      seconds.append(time.perf_counter() - began)
    return 2 * x.size * len(y) / float(np.median(seconds))  # the first call compiles

  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    products = flops("float32")
    has_units = dtype == "bfloat16" and cpu_bfloat16_units()
    gain = flops("bfloat16") / products if has_units else 1.0
  return CpuSpeed(products / _cores(), gain)


def _cores() -> int:
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def expected_seconds(
  config: Config,
  c: ModelConfig,
  chip: Chip,
  mesh: dict[str, int],
  slots: int,
  send_s: float = 0,
  cpu: CpuSpeed | None = None,
) -> Expected:
  """Returns what a run is expected to take.

  Args:
    config: the config of the run.
    c: the architecture.
    chip: the kind of device; without rates, it is a CPU.
    mesh: for sampling: the sizes of its axes.
    slots: the completions that are decoded at once, over all devices.
    send_s: see `update_seconds`.
    cpu: the speed of a CPU; None for this one's now.
  """
  tokens = config.batch.prompts * config.data.max_prompt_tokens
  tokens += config.batch.prompts * config.batch.group * config.sampling.max_tokens
  longest = config.data.max_prompt_tokens + config.sampling.max_tokens
  imitated = config.warm_start.steps * config.warm_start.batch * longest / tokens
  problems, samples = config.eval.problems, config.eval.samples + 1
  if chip.flops:
    devices = math.prod(mesh.values())
    sample = sample_seconds(config, c, chip, mesh, slots) / SAMPLING_SHARE
    update = update_seconds(config, c, chip, devices, send_s) / UPDATE_SHARE
    evaluation = sample * problems * samples / (config.batch.prompts * config.policy_completions)
    basis = "the roofline and the shares of it that an H100 reached"
    factor = 1.5 if chip == CHIPS["h100"] else 2.0
    return Expected(
      sample, update, evaluation, imitated * update / config.batch.epochs, factor, basis
    )
  cpu = cpu or cpu_speed(c.compute_dtype)
  cores = _cores() * cpu.products / CpuSpeed().products
  # An update gains less than its products, because it is not all products: about the square root.
  gain = math.sqrt(cpu.gain) if c.compute_dtype == "bfloat16" else 1.0
  factor = 1.0 if config.model.remat == "none" else REMAT_FACTOR
  update = update_flops(config, c) * factor / (CPU_UPDATE_FLOPS * cores * gain)
  update += tokens * config.batch.epochs * CPU_TOKEN_S * c.layers / cores

  def sampling(prompts: int, completions: int) -> float:
    rounds = math.ceil(prompts * completions / slots)
    flops = completions * config.sampling.max_tokens + config.data.max_prompt_tokens
    flops *= 2 * active_params(c) * prompts
    steps = rounds * config.sampling.max_tokens
    return flops / (CPU_SAMPLING_FLOPS * cores * gain) + steps * c.layers * CPU_DECODE_S / cores

  return Expected(
    sampling(config.batch.prompts, config.policy_completions),
    update,
    sampling(problems, config.eval.samples) + sampling(problems, 1),
    imitated * update / config.batch.epochs,
    2.0,
    f"the speed at which these {_cores()} cores multiply matrices now",
  )
