"""The sampling engine: takes prompts as lists of token ids, and yields completions as they end."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from gtpo_jax.arrays import Rollouts
from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.models.lora import without_lora
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.chips import compute_capability
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import batch_shards, sampling_mesh
from gtpo_jax.runtime.spans import Span
from gtpo_jax.sampling.dense_programs import DensePrograms
from gtpo_jax.sampling.host_arrays import CompletionBuffer, pad_prompts
from gtpo_jax.sampling.paged_programs import PagedPrograms
from gtpo_jax.sampling.params import Demand, EngineConfig, SamplingParams
from gtpo_jax.sampling.programs import Programs, ProgramSettings

# While completions wait, a chunk ends once 1/8 of the active slots have finished. With a smaller
# fraction the host round trips cost more than they gain; with a larger one too many slots idle.
REFILL_FRACTION = 8
# The number of engines whose programs a process caches: policy, guide and evaluation of two runs.
SHARED_PROGRAMS = 6
DEFAULT_DEMAND = Demand()
MAX_SPANS = 4096
MIN_TRITON_HEAD_DIM = 16  # the smallest matrix that a tensor core multiplies
MIN_TRITON_CAPABILITY = (8, 0)  # Ampere


class Engine:
  """Samples from one model on one mesh, with continuous batching over a fixed number of slots.

  Each prompt is prefilled once, and its keys and values are stored once for its group. All slots
  decode a chunk of tokens without returning to the host; between chunks, finished slots take the
  next completions. Keys and values are in pages on TPUs and GPUs, and elsewhere in arrays that grow
  with the longest running completion. Once no completion waits for a slot, idle slots are dropped.
  All shapes come from a small fixed set, so few programs are compiled.

  Attributes:
    programs: the compiled programs; `programs.warm_up` compiles them ahead of time.
    model: the architecture on the sampling mesh, without adapters.
    statistics: metrics of the latest batch by name, of how well it used slots and pages.
    spans: when the latest chunks were prefilled and decoded, by `time.perf_counter`.
  """

  def __init__(
    self,
    model: Transformer,
    stop: Sequence[int],
    pad: int,
    max_prompt_tokens: int,
    max_tokens: int,
    vocab_limit: int | None = None,
    engine_config: EngineConfig | None = None,
    demand: Demand = DEFAULT_DEMAND,
  ):
    """Prepares the programs; they compile on their first use.

    Args:
      model: the trained model, LoRA adapters included, on the training mesh.
      stop: token ids that end a completion.
      pad: the padding id.
      max_prompt_tokens: the most tokens of a prompt.
      max_tokens: the most tokens of a completion.
      vocab_limit: only token ids below this are sampled; None for the full vocabulary.
      engine_config: slots, chunk, cache format and kernel; None for the platform's defaults.
      demand: the batches that will be sampled, if known.

    Raises:
      UserError: the attention kernel does not support this platform or head width.
    """
    self.programs = _make_programs(
      model,
      tuple(sorted(stop)),
      pad,
      max_prompt_tokens,
      max_tokens,
      vocab_limit,
      engine_config or EngineConfig(),
      demand,
    )
    self.model = self.programs.model
    self.pad = pad
    self.max_prompt_tokens = max_prompt_tokens
    self.max_tokens = max_tokens
    self.statistics: dict[str, float] = {}
    self.spans: collections.deque[Span] = collections.deque(maxlen=MAX_SPANS)

  def describe(self) -> str:
    """Returns one line that describes how this engine samples."""
    config = self.programs.config
    platform = self.model.mesh.devices.flat[0].platform
    return (
      f"{config.slots} completions at once in chunks of {self.programs.chunk} tokens, keys and "
      f"values as {self.programs.kv_dtype}, attention by {config.attention} on {platform}"
    )

  def layout(self, params: Params) -> DecodeParams:
    """Returns `params` in sampling layout, with adapters merged, for any number of batches."""
    return self.programs.layout(params)

  def sample(
    self,
    params: DecodeParams,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    *,
    group: int,
    sampling_params: SamplingParams,
  ) -> Rollouts:
    """Samples `group` completions of each prompt; see `generate`.

    Returns:
      Rollouts [n, group, max_tokens] in host arrays.
    """
    *_, (buffer, _) = self.generate(
      params, prompts, key, group=group, sampling_params=sampling_params
    )
    return self.rollouts(buffer, prompts)

  def rollouts(self, buffer: CompletionBuffer, prompts: Sequence[Sequence[int]]) -> Rollouts:
    """Returns the completions of a buffer with their prompts, in host arrays."""
    return Rollouts(
      pad_prompts(prompts, self.max_prompt_tokens, self.pad),
      buffer.tokens,
      buffer.mask,
      buffer.log_probs,
      buffer.entropy,
      buffer.finished,
    )

  def generate(
    self,
    params: DecodeParams,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    *,
    group: int,
    sampling_params: SamplingParams,
    stream_interval: int | None = None,
    token_limits: np.ndarray | None = None,
  ) -> Iterator[tuple[CompletionBuffer, list[tuple[int, int]]]]:
    """Samples `group` completions of each prompt, and yields them while they are generated.

    Completion j of prompt i is drawn with `fold_in(fold_in(key, i), j)`. It depends on `key`, the
    prompt, i and j, but not on slots, mesh or other completions. It ends at a stop token, at its
    token limit, or at the end of the model's context.

    Args:
      params: from `layout`.
      prompts: token ids, n lists.
      key: typed PRNG key.
      group: completions per prompt.
      sampling_params: how tokens are drawn.
      stream_interval: the most tokens between two yields, if that is less than the engine's chunk.
      token_limits: i32[n, group] >= 1, maximum tokens of each completion; None for `max_tokens`.

    Yields:
      The buffer, always the same object, and the (prompt, index) of each completion that has ended
      since the last yield. The first yield comes before sampling and lists the completions for
      which the context has no space; then there is one after each chunk.

    Raises:
      UserError: a prompt is empty, or longer than `max_prompt_tokens` or the model's context.
    """
    prompt_lengths = self._prompt_lengths(prompts)
    limits = self._token_limits(token_limits, prompt_lengths, group)
    buffer = CompletionBuffer.empty(len(prompts), group, self.max_tokens, self.pad)
    yield buffer, _as_pairs(np.argwhere(limits == 0))
    if limits.any():
      keys = self.completion_keys(key, len(prompts), group)
      for ended in self._generate(
        params, prompts, keys, buffer, prompt_lengths, limits, sampling_params, stream_interval
      ):
        yield buffer, ended

  def resume(
    self,
    params: DecodeParams,
    prompts: Sequence[Sequence[int]],
    keys: np.ndarray,
    buffer: CompletionBuffer,
    *,
    sampling_params: SamplingParams,
    token_limits: np.ndarray | None = None,
  ) -> Iterator[list[tuple[int, int]]]:
    """Continues completions that earlier calls left unfinished, possibly with other parameters.

    The tokens that a completion has already are read in one pass. Token i of a completion is drawn
    with the same random number in any call.

    Args:
      params: from `layout`.
      prompts: token ids, n lists.
      keys: from `completion_keys`, u32[n, g, 2].
      buffer: what has been sampled so far, [n, g, ...]; the new tokens are added to it. It may be
        empty. Completions that have ended stay as they are.
      sampling_params: how tokens are drawn.
      token_limits: as in `generate`, tokens of earlier calls included.

    Yields:
      After each chunk, the (prompt, index) of each completion that ended in it. The caller may stop
      iterating at any time.

    Raises:
      UserError: as `generate`.
    """
    prompt_lengths = self._prompt_lengths(prompts)
    limits = self._token_limits(token_limits, prompt_lengths, keys.shape[1])
    limits = np.where(_have_ended(buffer, limits), 0, limits)
    if limits.any():
      yield from self._generate(
        params, prompts, keys, buffer, prompt_lengths, limits, sampling_params, None
      )

  def completion_keys(self, key: jax.Array, n: int, group: int) -> np.ndarray:
    """Returns the PRNG key data u32[n, group, 2] of completions, which `generate` describes."""
    return np.asarray(self.programs.completion_keys(key, n, group))

  def ended(self, prompt_lengths: np.ndarray, buffer: CompletionBuffer) -> np.ndarray:
    """Returns which completions have ended, bool[n, g]: at a stop token or at their limit."""
    group = buffer.finished.shape[1]
    return _have_ended(buffer, self._token_limits(None, prompt_lengths, group))

  def _generate(
    self,
    params: DecodeParams,
    prompts: Sequence[Sequence[int]],
    keys: np.ndarray,
    buffer: CompletionBuffer,
    prompt_lengths: np.ndarray,
    limits: np.ndarray,
    sampling_params: SamplingParams,
    stream_interval: int | None,
  ) -> Iterator[list[tuple[int, int]]]:
    """Samples the completions with `limits` above 0 to their ends, and yields as `resume` does."""
    programs = self.programs
    drawn = buffer.mask.sum(-1, dtype=np.int32)
    scheduler = programs.scheduler(*limits.shape)
    scheduler.add(prompt_lengths, limits, keys, drawn)
    width = programs.prompt_width(max(prompt_lengths))
    state = programs.new_state(scheduler, width, sampling_params)
    max_steps = min(stream_interval or programs.chunk, programs.chunk)
    slots = len(scheduler.slots.active)
    tokens = 0
    steps = 0
    while True:
      began = time.perf_counter()
      before = state
      state = programs.prefill_assigned(params, state, scheduler, prompts, width)
      state = programs.resume_assigned(params, state, scheduler, prompts, buffer)
      prefilled = state is not before
      if not scheduler.slots.active.any():
        return
      state = programs.resize(state, scheduler)
      inputs = scheduler.inputs()  # while the devices prefill
      if prefilled:
        jax.block_until_ready(state)
        self.spans.append(Span("prefill", began, time.perf_counter(), 0.0))
      began = time.perf_counter()
      max_finished = _max_finished(int(inputs.active.sum()), scheduler.has_waiting)
      state, chunk = programs.decode(
        params, state, inputs, max_steps, max_finished, sampling_params
      )
      chunk = jax.device_get(chunk)
      completions = scheduler.slots.completions.copy()
      buffer.write(completions, inputs.generated, chunk)
      new_tokens = chunk.mask.sum(0)
      chunk_tokens = int(new_tokens.sum())
      chunk_steps = int(new_tokens.max())
      busy = chunk_tokens / (slots * chunk_steps)
      self.spans.append(Span("decode", began, time.perf_counter(), busy))
      tokens += chunk_tokens
      steps += chunk_steps
      at_limit = inputs.generated + new_tokens >= inputs.max_tokens
      ended = inputs.active & (chunk.stopped | at_limit)
      scheduler.advance(new_tokens, ended)
      busy = tokens / (slots * steps)
      self.statistics = {"sampling/slots_busy": busy, **scheduler.space.statistics()}
      yield _as_pairs(completions[ended])

  def _prompt_lengths(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the lengths i32[n] of the prompts, and raises the UserErrors of `generate`."""
    lengths = pad_prompts(prompts, self.max_prompt_tokens, self.pad).lengths
    context = self.model.config.max_length
    longest = max(lengths, default=0)
    if longest > context:
      raise UserError(
        f"a prompt has {longest} tokens, over the model's context of {context}; shorten the prompt"
      )
    return lengths

  def _token_limits(
    self, token_limits: np.ndarray | None, prompt_lengths: np.ndarray, group: int
  ) -> np.ndarray:
    """Returns i32[n, group], the maximum tokens of each completion; 0 if the context is full."""
    if token_limits is None:
      token_limits = np.full((len(prompt_lengths), group), self.max_tokens)
    left = np.minimum(self.max_tokens, self.model.config.max_length - prompt_lengths)
    return np.minimum(token_limits.astype(np.int32), left[:, None])


