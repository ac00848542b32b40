"""`gtpo plan`: compiles a run's sampler and update for hardware that is not here, and says what they need."""
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from gtpo_jax.arrays import Prompts, Rollouts, Verdicts
from gtpo_jax.collect import batch_like
from gtpo_jax.config import Config
from gtpo_jax.errors import UserError, first_line, nearest
from gtpo_jax.models.lora import merge_lora, without_lora
from gtpo_jax.models.presets import DTYPES
from gtpo_jax.models.qwen2 import Params, Qwen2, abstract_params, sampling_layout
from gtpo_jax.parallel import axis_size, make_mesh, named_sharding
from gtpo_jax.sampling.decode import generate
from gtpo_jax.sampling.engine import completion_keys
from gtpo_jax.training.micro_batches import check_divides
from gtpo_jax.training.state import abstract_state, make_optimizer
from gtpo_jax.training.update import make_update

# GiB of memory of one device, by generation.
MEMORY_GIB = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}


def plan(config: Config, topology: str) -> dict[str, Any]:
  """Compiles the update and the sampler ahead of time.

  Args:
    config: the run.
    topology: "v5p:4x4x4" and the like (through libtpu), or "cpu:8" for virtual devices of this machine.

  Returns:
    `fits`, `hbm_bytes`, `devices`, `params`, `update.peak_bytes`, `sample.peak_bytes`, `update.flops` (of the model, all
    devices together, recomputation not counted), `seconds_compile`. Bytes are of one device; the sampler's count the
    optimizer state that rests beside it.

  Raises:
    UserError: a topology that does not exist here, or a mesh or batch that does not divide over it.
  """
  devices, memory = topology_devices(topology)
  model = Qwen2(config.model_config, make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices))
  check_divides("batch.prompts", config.batch.prompts, config.batch.parts, model)
  optimizer = make_optimizer(config.optimizer, config.steps, config.batch.updates)
  state = abstract_state(model, optimizer)
  began = time.perf_counter()
  update = make_update(model, config.algorithm_object, optimizer, temperature=config.sampling.temperature,
                       minibatches=config.batch.minibatches, epochs=config.batch.epochs, micro_batches=config.batch.micro_batches,
                       head_chunk=config.batch.head_chunk)
  rollouts, verdicts = abstract_batch(config, model)

  def sample(params: Params, prompts: Prompts, seed: jax.Array) -> Rollouts:
    keys = completion_keys(jax.random.key(seed), config.batch.prompts, config.own_group)
    plain = without_lora(model)
    return generate(plain, sampling_layout(plain, merge_lora(model, params)), prompts, keys, jnp.arange(2), jnp.int32(0), config.sampler,
                    config.sampling.max_tokens)

  seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=named_sharding(model.mesh))
  with no_compile_cache():
    update_peak = peak_bytes(update.lower(state, rollouts, verdicts).compile())
    sample_peak = peak_bytes(jax.jit(sample).lower(state.params, rollouts.prompts, seed).compile()) + shard_bytes(state.opt_state)
  rest = frozen_bytes(config, model)
  update_peak, sample_peak = update_peak + rest, sample_peak + rest
  return {"topology": topology, "devices": len(devices), "hbm_bytes": memory,
          "params": sum(x.size for x in jax.tree.leaves(state.params)),
          "state.bytes": shard_bytes(state),
          "update.peak_bytes": update_peak, "sample.peak_bytes": sample_peak, "update.flops": model_flops(config),
          "fits": max(update_peak, sample_peak) <= memory, "seconds_compile": time.perf_counter() - began}


