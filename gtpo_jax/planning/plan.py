"""`gtpo plan`: compiles a run's sampler and update for hardware that is not here, and says what they need."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import jax

from gtpo_jax.arrays import Rewards, Rollouts
from gtpo_jax.config import Config, flatten, freeze, to_dict
from gtpo_jax.models.causal import attention_kind
from gtpo_jax.models.lora import without_lora
from gtpo_jax.models.presets import DTYPES
from gtpo_jax.models.qwen2 import Qwen2, abstract_params
from gtpo_jax.planning.collectives import collective_bytes
from gtpo_jax.planning.roofline import sample_seconds, update_flops, update_seconds
from gtpo_jax.planning.topology import Chip, topology_devices
from gtpo_jax.rollout.experience import batch_like
from gtpo_jax.runtime.mesh import axis_size, make_mesh, named_sharding
from gtpo_jax.runtime.startup import use_compile_cache
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.training.micro_batches import check_divides, check_positions
from gtpo_jax.training.state import Optimizer, abstract_state, make_optimizer
from gtpo_jax.training.update import make_update


def plan(config: Config, topology: str) -> dict[str, Any]:
  """Compiles the update and the sampler ahead of time; where they do not fit, looks for an override with which they do.

  Args:
    config: the run.
    topology: "v5p:4x4x4" and the like (through libtpu), or "cpu:8" for virtual devices of this machine.

  Returns:
    What `measured` gives, and `override`: the flags that make it fit, each set of them compiled; "" where it fits, None where none of
    the sets tried does.

  Raises:
    UserError: a topology that does not exist here, or a mesh, batch or positions that do not divide over it.
  """
  devices, chip = topology_devices(topology)
  result = measured(config, laid_out(config, devices), chip) | {
    "topology": topology,
    "override": "",
  }
  if not result["fits"]:
    result["override"] = None
    for override in levers(config, result["mesh"]):
      other = changed(config, override)
      if all(peak <= chip.memory for peak, _ in programs(other, laid_out(other, devices))):
        result["override"] = " ".join(
          f"--config.{name}={value}" for name, value in override.items()
        )
        break
  return result


def laid_out(config: Config, devices: list[Any]) -> Qwen2:
  """The run's model on these devices.

  Raises:
    UserError: mesh, batch or positions do not divide over them.
  """
  model = Qwen2(config.model_config, make_mesh(**dataclasses.asdict(config.mesh), devices=devices))
  check_divides("batch.prompts", config.batch.prompts, config.batch.parts, model)
  check_positions(config.sampling.max_tokens, model)
  return model


def measured(config: Config, model: Qwen2, chip: Chip) -> dict[str, Any]:
  """What a run needs on its mesh.

  Returns:
    `fits`, `devices`, `mesh`, `hbm_bytes`, `attention` (how whole sequences attend), `params` (their number), `seconds_compile`, and of
    one device: `params.bytes`, `optimizer.bytes` (in its own memory), `cache.bytes` (keys and values of what is sampled at once),
    `update.peak_bytes`, `update.activation_bytes` (what the update holds beside state and batch), `sample.peak_bytes` (the state that
    rests beside it included),
    `update.sent_bytes` (to other devices; None where the compiler refused the program). `update.flops` are the model's, of all devices
    together, recomputation not counted. `update.seconds` and `sample.seconds` are the roofline's, None where the chip's speed is not known.
  """
  began = time.perf_counter()
  state = abstract_state(model, optimizer(config))
  batch = abstract_batch(config, model)
  (update_peak, update), (sample_peak, _) = programs(config, model)
  seconds_compile = time.perf_counter() - began
  mesh = dict(model.mesh.shape)
  devices = model.mesh.size
  sent = None if update is None else sum(collective_bytes(update.as_text()).values())
  known = chip.flops is not None
  engine = sampling_engine(config, model)
  return {
    "devices": devices,
    "mesh": mesh,
    "hbm_bytes": chip.memory,
    "attention": attention_kind(model.config, model.mesh),
    "params": sum(x.size for x in jax.tree.leaves(state.params)),
    "params.bytes": shard_bytes(state.params),
    "optimizer.bytes": shard_bytes(state.opt_state),
    "cache.bytes": shard_bytes(
      [
        cache.kv
        for cache in engine.caches(
          config.batch.prompts,
          group=config.policy_completions,
          sampling_params=config.sampling_params,
        )
      ]
    ),
    "update.peak_bytes": update_peak,
    "sample.peak_bytes": sample_peak,
    "update.sent_bytes": sent,
    "update.activation_bytes": update_peak
    - frozen_bytes(config, model)
    - shard_bytes((state, batch)),
    "update.flops": update_flops(config),
    "update.seconds": update_seconds(config, chip, devices, sent or 0) if known else None,
    "sample.seconds": sample_seconds(
      config, chip, engine.model.mesh.shape, engine.engine_config.slots
    )
    if known
    else None,
    "fits": max(update_peak, sample_peak) <= chip.memory,
    "seconds_compile": seconds_compile,
  }


def programs(config: Config, model: Qwen2) -> Iterator[tuple[int, jax.stages.Compiled | None]]:
  """The update, then the sampler, each compiled when it is asked for: the most bytes that one device holds while it runs, and the program.

  Where the compiler refuses because they are too many: the bytes that it says it would need, and None.
  """
  state = abstract_state(model, optimizer(config))
  (rollouts, verdicts) = abstract_batch(config, model)
  rest = frozen_bytes(config, model)
  update = make_update(
    model,
    config.algorithm_built,
    optimizer(config),
    temperature=config.sampling.temperature,
    minibatches=config.batch.minibatches,
    epochs=config.batch.epochs,
    micro_batches=config.batch.micro_batches,
    head_chunk=config.batch.head_chunk,
  )
  peak, program = compile_peak(update.lower(state, rollouts, verdicts), (state, rollouts, verdicts))
  yield peak + rest, program

  engine = sampling_engine(config, model)
  peaks = []
  for name, lowered, held in engine.programs(
    state.params,
    config.batch.prompts,
    group=config.policy_completions,
    sampling_params=config.sampling_params,
  ):
    peak, program = compile_peak(lowered, held)
    peaks.append(peak + (0 if name == "layout" else shard_bytes(state.params)))
    if program is None:
      break  # what comes next is made from it
  yield max(peaks) + rest + shard_bytes(state.opt_state), program


def sampling_engine(config: Config, model: Qwen2) -> Engine:
  """The run's sampler; which tokens end a completion makes no difference to what it needs."""
  return Engine(
    model,
    (0, 1),
    0,
    config.data.max_prompt_tokens,
    config.sampling.max_tokens,
    engine_config=config.engine_config,
  )


