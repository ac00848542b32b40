"""The sampling engine: takes prompts as lists of token ids, and yields completions as they end."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from gtpo_jax.arrays import Rollouts
from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.caches import make_programs
from gtpo_jax.sampling.host_arrays import CompletionBuffer, pad_prompts
from gtpo_jax.sampling.programs import KEYS_AT_ONCE
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.settings import Demand, EngineConfig, SamplingParams
from gtpo_jax.sampling.spans import Span
from gtpo_jax.sampling.stop_strings import StopStrings

# While completions wait, or return for further turns, a chunk ends once 1/8 of the active slots
# have finished. With a smaller fraction the host round trips cost more than they gain; with a
# larger one too many slots idle.
REFILL_FRACTION = 8
DEFAULT_DEMAND = Demand()
MAX_SPANS = 4096


class Engine:
  """Samples from one model on one mesh, with continuous batching over a fixed number of slots.

  Each prompt is prefilled once, and its keys and values are stored once for its group. All slots
  decode a chunk of tokens without returning to the host; between chunks, finished slots take the
  next completions. Keys and values are in pages on TPUs and GPUs, and elsewhere in arrays that grow
  with the longest running completion. Once no completion waits for a slot, idle slots are dropped.
  All shapes come from a small fixed set, so few programs are compiled.

  Attributes:
    programs: the compiled programs; `inventory.warm_up` compiles them ahead of time.
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
    stop_strings: StopStrings | None = None,
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
      stop_strings: strings that end a completion, found on the host after each chunk; None for
        none.

    Raises:
      UserError: the attention kernel does not support this platform or head width.
    """
    self.programs = make_programs(
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
    self._stop_strings = stop_strings
    self.statistics: dict[str, float] = {}
    self.spans: collections.deque[Span] = collections.deque(maxlen=MAX_SPANS)

  def describe(self) -> str:
    """Returns one line that describes how this engine samples."""
    config = self.programs.config
    platform = self.model.mesh.devices.flat[0].platform
    return (
      f"in chunks of {self.programs.chunk} tokens, attention by {config.attention} on {platform}, "
      f"keys and values as {self.programs.kv_dtype} in {self.programs.describe_space()}"
    )

  def layout(self, params: Params) -> DecodeParams:
    """Returns `params` in sampling layout, with adapters merged, for any number of batches."""
    return self.programs.layout(params)

  def buffer(
    self, prompts: Sequence[Sequence[int]], keys: np.ndarray, token_limits: np.ndarray | None = None
  ) -> CompletionBuffer:
    """Returns a buffer for `generate`, with completions that have no tokens yet.

    Args:
      prompts: token ids, n lists.
      keys: from `completion_keys`, u32[n, g, 2].
      token_limits: i32[n, g] >= 1, maximum tokens of each completion; None for `max_tokens`. No
        completion gets more than `max_tokens`, or than the model's context has space for.

    Raises:
      UserError: a prompt is empty, or longer than `max_prompt_tokens` or the model's context.
    """
    lengths = pad_prompts(prompts, self.max_prompt_tokens, self.pad).lengths
    context = self.model.config.max_length
    longest = max(lengths, default=0)
    if longest > context:
      raise UserError(
        f"a prompt has {longest} tokens, over the model's context of {context}; shorten the prompt"
      )
    if token_limits is None:
      token_limits = np.full(keys.shape[:2], self.max_tokens)
    left = np.minimum(self.max_tokens, context - lengths)
    limits = np.minimum(token_limits.astype(np.int32), left[:, None])
    search = self._stop_strings.search() if self._stop_strings else None
    return CompletionBuffer.empty(prompts, keys, limits, self.max_tokens, self.pad, search)

  def completion_keys(self, key: jax.Array, n: int, group: int) -> np.ndarray:
    """Returns PRNG key data u32[n, group, 2]: for completion j of prompt i, `key` with i, then j.

    Both numbers are folded in. What is drawn with these keys does not depend on n or `group`.
    """
    indices = np.indices((n, group), np.int32).reshape(2, -1)
    keys = np.empty((indices.shape[1], 2), np.uint32)
    for start in range(0, len(keys), KEYS_AT_ONCE):
      part = indices[:, start : start + KEYS_AT_ONCE]
      padded = np.pad(part, ((0, 0), (0, KEYS_AT_ONCE - part.shape[1])))
      derived = np.asarray(self.programs.derive_keys(key, padded))
      keys[start : start + KEYS_AT_ONCE] = derived[: part.shape[1]]
    return keys.reshape(n, group, 2)

  def sample(
    self,
    params: DecodeParams,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    *,
    group: int,
    sampling_params: SamplingParams,
  ) -> Rollouts:
    """Samples `group` completions of each prompt with `completion_keys(key, ...)`.

    Returns:
      Rollouts [n, group, max_tokens] in host arrays.
    """
    buffer = self.buffer(prompts, self.completion_keys(key, len(prompts), group))
    for _ in self.generate(params, buffer, sampling_params=sampling_params):
      pass
    return self.rollouts(buffer)

  def rollouts(self, buffer: CompletionBuffer) -> Rollouts:
    """Returns the completions of a buffer with their padded prompts, in host arrays."""
    return buffer.rollouts(self.max_prompt_tokens)

  def generate(
    self,
    params: DecodeParams,
    buffer: CompletionBuffer,
    *,
    sampling_params: SamplingParams,
    stream_interval: int | None = None,
    prompts_at_once: int | None = None,
    longest_prompt: int | None = None,
  ) -> Iterator[list[tuple[int, int]]]:
    """Samples the completions of a buffer to their ends, and yields which ones have ended.

    Completions that have tokens already go on after them, possibly with other parameters: these
    tokens are read in one pass. Token i of a completion is drawn with its key and i. It depends on
    the parameters, the tokens before it and this key, but not on slots, mesh or other completions.
    A completion ends at a stop token, at the token that completes a stop string, or at its limit.

    If it is open (`CompletionBuffer.open`), only its turn has ended. It is yielded and leaves its
    slot, while others are sampled. Once the caller has appended tokens to it, it goes on: its
    tokens are read again. While all completions wait for the caller, each iteration yields an empty
    list; it ends once all have been closed.

    The caller may add rows to the buffer whenever this has yielded; they begin after those that
    wait already. It may also stop iterating at any time, and pass the buffer to another call.

    Args:
      params: from `layout`.
      buffer: the completions; new tokens are added to it. Completions that have ended stay as they
        are.
      sampling_params: how tokens are drawn.
      stream_interval: the most tokens between two yields, if that is less than the engine's chunk.
      prompts_at_once: the number of rows that space is made for; None for those of the buffer.
      longest_prompt: the tokens of the longest prompt, those added later included; None for that of
        the buffer.

    Yields:
      The (row, index) of each completion that has ended, or has ended a turn, since the last yield.
      The first yield, like that after rows were added, comes before sampling and lists those that
      had ended before: those that the context has no space for, for example. Otherwise there is one
      after each chunk.
    """
    programs = self.programs
    n, group = buffer.limits.shape
    scheduler = programs.scheduler(prompts_at_once or n, group)
    width = programs.prompt_width(longest_prompt or max(map(len, buffer.prompts), default=1))
    most_steps = min(stream_interval or programs.chunk, programs.chunk)
    slots = len(scheduler.slots.active)
    state = None
    scheduled = 0
    parked = _Parked(scheduler, buffer)
    tokens_and_steps = np.zeros(2, np.int64)
    while True:
      if len(buffer.prompts) > scheduled:
        had_turned = _schedule(scheduler, buffer, scheduled)
        scheduled = len(buffer.prompts)
        parked.add(had_turned)
        yield had_turned
        continue  # the caller may have added more
      parked.update()
      if state is None and scheduler.has_waiting:
        state = programs.new_state(scheduler, width, sampling_params)
      if state is None or not (scheduler.has_waiting or scheduler.slots.active.any()):
        if not parked.waiting:
          return
        yield []
        continue
      began = time.perf_counter()
      before = state
      state = programs.prefill_assigned(params, state, scheduler, buffer.prompts, width)
      state = programs.resume_assigned(params, state, scheduler, buffer.prompts, buffer)
      prefilled = state is not before
      state = programs.resize(state, scheduler, keep_slots=parked.may_return)
      inputs = scheduler.inputs()  # while the devices prefill
      if prefilled:
        jax.block_until_ready(state)
        self.spans.append(Span("prefill", began, time.perf_counter(), 0.0))
      began = time.perf_counter()
      refills = scheduler.has_waiting or parked.have_returned
      max_finished = _max_finished(int(inputs.active.sum()), refills)
      state, chunk = programs.decode(
        params, state, inputs, most_steps, max_finished, sampling_params
      )
      chunk = jax.device_get(chunk)
      completions = scheduler.slots.completions.copy()
      new_tokens = buffer.write(completions, inputs.generated, chunk)
      in_chunk = new_tokens.sum(), chunk.mask.any(1).sum()
      self.spans.append(Span("decode", began, time.perf_counter(), _busy(*in_chunk, slots)))
      tokens_and_steps += in_chunk
      turned = inputs.active & buffer.turned(tuple(completions.T))
      scheduler.advance(new_tokens, turned)
      busy = _busy(*tokens_and_steps, slots)
      self.statistics = {"sampling/slots_busy": busy, **scheduler.space.statistics()}
      pairs = _as_pairs(completions[turned])
      parked.add(pairs)
      yield pairs


class _Parked:
  """The completions that have ended a turn, and wait for the caller.

  Attributes:
    waiting: their (row, index).
    have_returned: whether any completion has gone on with another turn.
  """

  def __init__(self, scheduler: Scheduler, buffer: CompletionBuffer):
    self.waiting: list[tuple[int, int]] = []
    self.have_returned = False
    self._scheduler = scheduler
    self._buffer = buffer

  @property
  def may_return(self) -> bool:
    """Whether slots are kept for completions that may go on."""
    return bool(self.waiting) or self.have_returned

  def add(self, turned: Sequence[tuple[int, int]]) -> None:
    """Adds those that are open of completions that have just ended a turn."""
    if self._buffer.open.any():
      self.waiting += [pair for pair in turned if self._buffer.open[pair]]

  def update(self) -> None:
    """Lets those go on to which the caller has appended tokens, and forgets those it has closed."""
    buffer = self._buffer
    returned = [pair for pair in self.waiting if not buffer.turned(pair)]
    for i, j in sorted(returned, reverse=True):  # each goes to the front of the queue
      length = buffer.length(i, j)
      self._scheduler.resume(i, j, length, int(buffer.limits[i, j]), buffer.keys[i, j])
    self.have_returned |= bool(returned)
    self.waiting = [pair for pair in self.waiting if buffer.turned(pair) and buffer.open[pair]]


def _schedule(scheduler: Scheduler, buffer: CompletionBuffer, first: int) -> list[tuple[int, int]]:
  """Schedules the rows of a buffer from `first` on; returns the completions that draw no token."""
  turned = buffer.turned(slice(first, None))
  scheduler.add(
    np.asarray([len(prompt) for prompt in buffer.prompts[first:]], np.int32),
    np.where(turned, 0, buffer.limits[first:]),
    buffer.keys[first:],
    buffer.lengths[first:],
  )
  return _as_pairs(np.argwhere(turned) + np.asarray([first, 0]))


def _max_finished(active: int, refills: bool) -> int:
  """Returns the number of finished slots that ends a chunk: all active slots if nothing refills."""
  return max(active // REFILL_FRACTION, 1) if refills else active


def _busy(tokens: int, steps: int, slots: int) -> float:
  """Returns the share of the slots' steps that drew a token of a completion."""
  return int(tokens) / (slots * int(steps))


def _as_pairs(completions: np.ndarray) -> list[tuple[int, int]]:
  return [(prompt, index) for prompt, index in completions.tolist()]
