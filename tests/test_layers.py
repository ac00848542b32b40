"""Tests the layers of the package: folders import only from lower layers, so without cycles."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "gtpo_jax"
CORE = {  # what trains, each part with its layer
  "runtime": 0,
  "arrays": 0,
  "algorithms": 1,
  "rewards": 2,
  "data": 3,
  "models": 3,
  "environments": 4,
  "sampling": 4,
  "training": 4,
  "config": 5,
  "serving": 5,
  "checkpoint": 6,
  "rollout": 7,
  "logs": 8,
  "loop": 9,
}
PRODUCTS = {  # what is built on the core
  "tinker": 8,
  "cli": 10,
  "__main__": 11,
}
LAYERS = CORE | PRODUCTS
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


def imported_files(path):
  """Yields the files of the package that a file imports, also for type checking only."""
  for node in ast.walk(ast.parse(path.read_text())):
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("gtpo_jax."):
      continue
    source = PACKAGE.joinpath(*node.module.split(".")[1:])
    if source.with_suffix(".py").exists():
      yield source.with_suffix(".py")
      continue
    for alias in node.names:
      module = source / f"{alias.name}.py"
      yield module if module.exists() else source / "__init__.py"


def test_imports_come_from_lower_layers():
  for path in FILES:
    here = part_of(path)
    assert here in LAYERS, f"{here} has no layer"
    for there in imports(path):
      if there.startswith("outside:") or there == here:
        continue
      assert LAYERS[there] < LAYERS[here], (
        f"{path} in layer {LAYERS[here]} imports {there} in layer {LAYERS[there]}"
      )


def test_no_file_imports_itself_through_others():
  """An `__init__.py` may list what its own folder provides; no file of the folder reads it."""
  graph = {path: sorted(imported_files(path)) for path in FILES}
  sorter = graphlib.TopologicalSorter(graph)
  sorter.prepare()  # raises CycleError, which names the files


def test_the_core_knows_no_product():
  for path in FILES:
    here = part_of(path)
    if here in CORE:
      products = PRODUCTS.keys() & set(imports(path))
      assert not products, f"{path} imports {products}"


def test_the_top_level_has_few_modules_and_every_part_has_a_layer():
  modules = {path.stem for path in PACKAGE.glob("*.py")}
  folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
  assert len(modules) <= 3
  assert LAYERS.keys() == (modules | folders) - {"__init__"}


def test_the_documented_layers_are_these():
  text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
  documented = {
    name.removesuffix("/").removesuffix(".py"): int(layer)
    for layer, names in re.findall(r"^\| (\d+) \| (`.*`) \|$", text, re.MULTILINE)
    for name in names.replace("`", "").split()
  }
  assert documented == LAYERS


def test_importing_the_runtime_does_not_import_jax():
  """`prepare_jax` must run before JAX is imported, and signal handling must start quickly."""
  names = ("runtime", "runtime.startup", "runtime.cluster.joining", "runtime.signals")
  names += ("runtime.errors", "runtime.files")
  code = "import sys\n"
  code += "".join(f"import gtpo_jax.{name}\n" for name in names)
  code += "assert not {'jax', 'jaxlib', 'flax'} & set(sys.modules)\n"
  subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=True)


def test_what_runs_user_code_does_not_import_jax():
  for folder in ("runtime/sandbox", "rewards", "environments"):
    for path in (PACKAGE / folder).rglob("*.py"):
      assert not {"outside:jax", "outside:flax"} & set(imports(path)), path


def test_the_scheduler_is_plain_python_and_numpy():
  """It uses no devices, and can be simulated without them."""
  folder = PACKAGE / "sampling" / "schedule"
  for path in folder.glob("*.py"):
    assert all(imported.parent == folder for imported in imported_files(path))
    assert set(imports(path)) <= {"sampling"} | {
      "outside:" + name for name in ("__future__", "collections", "dataclasses", "typing", "numpy")
    }


def test_code_inside_the_sandbox_imports_only_what_is_there():
  allowed = {
    "outside:" + name for name in str.split("__future__ _operator ast builtins marshal math os sys")
  }
  assert set(imports(PACKAGE / "runtime" / "sandbox" / "inside.py")) <= allowed


def test_algorithms_depend_only_on_arrays():
  allowed = {"arrays", "runtime", "algorithms"}
  for path in (PACKAGE / "algorithms").rglob("*.py"):
    ours = {name for name in imports(path) if not name.startswith("outside:")}
    assert ours <= allowed, (path, ours - allowed)


def test_torch_and_tensorflow_are_never_imported():
  for path in FILES:
    assert not {"outside:torch", "outside:tensorflow"} & set(imports(path)), path
