"""The optimizer and the update that a config describes, and the memory of both.

Fewer micro-batches read and add up the gradient less often, and an update that recomputes nothing
computes a quarter less. Both need memory for activations, which is estimated here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from gtpo_jax.config.resolve import resolve_model
from gtpo_jax.config.run_config import Config
from gtpo_jax.models.config import DTYPES, ModelConfig
from gtpo_jax.models.decode import params_bytes
from gtpo_jax.models.delta.rule import rule_bytes
from gtpo_jax.models.experts.module import PART_BYTES
from gtpo_jax.models.lora import split_adapters, without_lora
from gtpo_jax.models.params import abstract_params, active_params, matmul_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.chips import Chip
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import AUTO
from gtpo_jax.runtime.mesh import (
  axis_size,
  batch_shards,
  bytes_per_device,
  make_mesh,
  sampling_mesh,
)
from gtpo_jax.sampling.settings import Demand
from gtpo_jax.training.state import Optimizer, abstract_state, make_optimizer
from gtpo_jax.training.update import Update, UpdateSettings, make_update

# The share of a device's memory that sampling leaves free, for fragments between arrays, the
# buffers of collectives, and what the compiler's estimates leave out. A CPU shares its memory with
# other programs, and with the host's side of the run.
RESERVE = 1 / 16
CPU_RESERVE = 1 / 3
# Forward passes that an update takes, by what it recomputes; a backward pass counts as two.
PASSES = {"none": 3, "attention": 4, "full": 4}
RECOMPUTED = {
  "none": "nothing",
  "products": "all but matrix products and attention",
  "attention": "all but attention",
  "full": "each layer",
}
# Without recomputation the layers are unrolled, and the compiler takes so many seconds for each.
UNROLLED_COMPILE_S = 4
GRADIENT_BYTES = 12  # a micro-batch's gradient is written and read, and its sum read and written
# The estimate of what is kept for the backward pass is rough; H100s ran 0.5B with 45 of 71 GiB.
SLACK = {"none": 1.3}
DEFAULT_SLACK = 1.1
EFFICIENCY = 0.4  # the share of a chip's peak that an update reached on an H100


def run_optimizer(config: Config, model: Transformer) -> Optimizer:
  """Returns the optimizer of the run for `model`."""
  coef = config.resolved_algorithm.recipe.entropy_bonus.initial_coef
  return make_optimizer(config.optimizer, config.steps, config.batch.updates, coef, model)


def run_update(
  config: Config, model: Transformer, optimizer: Optimizer, teacher: Transformer | None = None
) -> Update:
  """Returns the training step of the run for `model`, on its mesh, with its `teacher`."""
  batch = config.batch
  settings = UpdateSettings(
    config.sampling.temperature,
    batch.minibatches,
    batch.epochs,
    batch.micro_batches,
    batch.head_chunk,
  )
  algorithm = config.resolved_algorithm
  matched = teacher if algorithm.recipe.matches_distributions else None
  return make_update(model, algorithm, optimizer, settings, matched)


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
  kept = abstract_params(model)
  if trains:
    kept = abstract_state(model, run_optimizer(config, model))
  left = int(memory * (1 - _reserve(model))) - bytes_per_device(kept)
  if trains:
    left -= frozen_bytes(config, model, teacher)
  return demand._replace(memory=max(left, 0))


def frozen_bytes(config: Config, model: Transformer, teacher: Transformer | None) -> int:
  """Returns the bytes per device of the frozen policies, which are always in memory.

  Those that are the base of the run share it with a policy that has adapters. Other references and
  guides are taken to be as large as the policy. A guide has a copy in the compute dtype, unless
  the sampler reads the base itself.
  """
  settings = config.resolved_algorithm.settings
  plain = abstract_params(model if model.config.quantize else without_lora(model))
  adapters, _ = split_adapters(abstract_params(model))
  shared = bytes_per_device(adapters) if model.config.lora.rank else None
  total = 0
  if teacher and config.teacher.is_frozen:
    is_base = shared is not None and not config.teacher.path
    total += shared if is_base else bytes_per_device(abstract_params(teacher))
  if settings.kl_weight:
    is_base = shared is not None and not config.reference.path
    total += shared if is_base else bytes_per_device(plain)
  reads_base = not config.guide.path and model.config.apart
  if settings.guide_completions and reads_base and config.sampling.merge_adapters != "always":
    total += shared
  elif settings.guide_completions:
    mesh = sampling_mesh(model.mesh, model.config.kv_heads, *model.config.mlps)
    sampled = model if model.config.quantize else without_lora(model)
    total += params_bytes(Transformer(sampled.config, mesh), model).copied
  return total


def fit_update(
  config: Config, devices: Sequence[Any], chip: Chip | None, memory: int | None
) -> Config:
  """Returns the config with what "auto" stands for, in four settings that follow the memory.

  They are `model.base_layout`, `sampling.merge_adapters`, `model.remat` and `batch.micro_batches`.
  Of the last two, it is the combination that fits and is estimated to be the fastest, or the one
  that needs least memory. Only GPUs may recompute nothing, because it was timed on no other chip.
  On a CPU, or a chip that is not known, each layer is recomputed, and there is one micro-batch.

  Args:
    config: the config of the run.
    devices: of the mesh; they need not be attached.
    chip: what they are; None if unknown, or a CPU.
    memory: the bytes of each device that programs can use; None if unknown.
  """
  config = _fit_base(config, devices, memory)
  remat, micro_batches = config.model.remat, config.batch.micro_batches
  if AUTO not in (remat, micro_batches):
    return config
  remats = (remat,)
  if remat == AUTO:
    remats = ("none", "full") if chip and chip.gpu else ("full",)
  if chip is None or chip.flops is None or memory is None:
    return _with(config, remats[-1], 1 if micro_batches == AUTO else micro_batches)
  model = _model(config, devices)
  mesh = model.mesh
  left = memory * (1 - RESERVE)
  left -= bytes_per_device(abstract_state(model, run_optimizer(config, model)))
  left -= frozen_bytes(config, model, None)
  parts = micro_batch_counts(config, dict(mesh.shape))
  if micro_batches != AUTO:
    parts = [micro_batches]
  arguments = (config, model.config, dict(mesh.shape))
  needs = {
    choice: SLACK.get(choice[0], DEFAULT_SLACK) * update_bytes(*arguments, *choice)
    for choice in itertools.product(remats, parts)
  }
  fitting = [choice for choice, needed in needs.items() if needed <= left]
  if not fitting:
    return _with(config, *min(needs, key=needs.get))
  # Divided groups read their prompts again and are not packed.
  most = config.batch.prompts // config.batch.minibatches // batch_shards(mesh)
  fitting = [choice for choice in fitting if choice[1] <= most] or fitting
  return _with(config, *min(fitting, key=lambda choice: _run_seconds(*arguments, chip, *choice)))


def _fit_base(config: Config, devices: Sequence[Any], memory: int | None) -> Config:
  """Returns the config with the layout of the base under adapters, and whether they are merged."""
  layout = config.model.base_layout
  merges = config.sampling.merge_adapters
  if not config.model.lora_rank:
    return config
  model = _model(config, devices)
  shards = axis_size(model.mesh, "embed")
  if layout == "apart" and shards > 1:
    raise UserError(
      f"model.base_layout = 'apart', but mesh.expert, mesh.fsdp and mesh.context divide the base "
      f"among {shards} devices, and each samples with all of it; set these to 1, or "
      "model.base_layout=auto"
    )
  short = False
  if memory is not None and AUTO in (layout, merges):
    mesh = sampling_mesh(model.mesh, model.config.kv_heads, *model.config.mlps)
    copy = params_bytes(Transformer(model.config, mesh), model).copied
    state = bytes_per_device(abstract_state(model, run_optimizer(config, model)))
    left = memory * (1 - _reserve(model)) - state - frozen_bytes(config, model, None)
    short = 2 * copy > left
  if layout == AUTO:
    layout = "apart" if short and shards == 1 else "stacked"
  if merges == AUTO and not config.model.quantize:
    merges = "never" if short else "always"
  return dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, base_layout=layout),
    sampling=dataclasses.replace(config.sampling, merge_adapters=merges),
  )


def _reserve(model: Transformer) -> float:
  return CPU_RESERVE if model.mesh.devices.flat[0].platform == "cpu" else RESERVE


def _model(config: Config, devices: Sequence[Any]) -> Transformer:
  mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
  return Transformer(resolve_model(config, devices[0]).config, mesh)


def describe_update(config: Config) -> str:
  """Returns one line about what `fit_update` has chosen."""
  count = config.batch.micro_batches
  line = (
    f"updating in {count} micro-batch{'es' * (count > 1)}; the backward pass recomputes "
    f"{RECOMPUTED[config.model.remat]}"
  )
  if not config.model.lora_rank:
    return line
  beside = config.model.quantize or config.sampling.merge_adapters == "never"
  adapters = "computed beside it" if beside else "merged into the sampler's copy of it"
  copies = "read by update and sampler" if config.model.base_layout == "apart" else "stacked"
  return f"{line}; the base is {copies}, and adapters are {adapters}"


def micro_batch_counts(config: Config, mesh: dict[str, int]) -> list[int]:
  """Returns the numbers of micro-batches into which a minibatch can be split, ascending."""
  shards = mesh["data"] * mesh["expert"] * mesh["fsdp"]
  batch = config.batch
  prompts = batch.prompts // batch.minibatches // shards
  counts = [parts for parts in range(1, prompts + 1) if prompts % parts == 0] or [1]
  if config.env.agent:
    return counts
  divided = [parts for parts in range(2, batch.group + 1) if batch.group % parts == 0]
  return counts + [prompts * parts for parts in divided if prompts]


def update_bytes(
  config: Config, c: ModelConfig, mesh: dict[str, int], remat: str, micro_batches: int
) -> float:
  """Estimates the bytes that an update needs beside the state on one device."""
  _, expert, fsdp, context, tensor = mesh.values()
  gradient = 0 if c.lora.rank else 4 * matmul_params(c) / (expert * fsdp * context * tensor)
  itemsize = DTYPES[c.compute_dtype](0).itemsize
  tokens = tokens_per_part(config, mesh, micro_batches) / context
  residual = c.layers * tokens * c.width * itemsize / tensor
  mlp = c.active_mlp
  experts = 0
  if m := c.mixture:
    # Each device computes tokens of all shards of the experts, many of them in parts.
    rows = tokens * m.per_token * expert * c.width * itemsize
    routed = m.active - m.shared
    if rows <= PART_BYTES:
      mlp += routed * (expert - 1)
      experts = 6 * rows / tensor
    else:  # parts keep nothing, and their gradients are summed in float32
      mlp -= routed
      matrices = c.expert_params / len(c.expert_layers) / expert
      experts = (6 * PART_BYTES * (1 + m.mlp / c.width) + 8 * matrices) / tensor
  features = 3 * mlp + 2 * (c.heads + c.kv_heads) * c.head_dim
  layer = experts + tokens * itemsize * (2 * features / tensor + 4 * c.width)
  if c.delta:  # the rule's temporaries, and their gradients
    layer += 2 * tokens * rule_bytes(c.delta) / tensor
  head = c.vocab_size * c.width / (context * tensor) * (itemsize + 4)
  # Compiled programs keep about so many features of each token and layer for the backward pass.
  attention = c.heads * c.head_dim
  kept = {"none": 3 * mlp + 4 * (c.width + attention), "products": 3 * mlp + 4 * attention}
  kept["attention"] = 2 * attention
  stored = c.layers * tokens * itemsize * kept.get(remat, 0) / tensor
  if c.delta and remat == "none":  # and the temporaries of every gated delta net
    stored += c.delta_layers * tokens * rule_bytes(c.delta) / tensor
  orthogonalised = 2 * gradient if config.optimizer.name == "muon" else 0
  return gradient + max(residual + layer + head + stored, orthogonalised)


def tokens_per_part(config: Config, mesh: dict[str, int], micro_batches: int) -> float:
  """Returns the tokens of a micro-batch on one batch shard, at full length."""
  parts = config.batch.minibatches * micro_batches
  parts *= mesh["data"] * mesh["expert"] * mesh["fsdp"]
  prompts = config.batch.prompts / parts  # less than one if groups are divided
  completions = prompts * config.batch.group * config.sampling.max_tokens
  return max(prompts, 1) * config.data.max_prompt_tokens + completions


def _run_seconds(
  config: Config, c: ModelConfig, mesh: dict[str, int], chip: Chip, remat: str, micro_batches: int
) -> float:
  """Estimates the seconds that all updates of a run take, and the compiler."""
  _, expert, fsdp, context, tensor = mesh.values()
  tokens = micro_batches * tokens_per_part(config, mesh, micro_batches)
  weights = active_params(c) / (context * tensor)
  trained = 0 if c.lora.rank else matmul_params(c) / (context * tensor * expert * fsdp)
  flop = 2 * PASSES.get(remat, PASSES["full"]) * weights * tokens
  step = flop / (EFFICIENCY * chip.flops)
  step += micro_batches * GRADIENT_BYTES * trained / chip.memory_bandwidth
  compiling = UNROLLED_COMPILE_S * c.layers if remat == "none" else 0
  return config.steps * config.batch.updates * step + compiling


def _with(config: Config, remat: str, micro_batches: int) -> Config:
  return dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, remat=remat),
    batch=dataclasses.replace(config.batch, micro_batches=micro_batches),
  )
