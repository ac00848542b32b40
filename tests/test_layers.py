"""The layers of the package: a folder imports only folders on lower floors, so no two of them form a cycle."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gtpo_jax"
FLOORS = {
  "runtime": 0,
  "arrays": 0,
  "algorithms": 1,
  "data": 1,
  "models": 1,
  "rewards": 1,
  "sampling": 2,
  "training": 2,
  "config": 3,
  "checkpoint": 4,
  "rollout": 5,
  "api": 6,
  "evaluation": 6,
  "planning": 6,
  "reporting": 6,
  "doctor": 7,
  "export": 7,
  "warm_start": 7,
  "loop": 8,
  "cli": 9,
  "__main__": 10,
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
      yield from (
        "outside:" + alias.name.split(".")[0]
        for alias in node.names
        if not alias.name.startswith("gtpo_jax")
      )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
  here = part_of(path)
  assert here in FLOORS, f"{here} has no floor"
  for there in imports(path):
    if there.startswith("outside:") or there == here:
      continue
    assert FLOORS[there] < FLOORS[here], (
      f"{path} on floor {FLOORS[here]} imports {there} on floor {FLOORS[there]}"
    )


def test_few_modules_are_loose_and_every_folder_has_a_floor():
  loose = {path.stem for path in PACKAGE.glob("*.py")}
  folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
  assert len(loose) <= 8
  assert FLOORS.keys() == (loose | folders) - {"__init__"}


def test_rewards_know_no_jax():
  for path in (PACKAGE / "rewards").glob("*.py"):
    assert not {"outside:jax", "outside:flax"} & set(imports(path)), path


def test_what_runs_in_the_sandbox_needs_nothing_that_is_not_there():
  allowed = {
    "outside:" + name for name in ("__future__", "_operator", "builtins", "marshal", "os", "sys")
  }
  assert set(imports(PACKAGE / "rewards" / "inside.py")) <= allowed


def test_algorithms_know_arrays_alone():
  allowed = {"arrays", "runtime", "algorithms"}
  for path in (PACKAGE / "algorithms").glob("*.py"):
    ours = {name for name in imports(path) if not name.startswith("outside:")}
    assert ours <= allowed, (path, ours - allowed)


def test_torch_and_tensorflow_are_never_imported():
  for path in FILES:
    assert not {"outside:torch", "outside:tensorflow"} & set(imports(path)), path
