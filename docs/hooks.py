"""MkDocs hooks: adapts pages written for GitHub to the site."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

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
  """Adapts links to files outside docs/.

  Links to launch/ and notebooks/ lead to their copies on the site. Other links are replaced with
  their text.
  """
  markdown = markdown.replace("](../launch/README.md", f"]({LAUNCHING}")
  markdown = re.sub(r"\]\(\.\./((?:launch|notebooks)/)", r"](\1", markdown)
  return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
