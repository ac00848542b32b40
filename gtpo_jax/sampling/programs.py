"""The compiled programs of an engine, and the fixed set of shapes that they are compiled for."""

from __future__ import annotations

import abc
import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.arrays import Prompts
from gtpo_jax.models.decode import DecodeParams, make_decode_params
from gtpo_jax.models.lora import merge_lora
from gtpo_jax.models.params import Params, quantize_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.compiling import StoppableProgram
from gtpo_jax.runtime.mesh import batch_shards, named_sharding
from gtpo_jax.sampling.cache import Cache, States, gather_rows
from gtpo_jax.sampling.decode import Chunk, decode_chunk, prefill_rows
from gtpo_jax.sampling.host_arrays import CompletionBuffer, pad_prefill
from gtpo_jax.sampling.params import Demand, EngineConfig, SamplingParams
from gtpo_jax.sampling.scheduler import Capacity, DecodeInputs, Scheduler

# The most prompt tokens that a shard prefills at once. It bounds the memory of activations.
PREFILL_TOKENS = 8192


class SamplerState(NamedTuple):
  """What stays on the devices while completions are sampled."""

  kv: Any  # the keys and values, see `Cache`
  prompts: States  # of the prompts in the cache
  slots: States


class ProgramSettings(NamedTuple):
  """What the programs of an engine are made for.

  Attributes:
    trained: the trained model, LoRA adapters included, on the training mesh.
    model: the same on the sampling mesh, without adapters.
    stop: token ids that end a completion.
    pad: the padding id.
    max_prompt_tokens: the most tokens of a prompt.
    max_tokens: the most tokens of a completion.
    vocab_limit: only token ids below this are sampled; None for the full vocabulary.
    config: the engine's settings, resolved for the platform.
    demand: the batches that will be sampled.
  """

  trained: Transformer
  model: Transformer
  stop: tuple[int, ...]
  pad: int
  max_prompt_tokens: int
  max_tokens: int
  vocab_limit: int | None
  config: EngineConfig
  demand: Demand


class LoweredProgram(NamedTuple):
  """A program of sampling that is lowered ahead of time, from abstract arrays."""

  name: str
  lowered: jax.stages.Lowered
  arguments: Any  # those that are in device memory
  beside: Any  # other arrays of sampling that are in device memory while it runs


# The kind of a program and all that its shapes depend on. Batches with equal ones share a program.
Signature = tuple[Any, ...]


def count_kinds(signatures: Iterable[Signature]) -> collections.Counter[str]:
  """Returns the number of programs of each kind, such as "prefill" and "decode"."""
  return collections.Counter(signature[0] for signature in signatures)


