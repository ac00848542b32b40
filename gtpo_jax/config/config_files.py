"""Reads config files, command-line overrides and saved configs into a `Config`.

A config file is an ml_collections file with `get_config()`, which starts from `default_config()`
and changes some fields. `freeze` converts the ConfigDict to dataclasses once; all later code reads
attributes that are known to exist.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import os
import re
import sys
import tokenize
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict, config_flags

from gtpo_jax.config.describe import foreign_name
from gtpo_jax.config.read_settings import check_settings
from gtpo_jax.config.run_config import Config, flatten, resolved_dict, to_dict
from gtpo_jax.runtime.errors import UserError, did_you_mean
from gtpo_jax.runtime.fields import SHOWN_CHARS, UnreadError

# The folder of the configs that come with gtpo_jax: inside the package if it was installed from a
# wheel, and beside it in a source tree.
_PACKAGE = Path(__file__).parents[1]
_PACKAGED = _PACKAGE / "configs"
LONGEST_NAME = 255  # bytes, on the usual file systems
CONFIGS = _PACKAGED if _PACKAGED.is_dir() else _PACKAGE.parent / "configs"


def default_config() -> ConfigDict:
  """Returns every field at its default, as a ConfigDict; `configs/base.py` returns this."""
  return _to_config_dict(Config())


def load_config(path: str, overrides: Sequence[str] = ()) -> ConfigDict:
  """Returns a config file's settings as a ConfigDict, in which a program may change them.

  Args and errors are as in `load`.
  """
  return _to_config_dict(_load(path, overrides, complete=False))


def freeze(values: Mapping[str, Any]) -> Config:
  """Checks a ConfigDict or nested dict and converts it to a `Config`.

  Raises:
    UserError: a key is unknown (the message names the nearest valid one), a value has the wrong
      type or is out of bounds, or nothing would read it.
  """
  config = freeze_recorded(values)
  check_settings(config, complete=False)
  return config


def freeze_recorded(values: Mapping[str, Any]) -> Config:
  """Converts what a run has recorded, which may hold settings that nothing reads; see `freeze`."""
  values = values.to_dict() if isinstance(values, ConfigDict) else values
  return _build(Config, values, "")


def load(path: str, overrides: Sequence[str] = ()) -> Config:
  """Reads a config file and applies command-line overrides, `--config.a.b=VALUE` each.

  `path` is a file or the name of one in `CONFIGS`, such as "tiny". An override can turn something
  off; what the file sets for it goes back to its default.

  Raises:
    UserError: there is no such file, it raises an error, a key is unknown, or a value has the wrong
      type, or no effect.
  """
  return _load(path, overrides, complete=True)


def _load(path: str, overrides: Sequence[str], complete: bool) -> Config:
  file, colon, argument = path.partition(":")  # ml_collections passes the rest to get_config
  file = _find_file(file)
  _check_overrides(overrides)
  from absl import flags

  # Otherwise ml_collections would run the file in the module of the previous one.
  sys.modules.pop("config_config", None)
  argv = ["gtpo", f"--config={file}{colon}{argument}", *overrides]
  parser = flags.FlagValues()
  holder = config_flags.DEFINE_config_file("config", flag_values=parser, sys_argv=argv)
  try:
    parser(argv)
    values = holder.value
  except (flags.Error, TypeError, ValueError, AttributeError) as error:
    raise UserError(f"config {file}: {_one_line(error)}") from error
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # the file is the user's program and may raise anything
    raise UserError(f"config {file} raised {type(error).__name__}: {_one_line(error)}") from error
  if not isinstance(values, ConfigDict):
    raise UserError(
      f"config {file}: get_config() must return a ConfigDict, got {type(values).__name__}"
    )
  return _read_config(values.to_dict(), overrides, complete)


def _read_config(
  values: dict[str, Any], overrides: Sequence[str], complete: bool, recorded: bool = False
) -> Config:
  """Checks settings, without those that only the overrides leave unread; see `load`.

  Of a recorded config only the overrides must be read.
  """
  keys = [key.removeprefix("--config.").partition("=")[0] for key in overrides]
  while True:
    config = freeze_recorded(values)
    try:
      check_settings(config, complete)
      return config
    except UnreadError as error:
      switched_off = recorded or not set(keys).isdisjoint(re.findall(r"[\w.]+", error.needed))
      if error.name in keys or not switched_off:
        raise
      *sections, field = error.name.split(".")
      section = functools.reduce(dict.__getitem__, sections, values)
      del section[field]


def override(config: Config, overrides: Sequence[str]) -> Config:
  """Returns a config with command-line overrides, `--config.a.b=VALUE` each.

  Raises:
    UserError: a key is unknown, or a value has the wrong type or is out of bounds.
  """
  if not overrides:
    return config
  _check_overrides(overrides)
  values = to_dict(config)
  for entry in overrides:
    key, _, text = entry.removeprefix("--config.").partition("=")
    *sections, field = key.split(".")
    section = values
    for name in sections:
      section = section[name]
    section[field] = text if isinstance(section[field], str) else _literal(key, text)
  return _read_config(values, overrides, complete=True, recorded=True)


def _literal(key: str, text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError) as error:
    raise UserError(f"config key {key!r} has no text as its value, got {text!r}") from error


def difference(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
  """Returns the fields in which two configs differ, by dotted name, as (old, new).

  Algorithm settings are compared after published values are filled in, and only if both configs
  name the same algorithm.
  """
  before = flatten(resolved_dict(old))
  after = flatten(resolved_dict(new))
  changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
  if name := changed.get("algorithm.name"):
    changed = {key: both for key, both in changed.items() if not key.startswith("algorithm.")}
    changed["algorithm.name"] = name
  return changed


def packaged() -> dict[str, Path]:
  """Returns the files in `CONFIGS` by name."""
  return {file.stem: file for file in sorted(CONFIGS.glob("*.py"))}


def _find_file(path: str) -> Path:
  """Returns the file that `path` names, or the one in `CONFIGS` with this name."""
  file = Path(path)
  if len(os.fsencode(file.name)) > LONGEST_NAME:
    raise UserError(f"no file has a name as long as --config={path[:SHOWN_CHARS]}...; name another")
  if file.is_dir() and path not in packaged():
    raise UserError(f"--config={file} is a folder; name a file in it, such as configs/tiny.py")
  if file.is_file():
    try:
      with tokenize.open(file) as text:
        text.read()
    except (SyntaxError, ValueError) as error:
      raise UserError(f"--config={file} cannot be read; save it as UTF-8 ({error})") from error
    return file
  if path in packaged():
    return packaged()[path]
  names = sorted(map(str, file.parent.glob("*.py"))) if file.parent.is_dir() else []
  if file.stem in packaged() and not did_you_mean(path, names):
    raise UserError(
      f"no config file at {path!r}; --config={file.stem} names the one that comes with gtpo_jax"
    )
  hint = did_you_mean(path, [*names, *packaged()])
  raise UserError(f"no config file at {path!r}{hint}; `gtpo configs` lists the shipped ones")


def _check_overrides(overrides: Sequence[str]) -> None:
  valid = _valid_keys()
  for override in overrides:
    key, equals, _ = override.removeprefix("--config.").partition("=")
    if fields := [name for name in valid if name.startswith(f"{key}.")]:
      raise UserError(
        f"config key {key!r} is a section; set one of its fields, "
        f"such as --config.{fields[0]}=VALUE"
      )
    if key not in valid:
      raise UserError(_unknown(key, valid))
    if not equals:
      raise UserError(f"config key {key!r} needs a value: --config.{key}=VALUE")


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
  """Returns a dataclass of nested values; `prefix` is its own dotted name."""
  hints = typing.get_type_hints(cls)
  for key in values:
    if key not in hints:
      raise UserError(_unknown(f"{prefix}{key}", _valid_keys()))
  fields = {}
  for key, value in values.items():
    name = f"{prefix}{key}"
    if dataclasses.is_dataclass(hints[key]):
      fields[key] = _build_section(hints[key], value, name, prefix)
    else:
      fields[key] = _typed(value, hints[key], name)
  return cls(**fields)


def _build_section(cls: type, value: Any, name: str, prefix: str) -> Any:
  if not isinstance(value, Mapping):
    raise UserError(f"{name} is a section with fields, got {value!r}")
  try:
    return _build(cls, value, f"{name}.")
  except UserError as error:
    # Two sections hold an optimizer, whose own messages begin with "optimizer.".
    if str(error).startswith("optimizer."):
      raise UserError(f"{prefix}{error}") from None
    raise


def _typed(value: Any, hint: Any, name: str) -> Any:
  """Returns `value` if it has the type `hint`; integers are accepted as floats, lists as tuples."""
  kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
  kinds = tuple(typing.get_origin(kind) or kind for kind in kinds)
  if tuple in kinds and isinstance(value, str):
    raise UserError(f"{name} is a list of strings, got {value!r:.80}; write it in brackets")
  if tuple in kinds:  # the bound of the field says what else is wrong
    return tuple(value) if isinstance(value, list) else value
  number = isinstance(value, int) and not isinstance(value, bool)
  if float in kinds and number:
    return float(value)
  if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
    expected = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise UserError(f"{name} must be of type {expected}, got {value!r}")
  return value


def _valid_keys() -> Mapping[str, Any]:
  return flatten(to_dict(Config()))


def _unknown(key: str, valid: Mapping[str, Any]) -> str:
  """Returns the message for an unknown key, with what was probably meant."""
  message = f"unknown config key {key!r}"
  if foreign := foreign_name(key):
    return message + foreign
  sections = {name.rsplit(".", 1)[0] for name in valid if "." in name}
  section, _, own = key.rpartition(".")
  level = [name for name in valid if name.rpartition(".")[0] == section]
  close = difflib.get_close_matches(key, level, n=1, cutoff=0.8)
  close = close or [name for name in valid if name.rpartition(".")[2] == own]
  close = close or difflib.get_close_matches(key, [*valid, *sections], n=1, cutoff=0.5)
  return message + (f", did you mean {close[0]!r}?" if close else "")


def _one_line(error: BaseException) -> str:
  text = str(error).strip() or type(error).__name__
  if "Traceback (most recent call last)" in text:  # ml_collections includes one in its message
    text = text.splitlines()[-1]
  return re.sub(r"\s+", " ", text).strip()


def _to_config_dict(section: Any) -> ConfigDict:
  out = ConfigDict()
  hints = typing.get_type_hints(type(section))
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    if dataclasses.is_dataclass(value):
      value = _to_config_dict(value)
    elif value is None:
      value = config_dict.placeholder(typing.get_args(hints[field.name])[0])
    elif isinstance(hints[field.name], types.UnionType):  # values of several types
      value = config_dict.FieldReference(value, field_type=object)
    out[field.name] = value
  return out