@contextlib.contextmanager
def no_compile_cache() -> Iterator[None]:
  """Within it nothing is read from or written to JAX's compile cache: a program for devices that are not here can be written, not read."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()  # JAX decides once whether it has a cache; this makes it decide again
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def topology_devices(topology: str) -> tuple[list[Any], int]:
  """The devices of a topology, and the bytes of memory of one of them."""
  kind, _, shape = topology.partition(":")
  if kind == "cpu":
    devices = jax.devices("cpu")
    if shape != str(len(devices)):
      raise UserError(f"topology {topology!r}: this process has {len(devices)} CPU device(s); set JAX_NUM_CPU_DEVICES={shape or 1}")
    return devices, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
  if kind not in MEMORY_GIB:
    raise UserError(f"unknown topology {topology!r}{nearest(kind, [*MEMORY_GIB, 'cpu'])}; give one of {', '.join(MEMORY_GIB)} with a "
                    f"shape, as v5p:4x4x4, or cpu:N")
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  for name, value in (("TPU_WORKER_HOSTNAMES", "localhost"), ("TPU_ACCELERATOR_TYPE", "v5p-8")):
    os.environ.setdefault(name, value)  # libtpu complains where they are not set; the topology named decides, not these
  from jax.experimental import topologies
  try:
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
  except Exception as error:  # libtpu raises its own kinds, absent or displeased
    raise UserError(f"topology {topology!r} cannot be described ({first_line(error)}); is libtpu installed (pip install 'gtpo_jax[plan]') "
                    f"and the shape one that exists, as v5e:4x4?") from error
  return list(described.devices), MEMORY_GIB[kind] * 2**30


def abstract_batch(config: Config, model: Qwen2) -> tuple[Rollouts, Verdicts]:
  """The shapes of one step's rollouts and verdicts on the mesh, with nothing allocated."""
  sharding = named_sharding(model.mesh, "batch")
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch_like(config))


def model_flops(config: Config) -> int:
  """FLOP of one update at full length: 3 (2 N + 2 layers heads head_dim S) a token, recomputation not counted."""
  c, prompts = config.model_config, config.batch.prompts
  tokens = prompts * config.data.max_prompt_tokens + prompts * config.batch.group * config.sampling.max_tokens
  length = config.data.max_prompt_tokens + config.sampling.max_tokens
  return 3 * tokens * (2 * c.matmul_params + 2 * c.layers * c.heads * c.head_dim * length)


def frozen_bytes(config: Config, model: Qwen2) -> int:
  """Bytes on one device of the reference and the guide, which rest beside the update and the sampler alike; each taken as large as the
  policy, the guide in its compute type."""
  settings, params = config.algorithm_object.settings, abstract_params(without_lora(model))
  guide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, DTYPES[model.config.compute_dtype], sharding=x.sharding), params)
  whole = axis_size(model.mesh, "embed")  # the guide's weights are gathered over fsdp
  return (shard_bytes(params) if settings.kl_weight else 0) + (shard_bytes(guide) * whole if settings.guide_completions else 0)


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """The most memory that a compiled program holds at once on one device, its arguments included."""
  analysis = compiled.memory_analysis()
  return int(analysis.peak_memory_in_bytes)


def shard_bytes(tree: Any) -> int:
  """Bytes of one device's shard of every array in `tree`."""
  return sum(int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def table(result: dict[str, Any]) -> str:
  """The result as lines for a person."""
  gib = lambda key: f"{result[key] / 2**30:.2f} GiB"
  rows = [("topology", f"{result['topology']}, {result['devices']} device(s) of {gib('hbm_bytes')}"),
          ("parameters", f"{result['params'] / 1e9:.3f} billion"),
          ("state per device", gib("state.bytes")),
          ("update, peak per device", gib("update.peak_bytes")),
          ("sampling, peak per device", gib("sample.peak_bytes")),
          ("update, model FLOP", f"{result['update.flops']:.3e}"),
          ("compiled in", f"{result['seconds_compile']:.1f} s"),
          ("fits", "yes" if result["fits"] else "no: use more devices, more batch.micro_batches or a larger mesh.fsdp")]
  return "\n".join(f"{name:<28} {value}" for name, value in rows)
