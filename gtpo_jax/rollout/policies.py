"""Policies from where they lie: a run's checkpoint or base model, a Hugging Face folder; and those that stay frozen in a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from gtpo_jax.checkpoint.digests import digest_tree
from gtpo_jax.checkpoint.manager import open_run, run_params
from gtpo_jax.checkpoint.workdir import has_base, load_config
from gtpo_jax.config import Config, DataSection, MeshSection, ModelSection, SamplingSection
from gtpo_jax.data.chat import load_chat
from gtpo_jax.models.folder import find, is_hf_folder, read_config
from gtpo_jax.models.load import read_params, stored_tensors
from gtpo_jax.models.lora import add_lora
from gtpo_jax.models.qwen2 import Params, Qwen2, init_params
from gtpo_jax.rollout.worker import Policy, RolloutWorker, Stream, key_for
from gtpo_jax.runtime.errors import UserError

PROMPT_TOKENS = 1024  # of a prompt that a Hugging Face folder is sampled with


class FrozenPolicies(NamedTuple):
  """What the config asks for; None for none."""

  guide: Policy | None  # in sampling layout
  reference: tuple[Qwen2, Params] | None  # in training layout
  identity: dict[str, str]  # by path's name, the digest of the parameters
  steps: dict[str, int]  # by path's name, the checkpoint, of those that are a run's


def load_frozen(
  config: Config, worker: RolloutWorker, workdir: Path, steps: Mapping[str, int]
) -> FrozenPolicies:
  """The guide and the reference, on the actor's mesh. An empty path stands for the base model of the run in `workdir`.

  Args:
    config: names them.
    actor: the policy that learns beside them.
    workdir: of this run.
    steps: what `FrozenPolicies.steps` was when this run began, so that it goes on with the same checkpoints: {} to take the newest.

  Raises:
    UserError: a checkpoint of `steps` is no longer there.
  """
  settings = config.algorithm_built.settings
  guide = None
  reference = None
  identity = {}
  pinned = {}

  def load(name: str, path: str) -> tuple[Qwen2, Params]:
    try:
      model, params, step = _load(path, config, worker, workdir, steps.get(name))
    except UserError as error:
      raise UserError(f"{name} = {path!r}: {error}") from error
    identity[name] = digest_tree(params)[:16]
    if step is not None:
      pinned[name] = step
    return model, params

  if settings.guide_completions:
    model, params = load("guide.path", config.guide.path)
    engine = worker.engine_for(
      model, words=worker.chat.vocab_size
    )  # never a padding word, which the policy may not have
    guide = Policy(engine, engine.layout(params))
  if settings.kl_weight:
    reference = load("reference.path", config.reference.path)
  return FrozenPolicies(guide, reference, identity, pinned)


def check_frozen(config: Config, worker: RolloutWorker) -> None:
  """Refuses paths that hold no policy of this vocabulary, before anything is compiled.

  Raises:
    UserError: no such folder, no checkpoint in it, or another vocabulary.
  """
  for name, path in (("guide.path", config.guide.path), ("reference.path", config.reference.path)):
    if not path:
      continue
    folder = find(path)
    rows = _architecture(
      folder, worker
    ).config.vocab_size  # more than the tokenizer has: Qwen2.5's sizes are padded differently
    if rows < worker.chat.vocab_size:
      raise UserError(
        f"{name} = {path!r} has a vocabulary of {rows} tokens, the policy's tokenizer of {worker.chat.vocab_size}; "
        f"they must share a tokenizer"
      )
    if is_hf_folder(folder) and (folder / "tokenizer_config.json").exists():
      theirs = load_chat(folder).tokenizer.get_vocab()
      ours = worker.chat.tokenizer.get_vocab()
      if different := sorted(word for word in ours if theirs.get(word) != ours[word]):
        raise UserError(
          f"{name} = {path!r} has another tokenizer: {different[0]!r} and {len(different) - 1} other words differ; "
          f"they must share one"
        )


def check_weights(config: Config) -> None:
  """Reads the headers of the weights that a run starts from. Raises UserError where a file is missing or damaged."""
  if config.model.path:
    stored_tensors(find(config.model.path))


def base_params(config: Config, workdir: Path, model: Qwen2) -> Params | None:
  """The policy that the RL of a run starts from, where it need not be made: kept in WORKDIR/base, or as its folder gives it."""
  if has_base(workdir):
    return run_params(workdir, model, 0)[0]
  return (
    initial_params(config, model) if config.model.path and not config.warm_start.steps else None
  )


def initial_params(config: Config, model: Qwen2) -> Params:
  """What a run begins with, before any warm start: the weights of its folder with fresh adapters, or random ones."""
  key = key_for(config.seed, Stream.INIT)
  return (
    add_lora(model, read_params(model, find(config.model.path)), key)
    if config.model.path
    else init_params(model, key)
  )


class PolicySource(NamedTuple):
  """A policy whose parameters are not read yet."""

  worker: RolloutWorker
  config: Config
  read: Callable[[], tuple[Params, int]]  # the parameters and the step


def find_policy(
  workdir: Path, step: int | None, given: Config | None = None, max_tokens: int | None = None
) -> PolicySource:
  """The actor and config of a policy, on the devices of this machine.

  Args:
    workdir: of a `gtpo train`, a Hugging Face folder, or a hub id.
    step: which checkpoint of a run; None for the newest, 0 for the base model.
    given: a config to use instead of the run's own, of the same model or of none; for a Hugging Face folder, instead of the defaults.
    max_tokens: the longest completion; the run's own limit if None, or 256.

  Raises:
    UserError: no such folder, run or checkpoint, or a config of another model.
  """
  workdir = find(str(workdir))
  if is_hf_folder(workdir):
    if step is not None:
      raise UserError(
        f"{str(workdir)!r} is a Hugging Face folder and has no steps; leave --step out"
      )
    config = given or _config_of_folder(workdir, max_tokens)
    config = dataclasses.replace(
      config, model=dataclasses.replace(config.model, path=str(workdir), lora_rank=0)
    )
    worker = RolloutWorker(config, max_tokens)
    return PolicySource(worker, config, lambda: (read_params(worker.model, workdir), 0))
  own = load_config(workdir)
  if given and (given.model.path, given.model.preset) == (
    "",
    ModelSection().preset,
  ):  # it names none, as those of configs/eval_*.py
    given = dataclasses.replace(given, model=own.model)
  if given and (given.model.preset, given.model.path) != (own.model.preset, own.model.path):
    raise UserError(
      f"the run in {str(workdir)!r} is of model {own.model.path or own.model.preset!r}, the config of "
      f"{given.model.path or given.model.preset!r}; leave --config out, or name the run's"
    )
  config = given or dataclasses.replace(
    own, mesh=MeshSection()
  )  # a run of a pod is looked at on a laptop
  if step == 0 and not has_base(workdir) and own.model.path:
    worker = RolloutWorker(config, max_tokens)
    return PolicySource(worker, config, lambda: (base_params(own, workdir, worker.model), 0))
  open_run(workdir, step).close()  # refused before the actor is made
  worker = RolloutWorker(config, max_tokens)
  return PolicySource(worker, config, lambda: run_params(workdir, worker.model, step))


def open_policy(
  workdir: Path, step: int | None, given: Config | None = None, max_tokens: int | None = None
) -> tuple[RolloutWorker, Config, Params, int]:
  """The actor, config, parameters and step of a policy; see `find_policy`."""
  worker, config, read = find_policy(workdir, step, given, max_tokens)
  return worker, config, *read()


def _config_of_folder(folder: Path, max_tokens: int | None) -> Config:
  """A config to sample from a folder with: half precision where that is fast, and all the context that the model has."""
  dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  tokens = 256 if max_tokens is None else max_tokens
  longest = read_config(folder, dtype).longest
  return Config(
    model=ModelSection(path=str(folder), param_dtype=dtype, compute_dtype=dtype),
    data=DataSection(max_prompt_tokens=min(PROMPT_TOKENS, max(longest - tokens, 1))),
    sampling=SamplingSection(max_tokens=max(tokens, 2)),
  )


def _architecture(folder: Path, worker: RolloutWorker) -> Qwen2:
  own = worker.model.config
  if is_hf_folder(folder):
    return Qwen2(
      dataclasses.replace(
        read_config(folder, own.compute_dtype),
        remat=own.remat,
        matmul_precision=own.matmul_precision,
        attention=own.attention,
      ),
      worker.model.mesh,
    )
  open_run(folder).close()
  return Qwen2(load_config(folder).model_config, worker.model.mesh)


def _load(
  path: str, config: Config, worker: RolloutWorker, workdir: Path, step: int | None
) -> tuple[Qwen2, Params, int | None]:
  """A frozen policy, and which checkpoint it is where it is a run's: that of `step`, or the newest."""
  if not path:
    return worker.model, base_params(config, workdir, worker.model), None
  folder = find(path)
  model = _architecture(folder, worker)
  if is_hf_folder(folder):
    return model, read_params(model, folder), None
  return model, *run_params(folder, model, step)
