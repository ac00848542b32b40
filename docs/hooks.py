"""What the site needs of our pages besides what GitHub shows."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
  """Links to files outside of docs/ become their words: the site does not hold those files."""
  return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
