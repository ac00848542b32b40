"""The policies that a run uses beside the one that it trains: guide, KL reference and teacher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gtpo_jax.checkpoint.integrity import DIGEST_DIGITS, digest_tree
from gtpo_jax.checkpoint.opening import frozen_architecture, run_params
from gtpo_jax.checkpoint.workdir import load_config
from gtpo_jax.config import Config
from gtpo_jax.data.chat import Chat, load_chat
from gtpo_jax.models.hf.folder import find, is_hf_folder
from gtpo_jax.models.hf.load import read_params
from gtpo_jax.models.lora import partition
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.rollout.policies import base_params
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.runtime.errors import UserError


class FrozenPolicies(NamedTuple):
  """The frozen policies that the config asks for."""

  guide: Policy | None  # in sampling layout; None for no guide
  # the model and its parameters in training layout; None for no reference
  reference: tuple[Transformer, Params] | None
  digests: dict[str, str]  # by config key (such as guide.path), a digest of the parameters
  steps: dict[str, int]  # by config key, the checkpoint's step, for policies that come from a run
  # like `reference`, if it scores the sampled tokens. The parameters are None if they are the
  # policy's current ones
  teacher: tuple[Transformer, Params | None] | None = None
  # the parameters of the teacher, if its distributions are matched and it is frozen; otherwise
  # None
  matched: Params | None = None

  @property
  def scorers(self) -> dict[str, tuple[Transformer, Params | None]]:
    """The policies that score the batch, by the field of `Rollouts` for their log-probs.

    Parameters of None stand for the policy's current ones.
    """
    policies = {"reference": self.reference, "teacher": self.teacher}
    return {name: policy for name, policy in policies.items() if policy}


def load_frozen(
  config: Config,
  worker: RolloutWorker,
  workdir: Path,
  steps: Mapping[str, int],
  policy: Params | None = None,
) -> FrozenPolicies:
  """Loads the frozen policies onto the worker's mesh.

  The empty path of a guide, a reference or a frozen teacher stands for the base model of the run in
  `workdir`. If the policy has adapters, it shares what these leave as it is.

  Args:
    config: names the policies.
    worker: the worker of the policy that is trained.
    workdir: the run's workdir.
    steps: `FrozenPolicies.steps` from the start of the run, so that a resumed run uses the same
      checkpoints; {} for the newest ones.
    policy: the parameters of the policy that is trained; None if nothing is shared.

  Raises:
    UserError: a checkpoint of `steps` is no longer there.
  """
  settings = config.resolved_algorithm.settings
  digests = {}
  used_steps = {}

  def load(key: str, path: str) -> tuple[Transformer, Params]:
    try:
      model, params, step = _load(path, config, worker, workdir, steps.get(key), policy)
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
  teacher = None
  if config.teacher.is_frozen:
    key = "teacher.path" if config.teacher.path else "teacher.policy"
    teacher = load(key, config.teacher.path)
  elif config.teacher.exists:
    teacher = worker.model, None
  matched = None
  if config.resolved_algorithm.recipe.matches_distributions:
    teacher, matched = None, teacher[1]
  return FrozenPolicies(guide, reference, digests, used_steps, teacher, matched)


def check_frozen(config: Config, worker: RolloutWorker) -> None:
  """Checks, before anything is compiled, that each path has a policy with the worker's tokenizer.

  Raises:
    UserError: there is no such folder, it has no checkpoint, or its tokenizer differs.
  """
  for name in ("guide", "reference", "teacher"):
    if path := getattr(config, name).path:
      _check_vocabulary(f"{name}.path", path, worker)


def _check_vocabulary(key: str, path: str, worker: RolloutWorker) -> None:
  folder = find(path)
  needed = worker.chat.vocab_size
  # It may be larger than needed: the sizes of Qwen2.5 pad their vocabularies differently.
  size = frozen_architecture(folder, worker.model.config).vocab_size
  if size < needed:
    raise UserError(
      f"{key} = {path!r} has a vocabulary of {size} tokens, but the policy's tokenizer has "
      f"{needed}; both must use the same tokenizer"
    )
  if (chat := _chat_of(folder)) is None:
    return
  theirs = chat.tokenizer.get_vocab()
  ours = worker.chat.tokenizer.get_vocab()
  if different := sorted(token for token in ours if theirs.get(token) != ours[token]):
    raise UserError(
      f"{key} = {path!r} has another tokenizer: {different[0]!r} and {len(different) - 1} other "
      "tokens differ; it must use the policy's tokenizer"
    )


def _chat_of(folder: Path) -> Chat | None:
  """Returns the tokenizer of a policy's folder; None for a model folder without one."""
  if is_hf_folder(folder):
    return load_chat(folder) if (folder / "tokenizer_config.json").exists() else None
  path = load_config(folder).model.path
  return load_chat(find(path)) if path else load_chat()


def _load(
  path: str,
  config: Config,
  worker: RolloutWorker,
  workdir: Path,
  step: int | None,
  policy: Params | None,
) -> tuple[Transformer, Params, int | None]:
  """Returns a frozen policy's model, parameters and, if it comes from a run, its step.

  `step` chooses the checkpoint of a run; None takes the newest. `policy` is as in `load_frozen`.
  """
  if not path:
    base = partition(worker.model, policy)[1] if policy else {}
    return worker.model, base_params(config, workdir, worker, base), None
  folder = find(path)
  model = Transformer(frozen_architecture(folder, worker.model.config), worker.model.mesh)
  if is_hf_folder(folder):
    return model, read_params(model, folder), None
  return model, *run_params(folder, model, step)
