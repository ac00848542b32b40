"""Sampling for its callers: prompts as lists of token ids in, rollouts out."""
from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.arrays import Prompts, Rollouts
from gtpo_jax.errors import UserError
from gtpo_jax.models.lora import merge_lora, without_lora
from gtpo_jax.models.qwen2 import Params, Qwen2, Unstacked, sampling_layout
from gtpo_jax.parallel import batch_shards, shard_batch
from gtpo_jax.sampling.decode import advance, begin, generate, rollouts
from gtpo_jax.sampling.filters import Sampler


def pad_prompts(ids: Sequence[Sequence[int]], width: int, pad: int) -> Prompts:
  """Host prompts to left-padded arrays [n, width].

  Raises:
    UserError: a prompt is empty or longer than `width`.
  """
  tokens = np.full((len(ids), width), pad, np.int32)
  for row, prompt in zip(tokens, ids, strict=True):
    if not len(prompt):
      raise UserError("a prompt is empty; give at least one token")
    if len(prompt) > width:
      raise UserError(f"a prompt has {len(prompt)} tokens, over the limit of {width}; raise data.max_prompt_tokens or shorten it")
    row[-len(prompt):] = prompt
  return Prompts(tokens, np.asarray([len(prompt) for prompt in ids], np.int32))


class Engine:
  """Compiled sampling for one model on one mesh.

  Shapes come from a small fixed set: prompts are always padded to `max_prompt_tokens`, completions to `max_tokens`, so that
  batches of other lengths compile nothing.
  """

  def __init__(self, model: Qwen2, stop: Sequence[int], pad: int, max_prompt_tokens: int, max_tokens: int,
               words: int | None = None):
    self.model, self.pad = without_lora(model), pad
    self.max_prompt_tokens, self.max_tokens = max_prompt_tokens, max_tokens
    self._stop = jnp.asarray(sorted(stop), jnp.int32)
    self._layout = jax.jit(lambda params: sampling_layout(self.model, merge_lora(model, params)))
    self._words = words
    self._generate = jax.jit(functools.partial(_generate, self.model, words), static_argnames=("sampler", "group", "max_tokens"))

  def layout(self, params: Params) -> Unstacked:
    """The parameters as sampling wants them, adapters merged; make it once and sample many batches from it."""
    return self._layout(params)

  def sample(self, params: Unstacked, prompts: Sequence[Sequence[int]], key: jax.Array, *, group: int,
             sampler: Sampler) -> Rollouts:
    """Samples `group` completions of each prompt.

    Completion (i, j) is drawn with `fold_in(fold_in(key, i), j)`: it depends on the key, the prompt's place and its own
    number, not on the mesh or on the completions beside it.

    Returns:
      Rollouts with n the number of prompts, [n, group, max_tokens], on the mesh. Rows that fill up an uneven batch are cut.
    """
    n = len(prompts)
    shards = batch_shards(self.model.mesh)
    filled = [*prompts, *[prompts[-1]] * (-n % shards)]
    padded = shard_batch(pad_prompts(filled, self.max_prompt_tokens, self.pad), self.model.mesh)
    written = self._generate(params, padded, key, self._stop, jnp.int32(self.pad), sampler=sampler, group=group,
                             max_tokens=self.max_tokens)
    return written if len(filled) == n else jax.tree.map(lambda x: x[:n], written)

  def stream(self, params: Unstacked, prompt: Sequence[int], key: jax.Array, *, group: int, sampler: Sampler,
             chunk: int = 4) -> Iterator[Rollouts]:
    """The same completions of one prompt as `sample` gives, a few tokens at a time: yields the rollouts so far, [1, group, t]."""
    shards = batch_shards(self.model.mesh)
    prompts = shard_batch(pad_prompts([prompt] * shards, self.max_prompt_tokens, self.pad), self.model.mesh)
    model, pad, keys = self.model, jnp.int32(self.pad), completion_keys(key, shards, group)
    begun = jax.jit(lambda params: begin(model, params, prompts, group, pad, self.max_tokens))(params)
    more = jax.jit(lambda params, begun, until: advance(model, params, prompts, begun, keys, self._stop, pad, sampler, until, self._words),
                   donate_argnums=1)
    for until in range(chunk, self.max_tokens + chunk, chunk):
      begun = more(params, begun, jnp.int32(min(until, self.max_tokens)))
      so_far = jax.tree.map(lambda x: jnp.array(x[:1]), rollouts(model, prompts, begun))  # copies: `begun` is given away
      yield so_far
      if bool(so_far.finished.all()):
        return


def _generate(model: Qwen2, words: int | None, params: Unstacked, prompts: Prompts, key: jax.Array, stop: jax.Array, pad: jax.Array, *,
              sampler: Sampler, group: int, max_tokens: int) -> Rollouts:
  return generate(model, params, prompts, completion_keys(key, prompts.tokens.shape[0], group), stop, pad, sampler, max_tokens,
                  words)


def completion_keys(key: jax.Array, n: int, g: int) -> jax.Array:
  """Keys [n, g]: the step's key folded with the prompt's number, then with the completion's."""
  rows = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(n))
  return jax.vmap(lambda row: jax.vmap(lambda j: jax.random.fold_in(row, j))(jnp.arange(g)))(rows)
