"""Writes docs/configs.md from the docstrings of the config's dataclasses; `make docs` runs it."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import typing
from pathlib import Path

from gtpo_jax.config import Config
from gtpo_jax.config.sections import AlgorithmSection

PAGE = Path(__file__).parent / "configs.md"
HEAD = """# Configs

<!-- Written by docs/make_configs.py from the docstrings of gtpo_jax/config/sections.py.
     Do not edit by hand. -->

A config file is Python with `get_config()`, which starts from `default_config()` and changes some
fields. The command line overrides single fields (`--config.batch.group=8`). A program passes the
config itself, or nested dicts of the fields to change, as in `gtpo_jax.train({"steps": 20})`. A
misspelt field, or a value of the wrong type or out of bounds, is refused in one line that names it.

The defaults in the section `algorithm` are the published values of `gtpo`; a dash marks settings
that it does not read. [Settings](algorithms.md#settings) has those of every algorithm. A run's
`config.json` records the value of every setting that its algorithm reads.
"""


def page() -> str:
  """Returns the complete page."""
  hints = typing.get_type_hints(Config)
  own = [
    field for field in dataclasses.fields(Config) if not dataclasses.is_dataclass(hints[field.name])
  ]
  parts = [HEAD, table(Config, own, "", Config())]
  for field in dataclasses.fields(Config):
    if field in own:
      continue
    cls = hints[field.name]
    default = getattr(Config(), field.name)
    parts.append(f"## {field.name}\n\n{first_paragraph(cls)}\n")
    parts.append(table(cls, dataclasses.fields(cls), f"{field.name}.", default))
    for inner in dataclasses.fields(cls):
      value = getattr(default, inner.name)
      if dataclasses.is_dataclass(value):
        name = f"{field.name}.{inner.name}"
        parts.append(f"### {name}\n\n{first_paragraph(type(value))}\n")
        parts.append(table(type(value), dataclasses.fields(value), f"{name}.", value))
  return "\n".join(parts)


def table(
  cls: type, fields: typing.Iterable[dataclasses.Field], prefix: str, defaults: object
) -> str:
  """Returns name, type, default and meaning of each field that is not a section itself."""
  meanings = meanings_of(cls)
  hints = typing.get_type_hints(cls)
  lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
  for field in fields:
    value = getattr(defaults, field.name)
    if dataclasses.is_dataclass(value):
      continue
    kinds = [kind for kind in typing.get_args(hints[field.name]) if kind is not type(None)]
    types = " or ".join(kind.__name__ for kind in kinds or [hints[field.name]])
    shown = default_of(cls, field.name, value)
    lines.append(f"| `{prefix}{field.name}` | {types} | {shown} | {meanings[field.name]} |")
  return "\n".join(lines) + "\n"


def default_of(cls: type, name: str, value: object) -> str:
  """Returns a field's default; for an algorithm's setting, the value that None stands for."""
  if cls is AlgorithmSection and value is None:
    value = Config().resolved_algorithm.settings_dict().get(name)
    return "-" if value is None else f"`{value!r}`"
  return f"`{value!r}`"


def meanings_of(cls: type) -> dict[str, str]:
  """Returns the text on each field in the `Attributes:` of a dataclass and of its bases."""
  meanings: dict[str, str] = {}
  for base in reversed(cls.__mro__):
    _, mark, text = (base.__doc__ or "").partition("Attributes:\n")
    text = textwrap.dedent(text.split("\n\n")[0])  # without a section that follows
    for entry in re.split(r"\n(?=\S)", text) if mark else []:
      names, _, meaning = entry.partition(": ")
      meaning = " ".join(meaning.split())
      meaning = (meaning[:1].upper() + meaning[1:]).replace("|", "\\|")
      meanings |= dict.fromkeys(names.split(", "), meaning)
  return meanings


def first_paragraph(cls: type) -> str:
  """Returns the first paragraph of a class's docstring."""
  return " ".join(cls.__doc__.split("\n\n")[0].split())


if __name__ == "__main__":
  PAGE.write_text(page())
