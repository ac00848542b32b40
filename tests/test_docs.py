"""What the documentation claims: its Python runs, its links lead somewhere."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_numbers_of_the_algorithms_page():
  """Its blocks in order, in one namespace; they assert what the page says."""
  page = ROOT / "docs" / "algorithms.md"
  blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
  assert len(blocks) > 5
  namespace: dict = {}
  for block in blocks:
    exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
  for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
    if not re.match(r"[a-z]+:|#", target):
      assert (page.parent / target.split("#")[0]).exists(), target
