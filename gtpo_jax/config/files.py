"""Config files and command-line overrides to a `Config`, and back.

A config file is an ml_collections file with `get_config()`; it starts from `default_config()` and changes what it wants.
`freeze` turns the ConfigDict, once, into dataclasses. Everything after that reads attributes that exist.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict, config_flags

from gtpo_jax.config.whole import Config, flatten, to_dict
from gtpo_jax.runtime.errors import UserError, nearest


def default_config() -> ConfigDict:
  """Every field at its default, as a ConfigDict: what `configs/base.py` returns."""
  return _to_config_dict(Config())


def freeze(values: Mapping[str, Any]) -> Config:
  """Checks a ConfigDict or nested dict, and makes the dataclasses of it.

  Raises:
    UserError: an unknown key (with the nearest valid one), a value of the wrong type, or one out of its bounds.
  """
  values = values.to_dict() if isinstance(values, ConfigDict) else values
  return _build(Config, values, "")


def load(path: str, overrides: Sequence[str] = ()) -> Config:
  """Reads a config file and applies command-line overrides, `--config.a.b=VALUE` each.

  Raises:
    UserError: no such file, an error inside it, an unknown key or a value of the wrong type.
  """
  file = path.split(":", 1)[0]
  if Path(file).is_dir():
    raise UserError(f"--config={file} is a folder; name a file in it, such as configs/tiny.py")
  if not Path(file).is_file():
    beside = (
      [str(found) for found in sorted(Path(file).parent.glob("*.py"))]
      if Path(file).parent.is_dir()
      else []
    )
    raise UserError(f"no config file at {file!r}{nearest(file, beside)}")
  valid = flatten(to_dict(Config()))
  for override in overrides:
    key, equals, _ = override.removeprefix("--config.").partition("=")
    if fields := [name for name in valid if name.startswith(f"{key}.")]:
      raise UserError(
        f"config key {key!r} is a section; set one of its fields, such as --config.{fields[0]}=VALUE"
      )
    if key not in valid:
      raise UserError(_unknown(key, valid))
    if not equals:
      raise UserError(f"config key {key!r} needs a value: --config.{key}=VALUE")
  from absl import flags

  argv = ["gtpo", f"--config={path}", *overrides]
  parser = flags.FlagValues()
  holder = config_flags.DEFINE_config_file("config", flag_values=parser, sys_argv=argv)
  try:
    parser(argv)
    values = holder.value
  except (flags.Error, TypeError, ValueError, AttributeError) as error:
    raise UserError(f"config {file}: {_one_line(error)}") from error
  except (
    Exception,
    SystemExit,
  ) as error:  # the user's file is a program; whatever it raises is theirs to read
    raise UserError(f"config {file} raised {type(error).__name__}: {_one_line(error)}") from error
  if not isinstance(values, ConfigDict):
    raise UserError(
      f"config {file}: get_config() must return a ConfigDict, got {type(values).__name__}"
    )
  return freeze(values)


def difference(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
  """The fields in which two configs differ, by dotted name."""
  a = flatten(to_dict(old))
  b = flatten(to_dict(new))
  return {key: (a[key], b[key]) for key in a if a[key] != b[key]}


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
  hints = typing.get_type_hints(cls)
  for key in values:
    if key not in hints:
      raise UserError(_unknown(f"{prefix}{key}", flatten(to_dict(Config()))))
  made = {}
  for key, value in values.items():
    hint = hints[key]
    if dataclasses.is_dataclass(hint):
      if not isinstance(value, Mapping):
        raise UserError(f"{prefix}{key} is a section with fields, got {value!r}")
      try:
        made[key] = _build(hint, value, f"{prefix}{key}.")
      except (
        UserError
      ) as error:  # the optimizer's own complaints say "optimizer."; here it is whose
        raise (
          UserError(prefix + str(error)) if str(error).startswith("optimizer.") else error
        ) from None
    else:
      made[key] = _typed(value, hint, f"{prefix}{key}")
  return cls(**made)


def _typed(value: Any, hint: Any, name: str) -> Any:
  kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
  if value is None and type(None) in kinds:
    return None
  kind = kinds[0]
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    raise UserError(f"{name} must be of type {kind.__name__}, got {value!r}")
  return value


def _unknown(key: str, valid: Mapping[str, Any]) -> str:
  sections = {name.rsplit(".", 1)[0] for name in valid if "." in name}
  close = difflib.get_close_matches(key, [*valid, *sections], n=1, cutoff=0.5)
  if not close:  # the right name in another section
    close = [name for name in valid if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
  return f"unknown config key {key!r}" + (f", did you mean {close[0]!r}?" if close else "")


def _one_line(error: Exception) -> str:
  text = str(error).strip() or type(error).__name__
  if (
    "Traceback (most recent call last)" in text
  ):  # ml_collections puts one into its message; the last line says it
    text = text.splitlines()[-1]
  return re.sub(r"\s+", " ", text).strip()


def _to_config_dict(section: Any) -> ConfigDict:
  out = ConfigDict()
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    if dataclasses.is_dataclass(value):
      value = _to_config_dict(value)
    elif value is None:
      hint = typing.get_type_hints(type(section))[field.name]
      value = config_dict.placeholder(typing.get_args(hint)[0])
    out[field.name] = value
  return out
