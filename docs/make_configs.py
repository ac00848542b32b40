"""Writes docs/configs.md from the docstrings of the config's dataclasses; `make docs` runs it."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import typing
from pathlib import Path

from gtpo_jax.config import Config

PAGE = Path(__file__).parent / "configs.md"
HEAD = """# Configs: every field

<!-- Written by docs/make_configs.py from the docstrings of gtpo_jax/config/sections.py. Do not edit by hand. -->

A config file is Python with `get_config()`; it starts from `default_config()` and changes what it wants. The command line overrides single
fields (`--config.batch.group=8`); a program hands over the config itself, or nested dicts of what differs, as in
`gtpo_jax.train({"steps": 20})`. A misspelt field, or a value of the wrong type or out of its bounds, ends with one line that names it.
`None` stands for the published value of the algorithm (see the [settings of the algorithms](algorithms.md#settings)).
"""


def page() -> str:
  """The whole page."""
  hints = typing.get_type_hints(Config)
  own = [
    field for field in dataclasses.fields(Config) if not dataclasses.is_dataclass(hints[field.name])
  ]
  parts = [HEAD, table(Config, own, "", Config())]
  for field in dataclasses.fields(Config):
    if field not in own:
      kind = hints[field.name]
      default = getattr(Config(), field.name)
      parts += [
        f"## {field.name}\n\n{first_paragraph(kind)}\n",
        table(kind, dataclasses.fields(kind), f"{field.name}.", default),
      ]
      for inner in dataclasses.fields(kind):
        if dataclasses.is_dataclass(value := getattr(default, inner.name)):
          parts += [
            f"### {field.name}.{inner.name}\n\n{first_paragraph(type(value))}\n",
            table(type(value), dataclasses.fields(value), f"{field.name}.{inner.name}.", value),
          ]
  return "\n".join(parts)


def table(
  kind: type, fields: typing.Iterable[dataclasses.Field], prefix: str, defaults: object
) -> str:
  """Name, type, default and meaning of each field that is no section itself."""
  meanings = meanings_of(kind)
  hints = typing.get_type_hints(kind)
  lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
  for field in fields:
    value = getattr(defaults, field.name)
    if not dataclasses.is_dataclass(value):
      types = " or ".join(
        part.__name__
        for part in typing.get_args(hints[field.name]) or [hints[field.name]]
        if part is not type(None)
      )
      lines.append(f"| `{prefix}{field.name}` | {types} | `{value!r}` | {meanings[field.name]} |")
  return "\n".join(lines) + "\n"


def meanings_of(kind: type) -> dict[str, str]:
  """What the `Attributes:` of a dataclass and of those that it extends say of each field."""
  found: dict[str, str] = {}
  for base in reversed(kind.__mro__):
    _, mark, text = (base.__doc__ or "").partition("Attributes:\n")
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(text)) if mark else []:
      names, _, meaning = entry.partition(": ")
      meaning = " ".join(meaning.split())
      found |= dict.fromkeys(
        names.split(", "), (meaning[:1].upper() + meaning[1:]).replace("|", "\\|")
      )
  return found


def first_paragraph(kind: type) -> str:
  """The first paragraph of a class's docstring."""
  return " ".join(kind.__doc__.split("\n\n")[0].split())


if __name__ == "__main__":
  PAGE.write_text(page())
