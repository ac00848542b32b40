"""The notebooks: stripped in git, and run to their end, small (`GTPO_TINY`)."""

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_three():
  assert [file.stem for file in NOTEBOOKS] == [
    "bring_your_own_task",
    "credit_assignment",
    "quickstart",
  ]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_git_has_no_outputs(file):
  whole = json.loads(file.read_text())
  assert set(whole["metadata"]) <= {"kernelspec", "language_info"}
  for cell in whole["cells"]:
    assert (
      cell["metadata"] == {} and not cell.get("outputs") and cell.get("execution_count") is None
    ), cell["id"]


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_runs(file, tmp_path, monkeypatch):
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
  assert "held-out pass@1" in text + str(
    [output.get("data", {}).get("text/plain") for output in outputs]
  )
  if file.stem == "quickstart":
    assert "no GPU here: skipped" in text
