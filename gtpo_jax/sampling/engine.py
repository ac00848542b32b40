"""The sampling engine: takes prompts as lists of token ids, and yields completions as they end."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from gtpo_jax.arrays import Rollouts
from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.models.experts.routing import RouteShape
from gtpo_jax.models.lora import without_lora
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.chips import compute_capability
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import batch_shards, sampling_mesh
from gtpo_jax.sampling.completion import Completion, Prompt, pad_completions
from gtpo_jax.sampling.dense.programs import DensePrograms
from gtpo_jax.sampling.paged.programs import PagedPrograms
from gtpo_jax.sampling.prefill.batches import pad_prompts
from gtpo_jax.sampling.programs import KEYS_AT_ONCE, Programs, ProgramSettings
from gtpo_jax.sampling.session import Pace, Session
from gtpo_jax.sampling.settings import SamplingParams
from gtpo_jax.sampling.spans import Span
from gtpo_jax.sampling.stop_strings import StopStrings

# The number of engines whose programs a process caches: policy, guide and evaluation of two runs.
SHARED_PROGRAMS = 6
MIN_TRITON_HEAD_DIM = 16  # the smallest matrix that a tensor core multiplies
MIN_TRITON_CAPABILITY = (8, 0)  # Ampere
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

  def __init__(self, settings: ProgramSettings, stop_strings: StopStrings | None = None):
    """Prepares the programs; they compile on their first use.

    Args:
      settings: the model, its tokens and limits, and how the engine runs.
      stop_strings: strings that end a completion, found on the host after each chunk; None for
        none.
    """
    self.programs = make_programs(settings._replace(stop=tuple(sorted(settings.stop))))
    self.model = self.programs.model
    self.pad = settings.pad
    self.max_prompt_tokens = settings.max_prompt_tokens
    self.max_tokens = settings.max_tokens
    self._stop_strings = stop_strings
    self.statistics: dict[str, float] = {}
    self.spans: collections.deque[Span] = collections.deque(maxlen=MAX_SPANS)

  def describe(self) -> str:
    """Returns one line that describes how this engine samples."""
    config = self.programs.config
    platform = self.model.mesh.devices.flat[0].platform
    return (
      f"in chunks of {self.programs.chunk} tokens, attention by {config.attention} on {platform}, "
      f"keys and values as {self.programs.kv_dtype} in {self.programs.sizes.describe()}"
    )

  def layout(self, params: Params) -> DecodeParams:
    """Returns `params` in sampling layout, with adapters merged, for any number of batches."""
    return self.programs.layout(params)

  def completions(
    self, prompts: Sequence[Sequence[int]], keys: np.ndarray, token_limits: np.ndarray | None = None
  ) -> list[list[Completion]]:
    """Returns n rows of g completions without tokens; row i is group i until the caller names it.

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
    limits = np.minimum(token_limits, left[:, None])
    stop = self._stop_strings
    route_shape = RouteShape.of(self.model.config)
    return [
      [
        Completion(shared, keys[i, j], int(limit), stop, route_shape=route_shape, group=i, index=j)
        for j, limit in enumerate(limits[i])
      ]
      for i, shared in enumerate(map(Prompt, prompts))
    ]

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
    rows = self.completions(prompts, self.completion_keys(key, len(prompts), group))
    for _ in self.generate(params, rows, sampling_params=sampling_params):
      pass
    return self.rollouts(rows)

  def rollouts(self, rows: Sequence[Sequence[Completion]], **fields: Any) -> Rollouts:
    """Returns n rows of g completions as arrays; for `fields`, see `pad_completions`."""
    return pad_completions(rows, self.max_tokens, self.max_prompt_tokens, self.pad, **fields)

  def generate(
    self,
    params: DecodeParams,
    rows: Sequence[Sequence[Completion]],
    *,
    sampling_params: SamplingParams,
    stream_interval: int | None = None,
    prompts_at_once: int | None = None,
  ) -> Iterator[list[Completion]]:
    """Samples completions to their ends, and yields those that have ended after each chunk.

    It first yields those that had ended already.

    A completion ends at a stop token, at the token that completes a stop string, or at its limit.
    Token i of it is drawn with its key and i. It depends on the parameters, the tokens before it
    and this key, but not on slots, mesh or other completions. The caller may stop iterating at any
    time, and pass the completions to another call.

    Args:
      params: from `layout`.
      rows: n rows of g completions, each row with one prompt.
      sampling_params: how tokens are drawn.
      stream_interval: the most tokens of a step, if that is less than the engine's chunk. It has no
        effect if the engine is batch-invariant.
      prompts_at_once: the number of rows that space is made for; None for n.
    """
    session = self.session(
      params,
      rows,
      sampling_params,
      stream_interval=stream_interval,
      prompts_at_once=prompts_at_once,
    )
    for row in rows:
      session.submit(row[0].prompt, row)
    yield session.had_ended()
    while session.busy:
      yield session.step()

  def session(
    self,
    params: DecodeParams,
    rows: Sequence[Sequence[Completion]],
    sampling_params: SamplingParams,
    *,
    stream_interval: int | None = None,
    prompts_at_once: int | None = None,
    longest_prompt: int | None = None,
  ) -> Session:
    """Returns a session with space for `rows`, which are not submitted; see `generate`.

    Args:
      params, sampling_params, stream_interval, prompts_at_once: see `generate`.
      rows: n rows of g completions.
      longest_prompt: the tokens of the longest prompt, those submitted later included; None for
        that of the rows.
    """
    chunk = self.programs.chunk
    fixed = self.programs.config.batch_invariant
    most = chunk if fixed else min(stream_interval or chunk, chunk)
    return Session(
      self.programs,
      params,
      self.programs.sizes.scheduler(prompts_at_once or len(rows), len(rows[0]) if rows else 1),
      Pace(most, fixed=fixed),
      sampling_params,
      longest_prompt or max((len(row[0].prompt.tokens) for row in rows), default=1),
      self.spans,
      self.statistics,
    )


