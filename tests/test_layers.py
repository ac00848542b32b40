"""The floors of the house: a file imports only lower floors or its own, and the folders of floor 1 never import each other."""
import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gtpo_jax"
FLOORS = {
    "errors": 0, "files": 0, "start": 0, "stopping": 0, "arrays": 0, "parallel": 0, "digests": 0, "seal": 0,
    "topology": 0, "collectives": 0,
    "models": 1, "algorithms": 1, "rewards": 1, "data": 1, "estimators": 1,
    "sampling": 2, "training": 2,
    "config": 3, "problems": 3, "judging": 3, "rollout": 3, "collect": 3, "frozen": 3, "evaluation": 3, "checkpoint": 3, "reporting": 3,
    "workdir": 3, "guards": 3, "identity": 3, "given": 3, "trained": 3,
    "warm_start": 4, "train": 4, "export": 4, "plan": 4, "roofline": 4, "doctor": 4,
    "cli": 5, "__main__": 6,
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path):
  """The folder or top-level module that a file belongs to."""
  first = path.relative_to(PACKAGE).parts[0]
  return first.removesuffix(".py")


def imports(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      if node.module == "gtpo_jax":
        yield from (alias.name for alias in node.names)
      elif node.module.startswith("gtpo_jax."):
        yield node.module.split(".")[1]
      else:
        yield "outside:" + node.module.split(".")[0]
    elif isinstance(node, ast.Import):
      yield from ("outside:" + alias.name.split(".")[0] for alias in node.names if not alias.name.startswith("gtpo_jax"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
  here = part_of(path)
  assert here in FLOORS, f"{here} has no floor"
  for there in imports(path):
    if there.startswith("outside:") or there == here:
      continue
    assert FLOORS[there] <= FLOORS[here], f"{path} on floor {FLOORS[here]} imports {there} on floor {FLOORS[there]}"
    assert FLOORS[here] != 1 or FLOORS[there] < 1, f"{path} imports {there}, its neighbour on floor 1"


def test_rewards_know_no_jax():
  for path in (PACKAGE / "rewards").glob("*.py"):
    assert not {"outside:jax", "outside:flax"} & set(imports(path)), path


def test_what_runs_in_the_sandbox_needs_nothing_that_is_not_there():
  allowed = {"outside:" + name for name in ("__future__", "_operator", "builtins", "marshal", "os", "sys")}
  assert set(imports(PACKAGE / "rewards" / "inside.py")) <= allowed


def test_algorithms_know_arrays_alone():
  allowed = {"arrays", "errors", "algorithms"}
  for path in (PACKAGE / "algorithms").glob("*.py"):
    ours = {name for name in imports(path) if not name.startswith("outside:")}
    assert ours <= allowed, (path, ours - allowed)


def test_torch_and_tensorflow_are_never_imported():
  for path in FILES:
    assert not {"outside:torch", "outside:tensorflow"} & set(imports(path)), path
