"""MkDocs hooks: adapts pages written for GitHub to the site."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from gtpo_jax.algorithms import RECIPES
from gtpo_jax.config.describe import describe, settings_of_recipes

ROOT = Path(__file__).parents[1]
LAUNCHING = "launching.md"  # the page that launch/README.md becomes


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds launch/README.md, and the files of launch/ and notebooks/ that pages link to."""
  text = (ROOT / "launch" / "README.md").read_text()
  files.append(File.generated(config, LAUNCHING, content=text.replace("](../docs/", "](")))
  for folder in ("launch", "notebooks"):
    for file in sorted((ROOT / folder).iterdir()):
      if file.is_file() and file.name != "README.md":
        files.append(File.generated(config, f"{folder}/{file.name}", content=file.read_bytes()))
  return files


def on_page_markdown(markdown: str, **_: object) -> str:
  """Fills in generated tables, and adapts links to files outside docs/.

  Links to launch/ and notebooks/ lead to their copies on the site. Other links are replaced with
  their text.
  """
  for mark, table in TABLES.items():
    if mark in markdown:
      markdown = markdown.replace(mark, table())
  markdown = markdown.replace("](../launch/README.md", f"]({LAUNCHING}")
  markdown = re.sub(r"\]\(\.\./((?:launch|notebooks)/)", r"](\1", markdown)
  return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)


def fields_table() -> str:
  """Returns the fields of the config, in a table for each section."""
  lines = []
  last = None
  for field in describe():
    section = field.name.rpartition(".")[0]
    if section != last:
      lines += ["", *([f"### {section}", ""] if section else [])]
      lines += ["| field | type | default | values | meaning |", "|---|---|---|---|---|"]
      last = section
    default = "-" if field.default is None else f"`{field.default!r}`"
    meaning = field.meaning.replace("|", "\\|")
    lines.append(
      f"| `{field.name}` | {field.kind} | {default} | {field.values or '-'} | {meaning} |"
    )
  return "\n".join(lines)


def settings_table() -> str:
  """Returns the papers, parts and settings of the recipes, with their defaults."""
  as_text = lambda settings: ", ".join(f"`{key}={value}`" for key, value in settings.items())
  common, *own = settings_of_recipes().items()
  rows = []
  for name, settings in own:
    recipe = RECIPES[name]
    wrong, right = recipe.rewards
    parts = f"{recipe.advantage.__name__}; {right:g} and {wrong:g}"
    rows.append(f"| `{name}` | {recipe.paper} | {parts} | {as_text(settings)} |")
  return "\n".join(
    [
      f"Every recipe reads these settings, with these defaults: {as_text(common[1])}",
      "",
      "The table has each recipe's source, its advantage, the rewards of correct and incorrect",
      "completions before shaping, its further settings, and the defaults that differ from these:",
      "",
      "| name | source | advantage, rewards | settings and defaults |",
      "|---|---|---|---|",
      *rows,
    ]
  )


TABLES = {"<!-- fields -->": fields_table, "<!-- settings -->": settings_table}