@functools.lru_cache(maxsize=SHARED_PROGRAMS)
def make_programs(settings: ProgramSettings) -> Programs:
  """Returns the programs of an engine; engines with equal settings share them.

  Raises:
    UserError: the attention kernel does not support this platform or head width.
  """
  model = settings.model
  config = settings.config
  c = model.config
  device = model.mesh.devices.flat[0]
  refusal = triton_refusal(compute_capability(device), c.head_dim)
  # Merging adapters into a quantised base would dequantise it.
  beside = c.quantize or config.merge_adapters == "never"
  merged = c if beside else without_lora(model).config
  if config.weights_dtype:
    merged = dataclasses.replace(merged, quantize=config.weights_dtype)
  on_sampling_mesh = Transformer(merged, sampling_mesh(model.mesh, c.kv_heads, *c.mlps))
  shards = batch_shards(on_sampling_mesh.mesh)
  config = config.resolve(device.platform, shards, c.compute_dtype, triton=not refusal)
  if config.attention == "triton" and refusal:
    raise UserError(f"sampling.attention = 'triton' needs {refusal}; set it to 'xla'")
  make = DensePrograms if config.attention == "xla" else PagedPrograms
  return make(settings._replace(config=config), on_sampling_mesh)


def triton_refusal(capability: tuple[int, int] | None, head_dim: int) -> str:
  """Returns what the Triton kernel needs and does not have; "" if it supports a GPU and a model.

  Args:
    capability: the compute capability of the GPU; None if unknown.
    head_dim: the features of a head.
  """
  if head_dim & (head_dim - 1) or head_dim < MIN_TRITON_HEAD_DIM:
    return f"a head width that is a power of two from {MIN_TRITON_HEAD_DIM}, not {head_dim}"
  if capability and capability < MIN_TRITON_CAPABILITY:
    return f"a GPU of compute capability 8.0 or later, not {'.'.join(map(str, capability))}"
  return ""
