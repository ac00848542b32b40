"""The rollout worker samples completions of problems, with a model, a tokenizer and an engine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from gtpo_jax.checkpoint.opening import teacher_model
from gtpo_jax.config import Config, resolve_model
from gtpo_jax.config.updates import run_demand
from gtpo_jax.data.chat import Chat, load_chat
from gtpo_jax.data.chat_template import TOKENIZER_DIR
from gtpo_jax.data.records import Problem
from gtpo_jax.environments.environment import Maker, add_to_prompt
from gtpo_jax.environments.episodes import Episodes
from gtpo_jax.environments.turns import Message
from gtpo_jax.models.attention.causal import attention_kind
from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.models.params import Params, param_shardings
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.rollout.user_environments import agent_rules, environment_rules
from gtpo_jax.runtime.chips import usable_memory
from gtpo_jax.runtime.distributed import least_of_processes
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.programs import ProgramSettings
from gtpo_jax.sampling.settings import Demand
from gtpo_jax.sampling.stop_strings import StopStrings


class Policy(NamedTuple):
  """Something that can be sampled from: an engine, and parameters in its layout."""

  engine: Engine
  params: DecodeParams


class RolloutWorker:
  """Encodes problems as prompts and samples completions of them.

  Attributes:
    model: the architecture on the training mesh.
    compute_dtype_reason: completes "computing in FORMAT, because ...".
    teacher: the architecture of the teacher; None without one.
    model_folder: the Hugging Face folder that `model.path` names; None for a preset.
    chat: the tokenizer with its chat template and stop tokens.
    stop_strings: strings that end a completion; None for none.
    episodes: plays the episodes of completions; None if these have one turn.
    evaluated_episodes: plays those of evaluations. Episodes that stay in flight between steps would
      keep them from the threads.
    engine: the sampling engine of `model`.

  Raises:
    UserError: the model cannot be found or is not supported, it cannot be sharded over the mesh,
      its vocabulary is smaller than the tokenizer's, or the tokenizer cannot write a stop string;
      or the environment and the tools cannot be used with it.
  """

  def __init__(
    self,
    config: Config,
    max_tokens: int | None = None,
    stop: Sequence[str] | None = None,
    trains: bool = True,
    serves: bool = False,
    environment: Callable[[], Any] | Maker | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    agent: Callable[..., Any] | None = None,
  ):
    """Args:
    config: the run's config.
    max_tokens: replaces `config.sampling.max_tokens`; None keeps it.
    stop: replaces `config.sampling.stop`; None keeps it.
    trains: whether the model is trained, so that its optimizer's state takes memory too.
    serves: whether requests come one by one and at any time; see `Demand`.
    environment: replaces `config.env.make`; None keeps it.
    tools: replace `config.env.tools`; None keeps them.
    agent: replaces `config.env.agent`; None keeps it.
    """
    resolved = resolve_model(config)
    self.model_folder = resolved.folder
    self.compute_dtype_reason = resolved.compute_dtype_reason
    variables = config.data.template_variables
    self.chat: Chat = load_chat(resolved.folder or TOKENIZER_DIR, variables)
    self.model = Transformer(resolved.config, make_mesh(**dataclasses.asdict(config.mesh)))
    param_shardings(self.model)  # raises an error if the mesh does not fit the model
    attention_kind(resolved.config, self.model.mesh)  # or if the device does not support the model
    if self.chat.vocab_size > resolved.config.vocab_size:
      raise UserError(
        f"the tokenizer and its end tokens have ids up to {self.chat.vocab_size - 1}, but model "
        f"{config.model.path or config.model.preset!r} has a vocabulary of "
        f"{resolved.config.vocab_size}; they do not belong together"
      )
    self._data = config.data
    self._teacher_prompt = config.teacher.prompt
    self._teacher_prompt_tokens = config.teacher_prompt_tokens
    self._max_tokens = max_tokens or config.sampling.max_tokens
    self.stop_strings = _stop_strings(self.chat, config.sampling.stop if stop is None else stop)
    if agent is not None or config.env.agent:
      strings = self.stop_strings.strings if self.stop_strings else ()
      rules = agent_rules(config, self.chat, agent, self._max_tokens, strings)
    else:
      cut = self.stop_strings.cut if self.stop_strings else str
      rules = environment_rules(config, self.chat, environment, tools, cut)
    self.episodes = Episodes(rules) if rules else None
    stays = rules and trains and config.sampling.staleness
    self.evaluated_episodes = Episodes(rules.apart()) if stays else self.episodes
    self._schemas = rules.schemas if rules else ()
    self._engine_config = config.engine_config
    devices = jax.local_devices()
    memory = least_of_processes(usable_memory(devices[0], len(devices)))
    self.teacher = teacher_model(config, self.model) if trains else None
    self._demand = run_demand(config, self.model, memory, trains, self.teacher)
    if serves:
      self._demand = Demand(memory=self._demand.memory, serves=True)
    self.engine = self.engine_for(self.model)

  def engine_for(self, model: Transformer, vocab_limit: int | None = None) -> Engine:
    """Returns an engine for `model` with this worker's tokenizer and settings.

    Args:
      model: an architecture that shares the tokenizer.
      vocab_limit: only token ids below this are sampled; None for the model's vocabulary.
    """
    settings = ProgramSettings(
      model,
      self.chat.stop,
      self.chat.pad,
      self._data.max_prompt_tokens,
      self._max_tokens,
      vocab_limit,
      self._engine_config,
      self._demand,
    )
    return Engine(settings, self.stop_strings)

  def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
    """Returns the texts of completions, each cut before its first stop string.

    If completions are episodes, a text has all turns, and what the model has read, and is not cut.
    """
    texts = self.chat.decode(rows)
    cuts = self.stop_strings and not self.episodes
    return [self.stop_strings.cut(text) for text in texts] if cuts else texts

  def encode(self, problem: Problem, added: str | Sequence[Message] = "") -> list[int]:
    """Returns a problem's token ids, with the config's system message and template applied.

    Args:
      problem: the problem.
      added: what its environment adds to the prompt.
    """
    text = self._data.template.replace("{prompt}", problem.messages[-1]["content"])
    return self._encode(problem, text, added)

  def encode_for_teacher(self, problem: Problem) -> list[int]:
    """Returns the token ids that the teacher reads in place of `encode`'s."""
    values = {"{prompt}": problem.messages[-1]["content"], "{answer}": problem.answer}
    text = re.sub("{prompt}|{answer}", lambda found: values[found[0]], self._teacher_prompt)
    tokens = self._encode(problem, text)
    if len(tokens) > self._teacher_prompt_tokens:
      raise UserError(
        f"the teacher's prompt of problem {problem.id!r} has {len(tokens)} tokens, but at most "
        f"{self._teacher_prompt_tokens} are allowed; raise teacher.max_prompt_tokens"
      )
    return tokens

  def _encode(self, problem: Problem, text: str, added: str | Sequence[Message] = "") -> list[int]:
    """Returns the token ids of a problem with `text` as its last message; see `encode`."""
    data = self._data
    *earlier, last = problem.messages
    messages = [*earlier, {**last, "content": text}]
    if data.system and messages[0]["role"] != "system":
      messages.insert(0, {"role": "system", "content": data.system})
    if added:
      messages = add_to_prompt(messages, added)
    if data.chat:
      return self.chat.encode_prompt(messages, self._schemas)
    return self.chat.encode_text("\n\n".join(message["content"] for message in messages))

  def policy(self, params: Params) -> Policy:
    """Returns the worker's own model with `params` in the sampling layout.

    Make it once and sample many batches from it.
    """
    return Policy(self.engine, self.engine.layout(params))

  def close(self) -> None:
    """Closes the episodes that are in flight."""
    for episodes in filter(None, {self.episodes, self.evaluated_episodes}):
      episodes.close()


def _stop_strings(chat: Chat, strings: Sequence[str]) -> StopStrings | None:
  """Returns what finds stop strings in the completions of a tokenizer; None if there are none."""
  for string in strings:
    try:
      written = "".join(chat.decode([chat.encode_plain(string)]))
    except UserError as error:
      raise UserError(
        f"sampling.stop has {string!r}, which no completion can contain: {error}"
      ) from error
    if not written:
      raise UserError(
        f"sampling.stop has {string!r}, of which the tokenizer leaves an empty text; remove it"
      )
  return StopStrings(strings, lambda: chat.text_stream().add, chat.decode) if strings else None
