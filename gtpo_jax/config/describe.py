"""What every field of a config is for, read from the declarations, for terminal and site."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from gtpo_jax.algorithms import OBJECTIVES, RECIPES, declarations
from gtpo_jax.config.run_config import Config
from gtpo_jax.config.sections import AlgorithmSection
from gtpo_jax.runtime.fields import FLAG


class FieldDescription(NamedTuple):
  """A field of the config.

  Attributes:
    name: its dotted name.
    kind: the name of its type.
    default: its default; for a setting of an algorithm, the published value of `gtpo`, or None if
      `gtpo` does not read it.
    values: the bound of its values, such as "at least 0 and finite"; empty if its type says all.
    meaning: what it does.
  """

  name: str
  kind: str
  default: Any
  values: str
  meaning: str


def describe(section: Any = None, prefix: str = "") -> Iterator[FieldDescription]:
  """Yields every field of a section of the config and of the sections in it; None for all."""
  section = Config() if section is None else section
  meanings = _meanings(type(section))
  declared = declarations() if prefix == "algorithm." else {}
  hints = typing.get_type_hints(type(section))
  published = RECIPES[Config().algorithm.name].settings if prefix == "algorithm." else {}
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    name = f"{prefix}{field.name}"
    if dataclasses.is_dataclass(value):
      yield from describe(value, f"{name}.")
      continue
    hint = hints[field.name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    default = published.get(field.name) if value is None else value
    values = _values(declared.get(field.name, {type(section): field}))
    yield FieldDescription(name, kind, default, values, meanings[field.name])


def settings_of_recipes() -> dict[str, dict[str, Any]]:
  """Returns what distinguishes the settings of the recipes, by name.

  The entry "" has the settings that every recipe reads, with the defaults of `gtpo_v1`. The entry
  of a recipe has its further settings, and those with other defaults.
  """
  common = set.intersection(*(set(recipe.settings) for recipe in RECIPES.values()))
  defaults = {key: value for key, value in RECIPES["gtpo_v1"].settings.items() if key in common}
  differing = lambda settings: {
    key: value for key, value in settings.items() if key not in common or defaults[key] != value
  }
  return {"": defaults} | {name: differing(recipe.settings) for name, recipe in RECIPES.items()}


def _meanings(cls: type) -> dict[str, str]:
  """Returns the meaning of each field of a section."""
  meanings: dict[str, str] = {}
  for base in reversed(cls.__mro__):
    _, mark, text = (base.__doc__ or "").partition("Attributes:\n")
    text = textwrap.dedent(text.split("\n\n")[0])  # without a section that follows
    for entry in re.split(r"\n(?=\S)", text) if mark else []:
      names, _, meaning = entry.partition(": ")
      meanings |= dict.fromkeys(names.split(", "), _sentence(" ".join(meaning.split())))
  if issubclass(cls, AlgorithmSection):
    meanings |= {name: _setting(parts) for name, parts in declarations().items()}
  return meanings


def _values(parts: dict[type, dataclasses.Field]) -> str:
  """Returns the bound of a field that some classes declare; empty for none and for flags."""
  bounds = [field.metadata.get("bound") for field in parts.values()]
  return " or ".join(dict.fromkeys(x.description for x in bounds if x and x is not FLAG))


def _setting(parts: dict[type, dataclasses.Field]) -> str:
  """Returns the meanings of a setting; several objectives may give it different ones."""
  objectives: dict[str, list[str]] = {}
  for part, field in parts.items():
    name = next((name for name, cls in OBJECTIVES.items() if cls is part), "")
    objectives.setdefault(field.metadata["meaning"], []).append(f"`{name}`")
  if len(objectives) == 1:
    return _sentence(next(iter(objectives)))
  return " ".join(f"{', '.join(names)}: {meaning}" for meaning, names in objectives.items())


def _sentence(text: str) -> str:
  return text[:1].upper() + text[1:]
