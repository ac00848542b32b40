"""The host arrays of sampling: padded prompts, and the completions generated so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from gtpo_jax.arrays import Prompts
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.decode import Chunk


@dataclasses.dataclass(frozen=True)
class CompletionBuffer:
  """The completions of one `Engine.generate` call, filled in place chunk by chunk."""

  tokens: np.ndarray  # i32[n, g, t]; the padding id where the mask is False
  mask: np.ndarray  # bool[n, g, t], True on generated tokens
  log_probs: np.ndarray  # f32[n, g, t], nats, as in `Rollouts`
  entropy: np.ndarray  # f32[n, g, t], nats, as in `Rollouts`
  drawn_log_probs: np.ndarray  # f32[n, g, t], nats, after penalty and filters
  plain_log_probs: np.ndarray  # f32[n, g, t], nats, at temperature 1
  finished: np.ndarray  # bool[n, g], True if ended by a stop token

  @classmethod
  def empty(cls, n: int, g: int, t: int, pad: int) -> CompletionBuffer:
    """Returns a buffer without tokens."""
    return cls(
      tokens=np.full((n, g, t), pad, np.int32),
      mask=np.zeros((n, g, t), bool),
      log_probs=np.zeros((n, g, t), np.float32),
      entropy=np.zeros((n, g, t), np.float32),
      drawn_log_probs=np.zeros((n, g, t), np.float32),
      plain_log_probs=np.zeros((n, g, t), np.float32),
      finished=np.zeros((n, g), bool),
    )

  def write(self, completions: np.ndarray, start: np.ndarray, chunk: Chunk) -> None:
    """Writes the tokens of a chunk.

    Args:
      completions: i32[s, 2], the (prompt, index in its group) in each slot.
      start: i32[s], the number of tokens in each slot before the chunk.
      chunk: the chunk, in host arrays.
    """
    step, slot = np.nonzero(chunk.mask)
    at = (*completions[slot].T, start[slot] + step)
    self.mask[at] = True
    for field in ("tokens", "log_probs", "entropy", "drawn_log_probs", "plain_log_probs"):
      getattr(self, field)[at] = getattr(chunk, field)[step, slot]
    self.finished[tuple(completions[chunk.stopped].T)] = True


def pad_prompts(ids: Sequence[Sequence[int]], width: int, pad: int) -> Prompts:
  """Pads prompts on the left to host arrays [n, width].

  Raises:
    UserError: a prompt is empty or longer than `width`.
  """
  tokens = np.full((len(ids), width), pad, np.int32)
  for row, prompt in zip(tokens, ids, strict=True):
    if not len(prompt):
      raise UserError("a prompt is empty; give at least one token")
    if len(prompt) > width:
      raise UserError(
        f"a prompt has {len(prompt)} tokens, over the limit of {width}; "
        "raise data.max_prompt_tokens or shorten the prompt"
      )
    row[-len(prompt) :] = prompt
  return Prompts(tokens, np.asarray([len(prompt) for prompt in ids], np.int32))


def pad_prefill(
  assigned: list[list[tuple[int, int]]],
  prompts: Sequence[Sequence[int]],
  width: int,
  rows: int,
  entries: int,
  pad: int,
) -> tuple[Prompts, np.ndarray]:
  """Builds one prefill batch of fixed shape from the scheduler's assignments.

  Args:
    assigned: for each shard, the (entry, prompt) pairs to prefill; at most `rows`.
    prompts: token ids of every prompt.
    width: tokens per row, at least the length of the longest prompt.
    rows: rows per shard; unused rows are padding.
    entries: prompt cache entries per shard.
    pad: the padding id.

  Returns:
    The prompts [shards * rows, width], and their entries i32[shards, rows]. The entry of an unused
    row is `entries`, which is out of bounds, so its write is dropped.
  """
  ids: list[Sequence[int]] = []
  entry_of_row: list[list[int]] = []
  for pairs in assigned:
    unused = rows - len(pairs)
    ids += [prompts[prompt] for _, prompt in pairs] + [[pad]] * unused
    entry_of_row.append([entry for entry, _ in pairs] + [entries] * unused)
  return pad_prompts(ids, width, pad), np.asarray(entry_of_row, np.int32)
