"""The acting half of a step: problems to completions, completions to verdicts."""
from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from gtpo_jax.arrays import Rollouts
from gtpo_jax.config import Config
from gtpo_jax.data.chat import Chat, load_chat
from gtpo_jax.data.records import Problem
from gtpo_jax.errors import UserError
from gtpo_jax.judging import Judge, Judgement
from gtpo_jax.models.folder import find
from gtpo_jax.models.qwen2 import Params, Qwen2, Unstacked, param_shardings
from gtpo_jax.parallel import fetch, make_mesh, shard_batch
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.filters import Sampler


class Stream(enum.IntEnum):
  """The uses of random keys; each has keys of its own."""

  INIT = 0
  SAMPLE = 1
  EVALUATE = 2
  GUIDE = 3


def key_for(seed: int, stream: Stream, step: int = 0) -> jax.Array:
  """The random key of one use at one step."""
  return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)


@dataclasses.dataclass(frozen=True)
class Completions:
  """What the host reads of one call's rollouts."""

  texts: list[list[str]]  # [n][g]
  lengths: np.ndarray     # i32[n, g], tokens
  finished: np.ndarray    # bool[n, g], False where the length ran out


class Policy(NamedTuple):
  """Something that writes completions: a compiled sampler and the parameters that it samples from."""

  engine: Engine
  params: Unstacked


class Actor:
  """A model on a mesh with its tokenizer: it answers problems, and has its answers judged."""

  def __init__(self, config: Config, max_tokens: int | None = None):
    self.chat: Chat = load_chat(find(config.model.path)) if config.model.path else load_chat()
    self.model = Qwen2(config.model_config, make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor))
    param_shardings(self.model)  # refuses a mesh that does not divide the model
    if self.chat.vocab_size > config.model_config.vocab_size:
      raise UserError(f"the tokenizer has {self.chat.vocab_size} tokens, over the {config.model_config.vocab_size} of model "
                      f"{config.model.path or config.model.preset!r}; choose a larger model")
    self._max_prompt_tokens, self._max_tokens = config.data.max_prompt_tokens, max_tokens or config.sampling.max_tokens
    self.engine = self.engine_for(self.model)
    self._data, self.judge = config.data, Judge(config)

  def engine_for(self, model: Qwen2, words: int | None = None) -> Engine:
    """A sampler of `model` with this actor's tokenizer and limits, of its first `words` words alone where that is given."""
    return Engine(model, self.chat.stop, self.chat.pad, self._max_prompt_tokens, self._max_tokens, words)

  def encode(self, problem: Problem) -> list[int]:
    """A problem's token ids, put as the config's system message and template say."""
    data, *rest, last = self._data, *problem.messages
    messages = [*rest, {**last, "content": data.template.replace("{prompt}", last["content"])}]
    if data.system and messages[0]["role"] != "system":
      messages.insert(0, {"role": "system", "content": data.system})
    return self.chat.encode_prompt(messages) if data.chat else self.chat.encode_text("\n\n".join(m["content"] for m in messages))

  def policy(self, params: Params) -> Policy:
    """The actor's own model with `params`, laid out for sampling: make it once and sample many batches from it."""
    return Policy(self.engine, self.engine.layout(params))

  def answer(self, policy: Policy, problems: Sequence[Problem], key: jax.Array, group: int, sampler: Sampler) -> Rollouts:
    """Samples `group` completions of each problem; returns when they are done."""
    prompts = [self.encode(problem) for problem in problems]
    return shard_batch(policy.engine.sample(policy.params, prompts, key, group=group, sampler=sampler), self.model.mesh)

  def judged(self, rollouts: Rollouts, problems: Sequence[Problem]) -> tuple[list[list[str]], Judgement]:
    """The completions as text [n][g], and what was found of them."""
    read = self.read(rollouts)
    return read.texts, self.judge(problems, read.texts, read.lengths, read.finished)

  def read(self, rollouts: Rollouts) -> Completions:
    """The completions on the host, as text."""
    tokens, mask, finished = fetch((rollouts.tokens, rollouts.mask, rollouts.finished))
    return Completions(self.texts(tokens, mask), mask.sum(-1), finished)

  def texts(self, tokens: np.ndarray, mask: np.ndarray) -> list[list[str]]:
    """Completions [n, g, t] as text, [n][g]."""
    n, g, _ = tokens.shape
    flat = self.chat.decode(tokens.reshape(n * g, -1), mask.reshape(n * g, -1))
    return [flat[i * g:(i + 1) * g] for i in range(n)]
