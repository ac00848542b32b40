"""The compiled programs of an engine, and the fixed set of shapes that they are compiled for."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gtpo_jax.models.decode import DecodeParams, make_decode_params, params_bytes
from gtpo_jax.models.lora import merge_lora
from gtpo_jax.models.params import Params, quantize_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.compiling import PassingProgram, StoppableProgram
from gtpo_jax.runtime.mesh import batch_shards, bytes_per_device, named_sharding
from gtpo_jax.sampling.cache import Cache, Part, States, gather_rows
from gtpo_jax.sampling.chunk import Chunk, ChunkLimits, Decoder, decode_chunk
from gtpo_jax.sampling.filters import RowSampling
from gtpo_jax.sampling.inventory import Program, Workload
from gtpo_jax.sampling.prefill.batches import PrefillBatch
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import DecodeInputs
from gtpo_jax.sampling.settings import Demand, EngineConfig, SamplingParams

# PRNG keys that are derived together, so that batches of all sizes share a program.
KEYS_AT_ONCE = 1024


class SamplerState(NamedTuple):
  """What stays on the devices while completions are sampled."""

  kv: Any  # the keys and values, see `Cache`
  prompts: States  # of the prompts in the cache
  slots: States


class ProgramSettings(NamedTuple):
  """What the programs of an engine are made for."""

  model: Transformer  # the trained model, LoRA adapters included, on the training mesh
  stop: Sequence[int]  # token ids that end a completion
  pad: int  # the padding id
  max_prompt_tokens: int  # the most tokens of a prompt
  max_tokens: int  # the most tokens of a completion
  # only token ids below this are sampled; None for the full vocabulary
  vocab_limit: int | None = None
  # slots, chunk, cache format and kernel; what is unset follows the platform
  config: EngineConfig = EngineConfig()
  demand: Demand = Demand()  # the batches that will be sampled, if known


class CacheSizes(abc.ABC):
  """How much a cache holds, and in which shapes.

  Attributes:
    model: the architecture on the sampling mesh, without adapters.
    config: the engine's settings for this platform, with the number of slots.
    shards: devices along the batch axes.
    chunk: tokens decoded between two visits to the host.
    most_slots: over all shards, if the memory of a device holds them.
    memory_left: bytes of a device beside the parameters; None if unlimited.
    longest_at_once: how many completions of the maximum length run at once, over all shards.
    widths: lengths to which prompts ("prompts"), and prompts with completions that are resumed
      ("slots"), are padded while they are read, ascending.
  """

  longest_at_once: int
  widths: dict[Part, list[int]]

  def __init__(self, settings: ProgramSettings, model: Transformer):
    """Args:
    settings: what the programs are made for, resolved for the platform.
    model: the architecture on the sampling mesh, without adapters.
    """
    self.model = model
    self.config = settings.config
    self.shards = batch_shards(model.mesh)
    self.chunk = min(self.config.chunk, settings.max_tokens)
    platform = model.mesh.devices.flat[0].platform
    memory = settings.demand.memory
    self.memory_left = memory
    if memory is not None:
      self.memory_left = max(memory - params_bytes(model, settings.model).copied, 0)
    self.most_slots = self.config.most_slots(platform, self.shards)

  @abc.abstractmethod
  def describe(self) -> str:
    """Returns how much the cache of a device holds."""

  @abc.abstractmethod
  def scheduler(self, prompts: int, group: int) -> Scheduler:
    """Returns an empty schedule for about `prompts` x `group` completions.

    These give the number of slots and cache entries. Other prompts may be added, and any number.
    """

  def serving_scheduler(self) -> Scheduler:
    """Returns an empty schedule for completions that come at any time; see `Programs.fit`."""
    return self.scheduler(self.config.slots, 1)

  def hold(self, lengths: Sequence[tuple[int, int]]) -> bool:
    """Whether completions may run at once. By default any may: in a pool, they wait for pages.

    Args:
      lengths: for each, the tokens of its prompt, and the most tokens after that.
    """
    return True

  @abc.abstractmethod
  def row_counts(self, scheduler: Scheduler, part: Part, width: int) -> list[int]:
    """Returns the numbers of rows per shard, descending, that a batch of a width may have."""


class Programs(abc.ABC):
  """The jitted functions of sampling for one model on one mesh. They compile on their first use.

  Attributes:
    model: the architecture on the sampling mesh, without adapters.
    cache: the device functions of its cache.
    sizes: how much the cache holds.
    config, shards, chunk: as in `CacheSizes`.
    kv_dtype: format of cached keys and values.
    static_temperature: whether each temperature has decode programs of its own.
    copies_prompts: whether entries with equal prompts get these from one row of a batch.
    stop: i32[number of stop tokens], token ids that end a completion.
    pad: the padding id.
    layout: params -> DecodeParams, with adapters merged unless `model` has them.
    derive_keys: see `_derive_keys`; for `KEYS_AT_ONCE` keys.
    read: reads sequences into the prompts ("prompts") or slots ("slots") of a cache, see
      `read_rows`.
    decode_chunk: see there.
    init_states, keep_rows: make the states of rows, and select some of each shard.
  """

  read: dict[Part, Callable[..., tuple[Any, States, jax.Array | None]]]
  static_temperature = False
  copies_prompts = False

  def __init__(self, settings: ProgramSettings, cache: Cache, sizes: CacheSizes):
    """Prepares the programs.

    Args:
      settings: what they are made for, resolved for the platform.
      cache: the device functions of the cache.
      sizes: how much the cache holds.
    """
    model = sizes.model
    self.model = model
    self.cache = cache
    self.sizes = sizes
    self.config = sizes.config
    self.shards = sizes.shards
    self.chunk = sizes.chunk
    self.kv_dtype = settings.config.kv_dtype
    self.stop = np.asarray(sorted(settings.stop), np.int32)
    self.pad = settings.pad

    self.layout = PassingProgram(functools.partial(_decode_params, settings.model, model))
    self.derive_keys = jax.jit(_derive_keys)
    decoder = Decoder(model, cache, self.chunk, settings.vocab_limit)
    decode = functools.partial(decode_chunk, decoder)
    self.decode_chunk = stoppable(decode, 1, 3, static="sampling_params")
    self.init_states = jax.jit(functools.partial(States.zeros, model), static_argnums=(0, 1))
    self.keep_rows = jax.jit(
      lambda states, order: jax.tree.map(
        lambda x: gather_rows(model, x, order.reshape(-1)), states
      ).constrained(model)
    )

  @abc.abstractmethod
  def new_state(
    self, scheduler: Scheduler, longest_prompt: int, sampling_params: SamplingParams
  ) -> SamplerState:
    """Returns an empty cache for prompts of up to `longest_prompt` tokens."""

  @abc.abstractmethod
  def resize(
    self, state: SamplerState, scheduler: Scheduler, keep_slots: bool = False
  ) -> SamplerState:
    """Makes space for the next chunk, and drops idle slots once no completion waits.

    Args:
      state: the state.
      scheduler: its schedule.
      keep_slots: drop no slots, for example because completions with tokens may be added.
    """

  def fit(
    self, state: SamplerState, scheduler: Scheduler, completions: Sequence[int], longest_prompt: int
  ) -> SamplerState:
    """Fits slots and arrays to what runs, where that saves time. Pages stay as they are.

    Args:
      state: the state.
      scheduler: its schedule, of groups of one.
      completions: how many ran or waited lately, and do so now.
      longest_prompt: the tokens of their longest prompt.
    """
    return state

  def with_more_entries(self, state: SamplerState, scheduler: Scheduler) -> SamplerState:
    """Returns a larger state if slots are idle for lack of entries, and else, by default, `state`.

    Args:
      state: the state.
      scheduler: its schedule, which has assigned what it can.
    """
    return state

  @abc.abstractmethod
  def inventory(self, workload: Workload) -> Iterator[Program]:
    """Returns every program that a workload can reach, the largest of each kind first."""

  @abc.abstractmethod
  def abstract_state(self, workload: Workload) -> SamplerState:
    """Returns the shapes and shardings of the largest state of a workload."""

  @abc.abstractmethod
  def places_in_cache(
    self, scheduler: Scheduler, part: Part, batch: PrefillBatch, source: np.ndarray
  ) -> np.ndarray:
    """Returns where the cache puts keys and values of a batch, see `Cache.insert`.

    Args:
      scheduler: the schedule.
      part: what is written.
      batch: the sequences.
      source: i32[shards, rows of a shard], for each entry or slot a row of the batch, or -1.
    """

  def decode(
    self,
    params: DecodeParams,
    state: SamplerState,
    inputs: DecodeInputs,
    max_steps: int,
    max_finished: int,
    sampling_params: SamplingParams | RowSampling,
  ) -> tuple[SamplerState, Chunk]:
    """Decodes one chunk as `decode_chunk` does. Keys, values and slots of `state` are donated."""
    limits = chunk_limits(self, max_steps, max_finished, sampling_params)
    kv, slots, chunk = self.decode_chunk(
      params, *state, inputs, limits, sampling_params=compiled_for(self, sampling_params)
    )
    return SamplerState(kv, state.prompts, slots), chunk


def chunk_limits(
  programs: Programs,
  max_steps: int,
  max_finished: int,
  sampling_params: SamplingParams | RowSampling,
) -> ChunkLimits:
  """Returns what ends a chunk, and the temperature unless it is static."""
  if isinstance(sampling_params, RowSampling):
    temperature = sampling_params
  elif programs.static_temperature:
    temperature = None
  else:
    temperature = np.float32(sampling_params.temperature)
  return ChunkLimits(programs.stop, np.int32(max_steps), np.int32(max_finished), temperature)


def compiled_for(
  programs: Programs, sampling_params: SamplingParams | RowSampling
) -> SamplingParams | None:
  """Returns what a decode program depends on: the filters, and a static temperature.

  One program draws each row in its own way.
  """
  if isinstance(sampling_params, RowSampling):
    return None
  return sampling_params if programs.static_temperature else sampling_params.filters


def keys_program(programs: Programs) -> Program:
  """Returns the program that derives PRNG keys."""
  key = jax.eval_shape(lambda: jax.random.key(0))
  indices = jax.ShapeDtypeStruct((2, KEYS_AT_ONCE), np.int32)
  return Program(("keys",), programs.derive_keys, lambda: (key, indices))


def abstract(model: Transformer, function: Callable[..., Any], *axes: str | None) -> Any:
  """Returns the shapes of `function()`, with shardings by the logical `axes`."""
  return jax.tree.map(lambda x: _abstract_array(model, x, axes), jax.eval_shape(function))


def _abstract_array(
  model: Transformer, x: jax.ShapeDtypeStruct, axes: Sequence[str | None]
) -> jax.ShapeDtypeStruct:
  """Returns the shape of an array with the sharding of its first logical axes."""
  sharding = named_sharding(model.mesh, *axes[: x.ndim])
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def abstract_states(model: Transformer, rows: int, track_tokens: bool) -> States:
  """Returns the shapes and shardings of the states of `rows` rows over all shards."""
  states = jax.eval_shape(lambda: States.zeros(model, rows, track_tokens))
  return jax.tree.map(functools.partial(_abstract_array, model), states, states.axes)


def state_bytes(model: Transformer) -> int:
  """Returns the bytes on one device of what gated delta nets keep of one row."""
  return bytes_per_device(abstract_states(model, batch_shards(model.mesh), False).delta)


def stoppable(function: Callable[..., Any], *donated: int, static: Any = ()) -> StoppableProgram:
  """Returns the jitted function, whose compilation a stop request ends."""
  return StoppableProgram(jax.jit(function, static_argnames=static, donate_argnums=donated))


def _decode_params(trained: Transformer, model: Transformer, params: Params) -> DecodeParams:
  """Returns the parameters of `trained` in sampling layout, in the formats of `model`."""
  if not model.config.lora.rank:
    params = merge_lora(trained, params)
  if model.config.quantize and not trained.config.quantize:
    params = quantize_params(model, params)
  return make_decode_params(model, params)


def _derive_keys(key: jax.Array, indices: jax.Array) -> jax.Array:
  """Returns key data u32[k, 2]: `key` with both numbers of each column of i32[2, k] folded in."""
  fold = lambda i, j: jax.random.fold_in(jax.random.fold_in(key, i), j)
  return jax.random.key_data(jax.vmap(fold)(*indices))