class Programs(abc.ABC):
  """The jitted functions of sampling for one model on one mesh. They compile on their first use.

  Attributes:
    model: the architecture on the sampling mesh, without adapters.
    cache: the device functions of its cache.
    config: the engine's settings for this platform.
    shards: devices along the batch axes.
    chunk: tokens decoded between two visits to the host.
    kv_dtype: format of cached keys and values.
    prompt_widths: lengths to which prompts are padded, ascending.
    sequence_widths: those to which prompts with completions that go on are padded, ascending.
    static_temperature: whether each temperature has decode programs of its own.
    layout: params -> DecodeParams, with adapters merged unless the base is quantised.
    completion_keys: (key, n, g) -> PRNG key data u32[n, g, 2].
  """

  prompt_widths: list[int]
  sequence_widths: list[int]
  static_temperature = False

  def __init__(self, settings: ProgramSettings, cache: Cache):
    """Prepares the programs.

    Args:
      settings: what they are made for.
      cache: the device functions of the cache.
    """
    model = settings.model
    config = settings.config
    self.model = model
    self.cache = cache
    self.config = config
    self.shards = batch_shards(model.mesh)
    self.chunk = min(config.chunk, settings.max_tokens)
    self.kv_dtype = config.kv_dtype
    self._stop = np.asarray(sorted(settings.stop), np.int32)
    self._pad = settings.pad

    self.layout = jax.jit(functools.partial(_decode_params, settings.trained, model))
    self.completion_keys = jax.jit(_completion_keys, static_argnums=(1, 2))
    prefill = functools.partial(prefill_rows, model, cache.insert)
    self._prefill = StoppableProgram(jax.jit(prefill, donate_argnums=(1, 2)))
    resume = functools.partial(prefill_rows, model, cache.insert_completions)
    self._resume = StoppableProgram(jax.jit(resume, donate_argnums=(1, 2)))
    decode = functools.partial(
      decode_chunk, model, cache, chunk=self.chunk, vocab_limit=settings.vocab_limit
    )
    self._decode = StoppableProgram(
      jax.jit(decode, static_argnames="sampling_params", donate_argnums=(1, 3))
    )
    self._init_states = jax.jit(functools.partial(States.zeros, model), static_argnums=(0, 1))
    self._keep_rows = jax.jit(
      lambda states, order: jax.tree.map(lambda x: gather_rows(model, x, order.reshape(-1)), states)
    )

  # What differs between caches.

  @abc.abstractmethod
  def scheduler(self, prompts: int, group: int) -> Scheduler:
    """Returns an empty schedule for about `prompts` x `group` completions.

    These give the number of slots and cache entries. Other prompts may be added, and any number.
    """

  @abc.abstractmethod
  def new_state(
    self, scheduler: Scheduler, width: int, sampling_params: SamplingParams
  ) -> SamplerState:
    """Returns an empty cache for prompts of up to `width` tokens."""

  @abc.abstractmethod
  def grow(self, state: SamplerState, scheduler: Scheduler) -> SamplerState:
    """Makes space for the next chunk."""

  @abc.abstractmethod
  def resize(self, state: SamplerState, scheduler: Scheduler) -> SamplerState:
    """Makes space for the next chunk, and drops idle slots once no completion waits."""

  @abc.abstractmethod
  def signatures(
    self, prompts: int, group: int, sampling_params: SamplingParams, resumes: bool = False
  ) -> set[Signature]:
    """Returns the programs that `prompts` x `group` completions may need.

    Args:
      prompts, group: the size of the batch.
      sampling_params: how tokens are drawn.
      resumes: whether completions go on that have tokens already.
    """

  @abc.abstractmethod
  def _warm_up(
    self,
    params: DecodeParams,
    prompts: int,
    group: int,
    sampling_params: SamplingParams,
    resumes: bool,
    ready: Callable[[], None],
  ) -> None:
    """Compiles what `warm_up` does, apart from the keys."""

  @abc.abstractmethod
  def abstract_state(
    self, prompts: int, *, group: int, sampling_params: SamplingParams
  ) -> SamplerState:
    """Returns the shapes and shardings of the largest state for `prompts` x `group` completions."""

  @abc.abstractmethod
  def lower(
    self,
    params: DecodeParams,
    prompts: int,
    *,
    group: int,
    sampling_params: SamplingParams,
    resumes: bool = False,
  ) -> Iterator[LoweredProgram]:
    """Lowers the largest program of each kind for `prompts` x `group` completions.

    The mesh may consist of devices that are not present.

    Args:
      params: from `abstract_decode_params`.
      prompts: the number of prompts.
      group: the number of completions of each prompt.
      sampling_params: how tokens are drawn.
      resumes: whether completions go on that have tokens already.
    """

  @abc.abstractmethod
  def _entries(self, capacity: Capacity) -> int:
    """Returns the number of prompts per shard that the cache has states for."""

  @abc.abstractmethod
  def _places(
    self,
    scheduler: Scheduler,
    assigned: list[list[tuple[int, int]]],
    entries: np.ndarray,
    width: int,
  ) -> np.ndarray:
    """Returns where the cache puts newly assigned prompts, see `Cache.insert`."""

  @abc.abstractmethod
  def _completion_places(
    self, scheduler: Scheduler, assigned: list[list[tuple[int, int]]], slots: np.ndarray, width: int
  ) -> np.ndarray:
    """Returns the first part of the places in `Cache.insert_completions`."""

  # What all caches share.

  def warm_up(
    self,
    params: DecodeParams,
    prompts: int,
    *,
    group: int,
    sampling_params: SamplingParams,
    resumes: bool = False,
    ready: Callable[[], None] = lambda: None,
  ) -> None:
    """Compiles every program that sampling `prompts` x `group` completions may need.

    Args:
      params: the parameters in sampling layout.
      prompts: the number of prompts.
      group: the number of completions of each prompt.
      sampling_params: how tokens are drawn.
      resumes: whether completions go on that have tokens already.
      ready: called each time a decoding program is compiled.
    """
    self.completion_keys(jax.random.key(0), prompts, group)
    self._warm_up(params, prompts, group, sampling_params, resumes, ready)

  def prompt_width(self, longest: int) -> int:
    """Returns the length to which prompts of up to `longest` tokens are padded."""
    return next(size for size in self.prompt_widths if size >= longest)

  def prefill_assigned(
    self,
    params: DecodeParams,
    state: SamplerState,
    scheduler: Scheduler,
    prompts: Sequence[Sequence[int]],
    width: int,
  ) -> SamplerState:
    """Lets the scheduler fill free slots, and prefills the prompts that it assigns to entries."""
    rows = _rows_at_once(self._entries(scheduler.capacity), width)
    while any(assigned := scheduler.assign(rows)):
      batch = self._prefill_arguments(scheduler, assigned, prompts, width)
      state = self._run_prefill(params, state, batch)
    return state

  def resume_assigned(
    self,
    params: DecodeParams,
    state: SamplerState,
    scheduler: Scheduler,
    prompts: Sequence[Sequence[int]],
    buffer: CompletionBuffer,
  ) -> SamplerState:
    """Reads the tokens of completions that go on into the slots that they were assigned to."""
    resumed = scheduler.take_resumed()
    if not resumed:
      return state
    state = self.grow(state, scheduler)
    sequences = []
    waiting: dict[int, list[list[tuple[int, int]]]] = {}
    for slot in resumed:
      prompt, index = scheduler.slots.completions[slot]
      tokens = buffer.tokens[prompt, index, : scheduler.slots.generated[slot]]
      sequences.append([*prompts[prompt], *tokens.tolist()])
      width = next(size for size in self.sequence_widths if size >= len(sequences[-1]))
      shard, local = divmod(slot, scheduler.capacity.slots)
      shards = waiting.setdefault(width, [[] for _ in range(self.shards)])
      shards[shard].append((local, len(sequences) - 1))
    for width, shards in waiting.items():
      rows = _rows_at_once(scheduler.capacity.slots, width)
      for start in range(0, max(map(len, shards)), rows):
        assigned = [pairs[start : start + rows] for pairs in shards]
        batch = self._resume_arguments(scheduler, assigned, sequences, width)
        state = self._run_resume(params, state, batch)
    return state

  def decode(
    self,
    params: DecodeParams,
    state: SamplerState,
    inputs: DecodeInputs,
    max_steps: int,
    max_finished: int,
    sampling_params: SamplingParams,
  ) -> tuple[SamplerState, Chunk]:
    """Decodes one chunk as `decode_chunk` does. Keys, values and slots of `state` are donated."""
    arguments = self._decode_arguments(inputs, max_steps, max_finished, sampling_params)
    kv, slots, chunk = self._decode(
      params, *state, *arguments, sampling_params=self._compiled_for(sampling_params)
    )
    return SamplerState(kv, state.prompts, slots), chunk

  def lower_layout(self, params: Params) -> jax.stages.Lowered:
    """Lowers `layout` ahead of time. The mesh may consist of devices that are not present."""
    return self.layout.lower(params)

  def abstract_decode_params(self, params: Params, layout: jax.stages.Compiled) -> DecodeParams:
    """Returns the shapes and shardings of the parameters that the compiled `layout` returns."""
    return jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      jax.eval_shape(self.layout, params),
      layout.output_shardings,
    )

  def _run_prefill(
    self, params: DecodeParams, state: SamplerState, batch: tuple[Prompts, np.ndarray, np.ndarray]
  ) -> SamplerState:
    kv, states = self._prefill(params, state.kv, state.prompts, *batch)
    return state._replace(kv=kv, prompts=states)

  def _run_resume(
    self, params: DecodeParams, state: SamplerState, batch: tuple[Any, ...]
  ) -> SamplerState:
    kv, states = self._resume(params, state.kv, state.slots, *batch)
    return state._replace(kv=kv, slots=states)

  def _resume_arguments(
    self,
    scheduler: Scheduler,
    assigned: list[list[tuple[int, int]]],
    sequences: Sequence[Sequence[int]],
    width: int,
  ) -> tuple[Prompts, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Returns a batch of fixed shape of completions that go on, its slots, and its places."""
    capacity = scheduler.capacity
    rows = _rows_at_once(capacity.slots, width)
    batch, slots = pad_prefill(assigned, sequences, width, rows, capacity.slots, self._pad)
    first = np.full_like(slots, width)
    for shard, pairs in enumerate(assigned):
      for row, (slot, _) in enumerate(pairs):
        first[shard, row] -= scheduler.slots.generated[shard * capacity.slots + slot]
    places = self._completion_places(scheduler, assigned, slots, width)
    return batch, slots, (places, first)

  def _unused_resume(self, scheduler: Scheduler, width: int) -> tuple[Any, ...]:
    """Returns a batch of completions of the right shape that writes nothing."""
    return self._resume_arguments(scheduler, [[] for _ in range(self.shards)], [], width)

  def _prefill_arguments(
    self,
    scheduler: Scheduler,
    assigned: list[list[tuple[int, int]]],
    prompts: Sequence[Sequence[int]],
    width: int,
  ) -> tuple[Prompts, np.ndarray, np.ndarray]:
    """Returns one prefill batch of fixed shape, its entries, and its places in the cache."""
    most = self._entries(scheduler.capacity)
    rows = _rows_at_once(most, width)
    batch, entries = pad_prefill(assigned, prompts, width, rows, most, self._pad)
    return batch, entries, self._places(scheduler, assigned, entries, width)

  def _unused_prefill(
    self, scheduler: Scheduler, width: int
  ) -> tuple[Prompts, np.ndarray, np.ndarray]:
    """Returns a prefill batch of the right shape that writes nothing."""
    no_prompts: list[list[tuple[int, int]]] = [[] for _ in range(self.shards)]
    return self._prefill_arguments(scheduler, no_prompts, [], width)

  def _decode_arguments(
    self, inputs: DecodeInputs, max_steps: int, max_finished: int, sampling_params: SamplingParams
  ) -> tuple[Any, ...]:
    return (
      inputs,
      self._stop,
      np.int32(max_steps),
      np.int32(max_finished),
      None if self.static_temperature else np.float32(sampling_params.temperature),
    )

  def _compiled_for(self, sampling_params: SamplingParams) -> SamplingParams:
    """Returns what a decode program depends on: the filters, and a static temperature."""
    return sampling_params if self.static_temperature else sampling_params.filters

  def _lower_prefill(
    self, params: DecodeParams, state: SamplerState, scheduler: Scheduler, width: int
  ) -> LoweredProgram:
    batch = self._unused_prefill(scheduler, width)
    prefill = self._prefill.lower(params, state.kv, state.prompts, *batch)
    return LoweredProgram("prefill", prefill, (params, state.kv, state.prompts), state.slots)

  def _lower_resume(
    self, params: DecodeParams, state: SamplerState, scheduler: Scheduler, width: int
  ) -> LoweredProgram:
    batch = self._unused_resume(scheduler, width)
    resume = self._resume.lower(params, state.kv, state.slots, *batch)
    return LoweredProgram("resume", resume, (params, state.kv, state.slots), state.prompts)

  def _lower_decode(
    self,
    params: DecodeParams,
    state: SamplerState,
    scheduler: Scheduler,
    sampling_params: SamplingParams,
  ) -> LoweredProgram:
    arguments = self._decode_arguments(scheduler.inputs(), self.chunk, 1, sampling_params)
    decode = self._decode.lower(
      params, *state, *arguments, sampling_params=self._compiled_for(sampling_params)
    )
    return LoweredProgram("decode", decode, (params, state), ())

  def _abstract_states(self, rows: int, sampling_params: SamplingParams) -> States:
    """Returns the shapes of the states of `rows` rows over all shards."""
    track_tokens = sampling_params.penalises_repetition
    return self._abstract(lambda: States.zeros(self.model, rows, track_tokens), "batch")

  def _abstract(self, function: Callable[..., Any], *axes: str | None) -> Any:
    """Returns the shapes of `function()`, with shardings by the logical `axes`."""
    sharding = lambda x: named_sharding(self.model.mesh, *axes[: x.ndim])
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)),
      jax.eval_shape(function),
    )


def _rows_at_once(most: int, width: int) -> int:
  """Returns the number of sequences of `width` tokens, at most `most`, that a shard prefills."""
  return max(min(most, PREFILL_TOKENS // width), 1)


def _decode_params(trained: Transformer, model: Transformer, params: Params) -> DecodeParams:
  """Returns the parameters of `trained` in sampling layout, in the formats of `model`."""
  if not trained.config.quantize:
    params = merge_lora(trained, params)
    if model.config.quantize:
      params = quantize_params(model, params)
  return make_decode_params(model, params)


def _completion_keys(key: jax.Array, n: int, g: int) -> jax.Array:
  """Returns key data u32[n, g, 2]: `key` with each prompt's, then completion's index folded in."""
  rows = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(n))
  fold_group = jax.vmap(lambda row, j: jax.random.fold_in(row, j), in_axes=(None, 0))
  keys = jax.vmap(fold_group, in_axes=(0, None))(rows, jnp.arange(g))
  return jax.random.key_data(keys)
