"""The acting half of a step: problems to completions, completions to verdicts."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax

from gtpo_jax.arrays import Rollouts
from gtpo_jax.config import Config
from gtpo_jax.data.chat import Chat, load_chat
from gtpo_jax.data.records import Problem
from gtpo_jax.models.folder import find
from gtpo_jax.models.qwen2 import DecodeParams, Params, Qwen2, param_shardings
from gtpo_jax.rollout.scoring import PendingRewards, RewardFunction, RewardManager
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.filters import SamplingParams


class Stream(enum.IntEnum):
  """The uses of random keys; each has keys of its own."""

  INIT = 0
  SAMPLE = 1
  EVALUATE = 2
  GUIDE = 3


def key_for(seed: int, stream: Stream, step: int = 0) -> jax.Array:
  """The random key of one use at one step."""
  return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)


class Policy(NamedTuple):
  """Something that writes completions: a compiled sampler and the parameters that it samples from."""

  engine: Engine
  params: DecodeParams


class RolloutWorker:
  """A model on a mesh with its tokenizer: it answers problems, and has its answers judged, by `verifier` where that is given."""

  def __init__(
    self, config: Config, max_tokens: int | None = None, verifier: RewardFunction | None = None
  ):
    self.chat: Chat = load_chat(find(config.model.path)) if config.model.path else load_chat()
    self.model = Qwen2(config.model_config, make_mesh(**dataclasses.asdict(config.mesh)))
    param_shardings(self.model)  # refuses a mesh that does not divide the model
    if self.chat.vocab_size > config.model_config.vocab_size:
      raise UserError(
        f"the tokenizer and its end tokens have ids up to {self.chat.vocab_size - 1}, model "
        f"{config.model.path or config.model.preset!r} a vocabulary of {config.model_config.vocab_size}; "
        f"they do not belong together"
      )
    self._max_prompt_tokens = config.data.max_prompt_tokens
    self._max_tokens = max_tokens or config.sampling.max_tokens
    self._engine_config = config.engine_config
    self._config = config
    self._verifier = verifier
    self.engine = self.engine_for(self.model)

  @functools.cached_property
  def reward_manager(self) -> RewardManager:
    """Made when something is to be judged: sampling from a run needs none of its reward functions. Raises UserError as `RewardManager`."""
    return RewardManager(self._config, self._verifier)

  def close(self) -> None:
    """Ends the judge's thread; what is judged later has a new one."""
    if reward_manager := vars(self).pop("reward_manager", None):
      reward_manager.close()

  def engine_for(self, model: Qwen2, words: int | None = None) -> Engine:
    """A sampler of `model` with this actor's tokenizer and engine_config, of its first `words` words alone where that is given."""
    return Engine(
      model,
      self.chat.stop,
      self.chat.pad,
      self._max_prompt_tokens,
      self._max_tokens,
      words,
      self._engine_config,
    )

  def encode(self, problem: Problem) -> list[int]:
    """A problem's token ids, put as the config's system message and template say."""
    data, *rest, last = self._config.data, *problem.messages
    messages = [*rest, {**last, "content": data.template.replace("{prompt}", last["content"])}]
    if data.system and messages[0]["role"] != "system":
      messages.insert(0, {"role": "system", "content": data.system})
    return (
      self.chat.encode_prompt(messages)
      if data.chat
      else self.chat.encode_text("\n\n".join(m["content"] for m in messages))
    )

  def policy(self, params: Params) -> Policy:
    """The actor's own model with `params`, laid out for sampling: make it once and sample many batches from it."""
    return Policy(self.engine, self.engine.layout(params))

  def pending(self, problems: Sequence[Problem], group: int) -> PendingRewards:
    """The judging of `group` completions of each problem, to be handed to `generate`."""
    return PendingRewards(self.reward_manager, problems, group, self.chat.decode)

  @functools.partial(jax.profiler.annotate_function, name="sample")
  def generate(
    self,
    policy: Policy,
    problems: Sequence[Problem],
    key: jax.Array,
    group: int,
    sampling_params: SamplingParams,
    pending: PendingRewards | None = None,
    first: int = 0,
  ) -> Rollouts:
    """Samples `group` completions of each problem, [n, group, t] in host arrays, and puts each into the judging as it ends.

    Its number there is `first` more than here.
    """
    prompts = [self.encode(problem) for problem in problems]
    buffer = None
    for buffer, ended in policy.engine.generate(
      policy.params, prompts, key, group=group, sampling_params=sampling_params
    ):
      if pending:
        pending.put(
          [
            ((i, first + j), buffer.tokens[i, j, buffer.mask[i, j]], bool(buffer.finished[i, j]))
            for i, j in ended
          ]
        )
    return policy.engine.rollouts(buffer, prompts)
