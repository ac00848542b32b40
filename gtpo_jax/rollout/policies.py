"""Opens policies: a run's checkpoints, its base model, or a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from gtpo_jax.arrays import KeyStream, key_for
from gtpo_jax.checkpoint.opening import open_run, run_params, usable_here
from gtpo_jax.checkpoint.workdir import has_base, load_config
from gtpo_jax.config import (
  Config,
  DataSection,
  EnvSection,
  MeshSection,
  ModelSection,
  SamplingSection,
  override,
  resolve_model,
  with_date,
)
from gtpo_jax.models.hf.config_json import read_config
from gtpo_jax.models.hf.folder import find, is_hf_folder
from gtpo_jax.models.hf.load import read_params, stored_tensors
from gtpo_jax.models.lora import add_lora, combine
from gtpo_jax.models.params import Params, init_params
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError

HF_PROMPT_TOKENS = 1024  # the longest prompt when sampling from a Hugging Face folder
HF_MAX_TOKENS = 256  # the longest completion, unless the caller sets another limit
SERVED_CHUNK = 8  # tokens between two parts of an answer on a CPU
SERVED_SLOTS = 32
SHORTEST_COMPLETION = 2  # that a config can name
SHORTEST_CONTEXT = 64  # tokens of a prompt or a completion, of which a server needs the memory


class PolicySource(NamedTuple):
  """A policy whose parameters have not been read yet."""

  worker: RolloutWorker
  config: Config
  read: Callable[[], tuple[Params, int]]  # returns the parameters and their step


def check_weights(worker: RolloutWorker) -> None:
  """Reads the headers of the weights that a run starts from."""
  if worker.model_folder:
    stored_tensors(worker.model_folder)


def initial_params(config: Config, worker: RolloutWorker, base: Params | None = None) -> Params:
  """Returns the parameters before any warm start.

  These are the weights of the model's folder with fresh adapters, or random ones for a preset.
  `base` replaces the weights of the folder.
  """
  key = key_for(config.seed, KeyStream.INIT)
  if worker.model_folder is None:
    return init_params(worker.model, key)
  return add_lora(worker.model, base or read_params(worker.model, worker.model_folder), key)


def base_params(
  config: Config, workdir: Path, worker: RolloutWorker, base: Params | None = None
) -> Params | None:
  """Returns the parameters that a run's RL started from; None if they do not exist yet.

  They are in WORKDIR/base, or in the model's folder if there was no warm start. `base` holds the
  arrays of those that adapters leave as they are, if these are in memory already.
  """
  if has_base(workdir):
    params, _ = run_params(workdir, worker.model, 0, base)
    return combine(params, base) if base else params
  if config.model.path and not config.warm_start.steps:
    return initial_params(config, worker, base)
  return None


def find_policy(
  workdir: Path,
  step: int | None,
  config: Config | None = None,
  max_tokens: int | None = None,
  stop: Sequence[str] | None = None,
  overrides: Sequence[str] = (),
  serves: bool = False,
) -> PolicySource:
  """Returns a policy's worker and config, on the devices of this machine.

  Args:
    workdir: the workdir of a `gtpo train` run, a Hugging Face folder, or a hub id.
    step: a checkpoint of a run; None for the newest, 0 for the base model.
    config: replaces the config of the run, and must then name the same model or none; for a Hugging
      Face folder, replaces the defaults.
    max_tokens: the longest completion; None for the run's own limit, or 256 for a folder.
    stop: strings that end a completion; None for the config's.
    overrides: `--config.a.b=VALUE`, fields of the config to change.
    serves: whether requests come at any time; see `Demand`.

  Raises:
    UserError: there is no such folder, run or checkpoint, or the config is for another model.
  """
  folder = find(str(workdir))
  make = functools.partial(
    RolloutWorker, max_tokens=max_tokens, stop=stop, trains=False, serves=serves
  )
  if is_hf_folder(folder):
    config = override(config or _config_of_folder(folder, max_tokens), overrides)
    if not serves:  # a server's policies may have adapters of their own
      model = dataclasses.replace(config.model, lora_rank=0, quantize="")
      config = dataclasses.replace(config, model=model)
    return _policy_of_folder(folder, step, config, make)
  return _policy_of_run(folder, step, config, overrides, make)


def open_policy(
  workdir: Path,
  step: int | None,
  config: Config | None = None,
  max_tokens: int | None = None,
  stop: Sequence[str] | None = None,
  overrides: Sequence[str] = (),
) -> tuple[RolloutWorker, Config, Params, int]:
  """Returns the worker, config, parameters and step of a policy; see `find_policy`."""
  worker, config, read = find_policy(workdir, step, config, max_tokens, stop, overrides)
  return worker, config, *read()


def _policy_of_folder(
  folder: Path, step: int | None, config: Config, make: Callable[[Config], RolloutWorker]
) -> PolicySource:
  if step is not None:
    raise UserError(f"{str(folder)!r} is a Hugging Face folder and has no steps; leave --step out")
  model = dataclasses.replace(config.model, path=str(folder))
  config = dataclasses.replace(config, model=model)
  worker = make(config)
  return PolicySource(worker, config, lambda: (read_params(worker.model, folder), 0))


def _policy_of_run(
  workdir: Path,
  step: int | None,
  config: Config | None,
  overrides: Sequence[str],
  make: Callable[[Config], RolloutWorker],
) -> PolicySource:
  own = load_config(workdir)
  if config is None:
    # The run may have used more devices, or others.
    config = usable_here(dataclasses.replace(own, mesh=MeshSection()))
  elif _names_no_model(config):
    config = usable_here(dataclasses.replace(config, model=own.model))
  elif (config.model.preset, config.model.path) != (own.model.preset, own.model.path):
    raise UserError(
      f"the run in {str(workdir)!r} trains model {_model_name(own)!r}, but the config names "
      f"{_model_name(config)!r}; leave --config out, or use the run's config"
    )
  config = override(config, overrides)
  if config.data.chat and not config.data.date:
    config = with_date(config, own.data.date)
  if step == 0 and not has_base(workdir) and own.model.path:
    worker = make(config)
    return PolicySource(worker, config, lambda: (base_params(own, workdir, worker), 0))
  open_run(workdir, step).close()  # refuses a missing checkpoint before the worker is made
  worker = make(config)
  return PolicySource(worker, config, lambda: run_params(workdir, worker.model, step))


def _names_no_model(config: Config) -> bool:
  """Whether a config leaves the model at its default, as configs/eval_*.py do."""
  return (config.model.path, config.model.preset) == ("", ModelSection().preset)


def _model_name(config: Config) -> str:
  return config.model.path or config.model.preset


def _config_of_folder(folder: Path, max_tokens: int | None) -> Config:
  """Returns a config for sampling from a folder, with bfloat16 weights unless on a CPU."""
  dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  tokens = HF_MAX_TOKENS if max_tokens is None else max_tokens
  longest = read_config(folder, dtype).max_length
  return Config(
    model=ModelSection(path=str(folder), param_dtype=dtype),
    data=DataSection(max_prompt_tokens=min(HF_PROMPT_TOKENS, max(longest - tokens, 1))),
    sampling=SamplingSection(max_tokens=max(tokens, 2)),
  )


class ServingLimits(NamedTuple):
  """What a server computes at once, and how."""

  # the longest prompt; None for what the model's context has space for
  max_prompt_tokens: int | None = None
  # the longest completion; None for what the model's context has space for
  max_tokens: int | None = None
  # the format of activations; None for the run's own, or the platform's
  compute_dtype: str | None = None
  # the completions that run at once; 0 for 32 on a CPU and the engine's default elsewhere
  slots: int = 0
  batch_invariant: bool = False  # see `EngineConfig`
  # the rank of adapters that policies have beside one base; 0 for policies that are weights of
  # their own
  adapters: int = 0


def find_served(workdir: Path, step: int | None, limits: ServingLimits) -> PolicySource:
  """Returns a policy for a server; see `find_policy`.

  Lengths that are not limited are halved until the memory holds one prompt and its completion.

  Raises:
    UserError: there is no such policy, a value is out of bounds, or there is no memory.
  """
  folder = find(str(workdir))
  if is_hf_folder(folder):
    config = _config_of_folder(folder, limits.max_tokens)
    context = read_config(folder, config.model.param_dtype).max_length
  else:
    config = usable_here(dataclasses.replace(load_config(folder), mesh=MeshSection()))
    context = resolve_model(config).config.max_length
  if limits.max_tokens and limits.max_tokens >= context:
    raise UserError(
      f"--max_tokens={limits.max_tokens} is not below the model's context of {context} tokens"
    )
  while True:
    tokens = limits.max_tokens or max(context - 1, 2)
    served = _serving_config(config, limits, context)
    source = find_policy(folder, step, served, tokens, stop=(), serves=True)
    lengths = (served.data.max_prompt_tokens, tokens)
    if source.worker.engine.programs.sizes.hold([lengths]):
      return source
    context //= 2
    if context < SHORTEST_CONTEXT or (limits.max_prompt_tokens and limits.max_tokens):
      raise UserError(
        f"there is no memory for the keys and values of a prompt of {lengths[0]} tokens with "
        f"{lengths[1]} more; lower --max_prompt_tokens and --max_tokens"
      )


def _serving_config(config: Config, limits: ServingLimits, context: int) -> Config:
  """Returns the config with which a server opens a policy of which it uses so much context.

  Its longest prompt leaves space for the shortest completion only, as each request is checked.
  """
  prompt = limits.max_prompt_tokens or max(context - SHORTEST_COMPLETION, 1)
  on_cpu = jax.default_backend() == "cpu"
  sampling = dataclasses.replace(
    config.sampling,
    max_tokens=SHORTEST_COMPLETION,
    slots=limits.slots or (SERVED_SLOTS if on_cpu else 0),
    chunk=SERVED_CHUNK if on_cpu else 0,
    batch_invariant=limits.batch_invariant,
    stop=(),
  )
  model = dataclasses.replace(
    config.model, compute_dtype=limits.compute_dtype or config.model.compute_dtype
  )
  if limits.adapters:
    rank = limits.adapters
    model = dataclasses.replace(model, lora_rank=rank, lora_alpha=float(rank), base_layout="apart")
    sampling = dataclasses.replace(sampling, merge_adapters="never")
  data = dataclasses.replace(config.data, max_prompt_tokens=prompt)
  # Clients run the tools and environments that they want.
  return dataclasses.replace(config, model=model, sampling=sampling, data=data, env=EnvSection())