def optimizer(config: Config) -> Optimizer:
  """The run's optimizer."""
  return make_optimizer(config.optimizer, config.steps, config.batch.updates)


def levers(config: Config, mesh: dict[str, int]) -> list[dict[str, Any]]:
  """Overrides that may make a run fit, the mildest first; each holds those before it, but that the last two stand for one another.

  Smaller micro-batches change nothing but time, host offload costs transfers; a wider context axis gathers keys and values, a wider tensor
  axis all that goes into a layer.
  """
  model = config.model_config
  shards = mesh["data"] * mesh["fsdp"]
  found = []
  now = {}
  most = config.batch.prompts // (config.batch.minibatches * shards)
  if most > config.batch.micro_batches:
    found.append(now := now | {"batch.micro_batches": most})
  if not config.optimizer.offload:
    found.append(now := now | {"optimizer.offload": True})
  if mesh["fsdp"] % 2 == 0:
    now = now | {
      "mesh.data": mesh["data"],
      "mesh.fsdp": mesh["fsdp"] // 2,
      "batch.micro_batches": 2 * most,
    }
    for axis, sizes in (("context", []), ("tensor", [model.heads, model.mlp])):
      wider = 2 * mesh[axis]
      words = 2 * mesh["context"] * mesh["tensor"]
      split = [
        model.vocab_size,
        *([config.sampling.max_tokens] if axis == "context" or mesh["context"] > 1 else []),
      ]
      if not any(size % wider for size in sizes) and not any(size % words for size in split):
        found.append(now | {f"mesh.{axis}": wider})
  return found


def changed(config: Config, override: dict[str, Any]) -> Config:
  """The config with other values under these dotted names."""
  values: dict[str, Any] = {}
  for name, value in (flatten(to_dict(config)) | override).items():
    *sections, key = name.split(".")
    place = values
    for section in sections:
      place = place.setdefault(section, {})
    place[key] = value
  return freeze(values)


