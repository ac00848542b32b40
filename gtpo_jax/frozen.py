"""Policies that do not learn: the guide that writes completions, and the reference of the KL term."""
from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from gtpo_jax.checkpoint import open_run
from gtpo_jax.config import Config
from gtpo_jax.errors import UserError
from gtpo_jax.models.load import is_hf_folder, read_config, read_params
from gtpo_jax.models.qwen2 import Params, Qwen2
from gtpo_jax.rollout import Actor, Policy
from gtpo_jax.workdir import load_config


class FrozenPolicies(NamedTuple):
  """What the config asks for; None for none."""

  guide: Policy | None                    # in sampling layout
  reference: tuple[Qwen2, Params] | None  # in training layout


def load_frozen(config: Config, actor: Actor, workdir: Path) -> FrozenPolicies:
  """The guide and the reference, on the actor's mesh. The base model of WORKDIR must be there where a path is left empty."""
  settings, guide, reference = config.algorithm_object.settings, None, None
  if settings.guide_completions:
    model, params = _load(config.guide.path, actor, workdir)
    engine = actor.engine_for(model)
    guide = Policy(engine, engine.layout(params))
  if settings.kl_weight:
    reference = _load(config.reference.path, actor, workdir)
  return FrozenPolicies(guide, reference)


def check_frozen(config: Config, actor: Actor) -> None:
  """Refuses paths that hold no policy of this vocabulary, before anything is compiled.

  Raises:
    UserError: no such folder, no checkpoint in it, or another vocabulary.
  """
  for name, path in (("guide.path", config.guide.path), ("reference.path", config.reference.path)):
    if not path:
      continue
    if not Path(path).is_dir():
      raise UserError(f"{name}: no folder at {path!r}; name the workdir of a run or a Hugging Face folder")
    vocab = _architecture(Path(path), actor).config.vocab_size
    if vocab != actor.model.config.vocab_size:
      raise UserError(f"{name} = {path!r} has a vocabulary of {vocab} tokens, the policy of {actor.model.config.vocab_size}; "
                      f"they must share a tokenizer")


def _architecture(folder: Path, actor: Actor) -> Qwen2:
  own = actor.model.config
  if is_hf_folder(folder):
    return Qwen2(read_config(folder, own.compute_dtype), actor.model.mesh)
  open_run(folder).close()
  return Qwen2(load_config(folder).model_config, actor.model.mesh)


def _load(path: str, actor: Actor, workdir: Path) -> tuple[Qwen2, Params]:
  folder = Path(path or workdir)
  model = _architecture(folder, actor) if path else actor.model
  if path and is_hf_folder(folder):
    return model, read_params(model, folder)
  found = open_run(folder, None if path else 0)
  params = found.restore_params(model)
  found.close()
  return model, params
