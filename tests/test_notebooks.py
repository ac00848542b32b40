"""Tests that the notebooks have no outputs, and runs a small version of them (`GTPO_TINY`)."""

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_all_notebooks_are_covered():
  assert [file.stem for file in NOTEBOOKS] == [
    "bring_your_own_task",
    "credit_assignment",
    "quickstart",
  ]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_have_no_outputs(file):
  notebook = json.loads(file.read_text())
  assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
  for cell in notebook["cells"]:
    assert cell["metadata"] == {}, cell["id"]
    assert not cell.get("outputs"), cell["id"]
    assert cell.get("execution_count") is None, cell["id"]


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file, tmp_path, monkeypatch):
  nbclient = pytest.importorskip("nbclient")
  nbformat = pytest.importorskip("nbformat")
  pytest.importorskip("ipykernel")
  paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
  for name, value in {
    "GTPO_TINY": "1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "PYTHONPATH": paths,
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "IPYTHONDIR": str(tmp_path / "ipython"),
  }.items():
    monkeypatch.setenv(name, value)
  notebook = nbformat.read(file, as_version=4)
  nbclient.NotebookClient(
    notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
  ).execute()
  outputs = [
    output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
  ]
  assert any("image/png" in output.get("data", {}) for output in outputs)
  text = "".join(output.get("text", "") for output in outputs)
  values = [output.get("data", {}).get("text/plain") for output in outputs]
  assert "held-out pass@1" in text + str(values)
  if file.stem == "quickstart":
    assert "no GPU here: skipped" in text
