"""MkDocs hooks: adapts pages written for GitHub to the site."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
  """Replaces links to files outside docs/, which the site does not contain, with their text."""
  return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
