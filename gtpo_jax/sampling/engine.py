"""The sampling engine: takes prompts as lists of token ids, and yields completions as they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from gtpo_jax.arrays import Rollouts
from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.models.params import Params
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.host_arrays import CompletionBuffer, pad_prompts
from gtpo_jax.sampling.params import EngineConfig, SamplingParams
from gtpo_jax.sampling.programs import make_programs
from gtpo_jax.sampling.scheduler import Scheduler

# While completions wait, a chunk ends once 1/8 of the active slots have finished. With a smaller
# fraction the host round trips cost more than they gain; with a larger one too many slots idle.
REFILL_FRACTION = 8


class Engine:
  """Samples from one model on one mesh, with continuous batching over a fixed number of slots.

  Each prompt is prefilled once, and its keys and values are stored once for its group. All slots
  decode a chunk of tokens without returning to the host; between chunks, finished slots take the
  next completions. The slots' caches grow with the longest running completion. Once no completion
  waits for a slot, idle slots are dropped. All shapes come from a small fixed set, so that few
  programs are compiled.

  Attributes:
    programs: the compiled programs; `programs.warm_up` compiles them ahead of time.
    model: the architecture on the sampling mesh, without adapters.
  """

  def __init__(
    self,
    model: Qwen2,
    stop: Sequence[int],
    pad: int,
    max_prompt_tokens: int,
    max_tokens: int,
    vocab_limit: int | None = None,
    engine_config: EngineConfig | None = None,
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
    )
    self.model = self.programs.model
    self.pad = pad
    self.max_prompt_tokens = max_prompt_tokens
    self.max_tokens = max_tokens

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
    token limit, or where the model's context ends.

    Args:
      params: from `layout`.
      prompts: token ids, n lists.
      key: typed PRNG key.
      group: completions per prompt.
      sampling_params: how tokens are drawn.
      stream_interval: yields after this many tokens instead of the engine's chunk, if that is less.
      token_limits: i32[n, group] >= 1, maximum tokens of each completion; None for `max_tokens`.

    Yields:
      The buffer, always the same object, and the (prompt, index) of each completion that has ended
      since the last yield. The first yield is before sampling and lists the completions for which
      the context has no space; the others follow each chunk.

    Raises:
      UserError: a prompt is empty, or longer than `max_prompt_tokens` or the model's context.
    """
    prompt_lengths = self._prompt_lengths(prompts)
    limits = self._token_limits(token_limits, prompt_lengths, group)
    buffer = CompletionBuffer.empty(len(prompts), group, self.max_tokens, self.pad)
    yield buffer, _as_pairs(np.argwhere(limits == 0))
    if not limits.any():
      return

    programs = self.programs
    capacity = programs.capacity(len(prompts), group)
    keys = np.asarray(programs.completion_keys(key, len(prompts), group))
    scheduler = Scheduler(capacity, prompt_lengths, limits, keys)
    width = next(size for size in programs.prompt_widths if size >= max(prompt_lengths))
    prompt_cache = programs.new_prompt_cache(capacity, width, sampling_params)
    slots = programs.new_slots(capacity, sampling_params)
    max_steps = min(stream_interval or programs.chunk, programs.chunk)
    while True:
      prompt_cache = programs.prefill_assigned(params, prompt_cache, scheduler, prompts)
      if not scheduler.active.any():
        return
      slots = programs.resize(slots, scheduler)
      inputs = scheduler.inputs()
      max_finished = _max_finished(scheduler)
      slots, chunk = programs.decode(
        params, prompt_cache, slots, inputs, max_steps, max_finished, sampling_params
      )
      chunk = jax.device_get(chunk)
      completions = scheduler.completions.copy()
      buffer.write(completions, inputs.generated, chunk)
      new_tokens = chunk.mask.sum(0)
      at_limit = inputs.generated + new_tokens >= inputs.max_tokens
      ended = inputs.active & (chunk.stopped | at_limit)
      scheduler.advance(new_tokens, ended)
      yield buffer, _as_pairs(completions[ended])

  def _prompt_lengths(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the lengths i32[n] of the prompts, and raises the UserErrors of `generate`."""
    lengths = pad_prompts(prompts, self.max_prompt_tokens, self.pad).lengths
    context = self.model.config.max_length
    longest = max(lengths, default=0)
    if longest > context:
      raise UserError(
        f"a prompt has {longest} tokens, over the model's context of {context}; shorten it"
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


def _max_finished(scheduler: Scheduler) -> int:
  """Returns the number of finished slots that ends a chunk: all active slots if nothing waits."""
  active = int(scheduler.active.sum())
  return max(active // REFILL_FRACTION, 1) if scheduler.has_waiting else active


def _as_pairs(completions: np.ndarray) -> list[tuple[int, int]]:
  return [(prompt, index) for prompt, index in completions.tolist()]
