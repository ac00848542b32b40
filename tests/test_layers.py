"""Tests the layers of the package: folders import only from lower layers, so without cycles."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gtpo_jax"
LAYERS = {
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
  "reporting": 6,
  "doctor": 7,
  "export": 7,
  "warm_start": 7,
  "loop": 8,
  "planning": 8,
  "cli": 9,
  "__main__": 10,
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path):
  """Returns the folder or top-level module that a file belongs to."""
  first = path.relative_to(PACKAGE).parts[0]
  return first.removesuffix(".py")


def imports(path):
  """Yields the folders or modules of the package that a file imports; others as "outside:NAME"."""
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
def test_imports_come_from_lower_layers(path):
  here = part_of(path)
  assert here in LAYERS, f"{here} has no layer"
  for there in imports(path):
    if there.startswith("outside:") or there == here:
      continue
    assert LAYERS[there] < LAYERS[here], (
      f"{path} in layer {LAYERS[here]} imports {there} in layer {LAYERS[there]}"
    )


def test_the_top_level_has_few_modules_and_every_part_has_a_layer():
  modules = {path.stem for path in PACKAGE.glob("*.py")}
  folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
  assert len(modules) <= 8
  assert LAYERS.keys() == (modules | folders) - {"__init__"}


def test_importing_the_runtime_does_not_import_jax():
  """`prepare_jax` must run before JAX is imported, and signal handling must start quickly."""
  names = ("", ".startup", ".cluster", ".signals", ".errors", ".files")
  code = "import sys\n"
  code += "".join(f"import gtpo_jax.runtime{name}\n" for name in names)
  code += "assert not {'jax', 'jaxlib', 'flax'} & set(sys.modules)\n"
  subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=True)


def test_rewards_do_not_import_jax():
  for path in (PACKAGE / "rewards").glob("*.py"):
    assert not {"outside:jax", "outside:flax"} & set(imports(path)), path


def test_code_inside_the_sandbox_imports_only_what_is_there():
  allowed = {
    "outside:" + name for name in ("__future__", "_operator", "builtins", "marshal", "os", "sys")
  }
  assert set(imports(PACKAGE / "rewards" / "inside.py")) <= allowed


def test_algorithms_depend_only_on_arrays():
  allowed = {"arrays", "runtime", "algorithms"}
  for path in (PACKAGE / "algorithms").glob("*.py"):
    ours = {name for name in imports(path) if not name.startswith("outside:")}
    assert ours <= allowed, (path, ours - allowed)


def test_torch_and_tensorflow_are_never_imported():
  for path in FILES:
    assert not {"outside:torch", "outside:tensorflow"} & set(imports(path)), path
