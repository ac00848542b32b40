"""The tensors of models that have other parts than text.

Only the text model is loaded and trained. An export carries the rest over from its source.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from gtpo_jax.models.families import FAMILIES
from gtpo_jax.models.hf.config_json import is_multimodal

# What replaces the start of the names of a text model's tensors: first as Transformers saves such
# models, then as version 5 names the tensors in memory.
PREFIXES = {"language_model.": "", "model.language_model.": "model."}
HEAD = "lm_head."
TEXT_MODULE = "language_model"  # of the whole model, where adapters are
# Files that programs need to prepare what is not text.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class Parts(NamedTuple):
  """The names of the tensors of a folder."""

  text: dict[str, str]  # of the text model, by their names in a folder of text only
  others: list[str]


def parts_of(config: dict[str, Any], names: Iterable[str]) -> Parts:
  """Returns the names of the tensors of a folder with this config.json."""
  if is_multimodal(config):
    return split_names(names)
  untrained = _untrained(config)
  names = list(names)
  others = [name for name in names if name.startswith(untrained)]
  return Parts({name: name for name in names if name not in others}, others)


def has_others(config: dict[str, Any]) -> bool:
  """Returns whether a folder with this config.json may have tensors that are not loaded."""
  return is_multimodal(config) or bool(_untrained(config))


def _untrained(config: dict[str, Any]) -> tuple[str, ...]:
  return FAMILIES[config["model_type"]].untrained


def split_names(names: Iterable[str]) -> Parts:
  """Separates the names of the text model's tensors from the others."""
  parts = Parts({}, [])
  for name in names:
    prefix = next(filter(name.startswith, PREFIXES), None)
    if prefix:
      parts.text[PREFIXES[prefix] + name.removeprefix(prefix)] = name
    elif name.startswith(HEAD):
      parts.text[name] = name
    else:
      parts.others.append(name)
  return parts