def compile_peak(
  lowered: jax.stages.Lowered, arguments: Any
) -> tuple[int, jax.stages.Compiled | None]:
  """The most bytes that a program holds at once on one device, its arguments included, and the program; see `programs`."""
  try:
    with no_compile_cache():
      compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    needed = re.search(r"temporaries \(([\d.]+)([KMGT])\)|Used ([\d.]+)([KMGT]) of", str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or not needed:
      raise
    size, unit = [part for part in needed.groups() if part]
    return int(float(size) * 1024 ** ("KMGT".index(unit) + 1)) + (
      shard_bytes(arguments) if needed[1] else 0
    ), None
  found = compiled.memory_analysis()
  (device, *_) = jax.tree.leaves(arguments)[0].sharding.device_set
  unseen = (
    found.temp_size_in_bytes if device.platform == "cpu" else 0
  )  # XLA's peak of a CPU program leaves its temporaries out
  return found.peak_memory_in_bytes + unseen, compiled


@contextlib.contextmanager
def no_compile_cache() -> Iterator[None]:
  """Within it nothing is read from or written to JAX's compile cache: a program for devices that are not here can be written, not read."""
  before = jax.config.jax_enable_compilation_cache
  use_compile_cache(False)
  try:
    yield
  finally:
    use_compile_cache(before)


def abstract_batch(config: Config, model: Qwen2) -> tuple[Rollouts, Rewards]:
  """The shapes of one step's rollouts and verdicts on the mesh, with nothing allocated."""
  sharding = named_sharding(model.mesh, "batch")
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch_like(config)
  )


def frozen_bytes(config: Config, model: Qwen2) -> int:
  """Bytes on one device of the reference and the guide, which rest beside the update and the sampler alike; each taken as large as the
  policy, the guide in its compute type."""
  settings = config.algorithm_built.settings
  params = abstract_params(without_lora(model))
  guide = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, DTYPES[model.config.compute_dtype], sharding=x.sharding
    ),
    params,
  )
  whole = axis_size(
    sampling_engine(config, model).model.mesh, "embed"
  )  # over which the guide's weights are gathered
  return (shard_bytes(params) if settings.kl_weight else 0) + (
    shard_bytes(guide) * whole if settings.guide_completions else 0
  )


def shard_bytes(tree: Any) -> int:
  """Bytes of one device's own memory that every array's shard in `tree` takes."""
  here = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != "pinned_host"]
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in here)


def table(result: dict[str, Any]) -> str:
  """The result as lines for a person."""

  def size(key: str) -> str:
    unit, count = ("GiB", 2**30) if result[key] >= 2**29 else ("MiB", 2**20)
    return f"{result[key] / count:9.2f} {unit}"

  seconds = lambda key: (
    "not known" if result[key] is None else f"at least {result[key]:.3g} s, by the roofline"
  )
  mesh = " x ".join(f"{name} {count}" for name, count in result["mesh"].items())
  rows = [
    (
      "topology",
      f"{result['topology']}: {result['devices']} device(s) of {result['hbm_bytes'] / 2**30:.2f} GiB, mesh {mesh}",
    ),
    ("attention", result["attention"]),
    ("parameters", f"{result['params'] / 1e9:9.3f} billion"),
    ("a device: parameters", size("params.bytes")),
    ("a device: optimizer", size("optimizer.bytes")),
    ("a device: keys and values", size("cache.bytes")),
    ("a device: activations", size("update.activation_bytes")),
    ("a device: peak, update", size("update.peak_bytes")),
    ("a device: peak, sampling", size("sample.peak_bytes")),
    (
      "a device: sent, update",
      "-" if result["update.sent_bytes"] is None else size("update.sent_bytes"),
    ),
    ("update", f"{result['update.flops']:.3e} FLOP of the model, {seconds('update.seconds')}"),
    ("sampling, full length", seconds("sample.seconds")),
    ("compiled in", f"{result['seconds_compile']:.1f} s"),
    ("fits", "yes" if result["fits"] else advice(result["override"])),
  ]
  return "\n".join(f"{name:<28} {value}" for name, value in rows)


def advice(override: str | None) -> str:
  """What to do where a run does not fit."""
  if override:
    return f"no; with {override} it does (tried)"
  return (
    "no, nor (tried, as far as they divide) with smaller micro-batches, moments on the host and a wider context or tensor axis: take "
    "more devices, a smaller sampling.max_tokens, or model.lora_rank"
  )
