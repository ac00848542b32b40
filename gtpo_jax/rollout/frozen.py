"""The policies that a run uses but does not train: the guide and the KL reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gtpo_jax.checkpoint.digests import DIGEST_DIGITS, digest_tree
from gtpo_jax.checkpoint.runs import open_run, run_params
from gtpo_jax.checkpoint.workdir import load_config
from gtpo_jax.config import Config, resolve_model
from gtpo_jax.data.chat import load_chat
from gtpo_jax.models.hf.config_json import read_config
from gtpo_jax.models.hf.folder import find, is_hf_folder
from gtpo_jax.models.hf.load import read_params
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.rollout.policies import base_params, usable_here
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.runtime.errors import UserError


class FrozenPolicies(NamedTuple):
  """The frozen policies that the config asks for.

  Attributes:
    guide: in sampling layout; None for no guide.
    reference: the model and its parameters in training layout; None for no reference.
    digests: by config key (guide.path, reference.path), a digest of the parameters.
    steps: by config key, the checkpoint's step, for policies that come from a run.
  """

  guide: Policy | None
  reference: tuple[Transformer, Params] | None
  digests: dict[str, str]
  steps: dict[str, int]


def load_frozen(
  config: Config, worker: RolloutWorker, workdir: Path, steps: Mapping[str, int]
) -> FrozenPolicies:
  """Loads the guide and the reference onto the worker's mesh.

  An empty path stands for the base model of the run in `workdir`.

  Args:
    config: names the policies.
    worker: the worker of the policy that is trained.
    workdir: the run's workdir.
    steps: `FrozenPolicies.steps` from the start of the run, so that a resumed run uses the same
      checkpoints; {} for the newest ones.

  Raises:
    UserError: a checkpoint of `steps` is no longer there.
  """
  settings = config.resolved_algorithm.settings
  digests = {}
  used_steps = {}

  def load(key: str, path: str) -> tuple[Transformer, Params]:
    try:
      model, params, step = _load(path, config, worker, workdir, steps.get(key))
    except UserError as error:
      raise UserError(f"{key} = {path!r}: {error}") from error
    digests[key] = digest_tree(params)[:DIGEST_DIGITS]
    if step is not None:
      used_steps[key] = step
    return model, params

  guide = None
  if settings.guide_completions:
    model, params = load("guide.path", config.guide.path)
    # The guide's vocabulary may be padded further than the policy's: never sample padding ids.
    engine = worker.engine_for(model, vocab_limit=worker.chat.vocab_size)
    guide = Policy(engine, engine.layout(params))
  reference = None
  if settings.kl_weight:
    reference = load("reference.path", config.reference.path)
  return FrozenPolicies(guide, reference, digests, used_steps)


def check_frozen(config: Config, worker: RolloutWorker) -> None:
  """Checks, before anything is compiled, that each path has a policy with the worker's tokenizer.

  Raises:
    UserError: there is no such folder, it has no checkpoint, or its tokenizer differs.
  """
  for key, path in (("guide.path", config.guide.path), ("reference.path", config.reference.path)):
    if path:
      _check_vocabulary(key, path, worker)


def _check_vocabulary(key: str, path: str, worker: RolloutWorker) -> None:
  folder = find(path)
  needed = worker.chat.vocab_size
  # It may be larger than needed: the sizes of Qwen2.5 pad their vocabularies differently.
  size = _architecture(folder, worker).config.vocab_size
  if size < needed:
    raise UserError(
      f"{key} = {path!r} has a vocabulary of {size} tokens, but the policy's tokenizer has "
      f"{needed}; both must use the same tokenizer"
    )
  if not (is_hf_folder(folder) and (folder / "tokenizer_config.json").exists()):
    return
  theirs = load_chat(folder).tokenizer.get_vocab()
  ours = worker.chat.tokenizer.get_vocab()
  if different := sorted(token for token in ours if theirs.get(token) != ours[token]):
    raise UserError(
      f"{key} = {path!r} has another tokenizer: {different[0]!r} and {len(different) - 1} other "
      "tokens differ; it must use the policy's tokenizer"
    )


def _load(
  path: str, config: Config, worker: RolloutWorker, workdir: Path, step: int | None
) -> tuple[Transformer, Params, int | None]:
  """Returns a policy's model, parameters and, if it comes from a run, its step.

  `step` chooses the checkpoint of a run; None takes the newest.
  """
  if not path:
    return worker.model, base_params(config, workdir, worker), None
  folder = find(path)
  model = _architecture(folder, worker)
  if is_hf_folder(folder):
    return model, read_params(model, folder), None
  return model, *run_params(folder, model, step)


def _architecture(folder: Path, worker: RolloutWorker) -> Transformer:
  """Returns the architecture of a policy's folder on the worker's mesh."""
  own = worker.model.config
  if is_hf_folder(folder):
    architecture = dataclasses.replace(
      read_config(folder, own.compute_dtype),
      remat=own.remat,
      matmul_precision=own.matmul_precision,
      attention=own.attention,
    )
    return Transformer(architecture, worker.model.mesh)
  open_run(folder).close()
  return Transformer(resolve_model(usable_here(load_config(folder))).config, worker.model.mesh)