def _max_finished(active: int, has_waiting: bool) -> int:
  """Returns the number of finished slots that ends a chunk: all active slots if nothing waits."""
  return max(active // REFILL_FRACTION, 1) if has_waiting else active


def _have_ended(buffer: CompletionBuffer, limits: np.ndarray) -> np.ndarray:
  """Returns which completions have ended, bool[n, g]: at a stop token or at their limit."""
  return buffer.finished | (buffer.mask.sum(-1) >= limits)


def _as_pairs(completions: np.ndarray) -> list[tuple[int, int]]:
  return [(prompt, index) for prompt, index in completions.tolist()]


@functools.lru_cache(maxsize=SHARED_PROGRAMS)
def _make_programs(
  model: Transformer,
  stop: tuple[int, ...],
  pad: int,
  max_prompt_tokens: int,
  max_tokens: int,
  vocab_limit: int | None,
  config: EngineConfig,
  demand: Demand,
) -> Programs:
  """Returns the programs of an engine; engines with equal arguments share them."""
  c = model.config
  device = model.mesh.devices.flat[0]
  refusal = _triton_refusal(device, c.head_dim)
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


def _triton_refusal(device: jax.Device, head_dim: int) -> str:
  """Returns what the Triton kernel needs and does not have; "" if it supports device and model."""
  if head_dim & (head_dim - 1) or head_dim < MIN_TRITON_HEAD_DIM:
    return f"a head width that is a power of two from {MIN_TRITON_HEAD_DIM}, not {head_dim}"
  capability = compute_capability(device)
  if capability and capability < MIN_TRITON_CAPABILITY:
    return f"a GPU of compute capability 8.0 or later, not {'.'.join(map(str, capability))}"
  return ""
