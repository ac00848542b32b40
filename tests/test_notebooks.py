"""Tests that the notebooks have no outputs, and runs a small version of them (`GTPO_TINY`)."""

import glob
import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_all_notebooks_are_covered():
  assert [file.stem for file in NOTEBOOKS] == [
    "bring_your_own_task",
    "credit_assignment",
    "quickstart",
    "real_model",
    "tools_and_environments",
  ]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_have_no_outputs(file):
  notebook = json.loads(file.read_text())
  assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
  for cell in notebook["cells"]:
    assert cell["metadata"] == {}, cell["id"]
    assert not cell.get("outputs"), cell["id"]
    assert cell.get("execution_count") is None, cell["id"]


def install_cell(file):
  """Returns the code of a notebook's first code cell."""
  cells = json.loads(file.read_text())["cells"]
  return "".join(next(cell for cell in cells if cell["cell_type"] == "code")["source"])


def test_all_notebooks_install_in_the_same_way():
  assert len({install_cell(file) for file in NOTEBOOKS}) == 1


DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}.54.15  Tue Jan 1 2030"
MACHINES = {  # name: (files of TPU chips, text of the NVIDIA driver's file, expected extra)
  "CPU": ([], None, "cpu"),
  "TPU v2 to v4": (["/dev/accel0"], None, "tpu"),
  "TPU v5e": (["/dev/vfio/0"], None, "tpu"),
  "GPU": ([], DRIVER.format(580), "cuda"),
  "GPU with an older driver": ([], DRIVER.format(550), "cuda12"),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
  ("repository", "source"),
  [
    ("https://host/owner/gtpo_jax", "git+https://host/owner/gtpo_jax"),
    (
      "https://host/gtpo_jax-0.2.0-py3-none-any.whl",
      "https://host/gtpo_jax-0.2.0-py3-none-any.whl",
    ),
    ("", ROOT.as_uri()),
  ],
)
def test_the_first_cell_installs_what_the_machine_needs(
  machine, repository, source, tmp_path, monkeypatch
):
  """Runs the cell under a faked machine, with a faked pip."""
  chips, driver, extra = MACHINES[machine]
  file = tmp_path / "version"
  if driver:
    file.write_text(driver)
  code = install_cell(NOTEBOOKS[0])
  assert 'REPOSITORY = ""' in code and 'Path("/proc/driver/nvidia/version")' in code
  code = code.replace('REPOSITORY = ""', f"REPOSITORY = {repository!r}")
  code = code.replace("/proc/driver/nvidia/version", str(file))
  called = []
  kept = lambda pattern: [chip for chip in chips if re.fullmatch(pattern.replace("*", ".*"), chip)]
  monkeypatch.setattr(glob, "glob", kept)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  monkeypatch.setattr(subprocess, "run", lambda command, check: called.append(command))
  monkeypatch.chdir(ROOT / "notebooks")
  exec(code, {})
  ((*_, requirement),) = called
  assert requirement == f"gtpo_jax[{extra},data] @ {source}"


def test_without_a_clone_or_an_address_the_first_cell_says_so(tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit, match="enter the address of the repository in this cell"):
    exec(install_cell(NOTEBOOKS[0]), {})


@pytest.mark.some(0, slow=1)
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file, tmp_path, monkeypatch):
  """Without the pretrained model, whose training is tested in test_real_model.py."""
  monkeypatch.delenv("GTPO_SMOLLM2", raising=False)
  text = run_notebook(file, tmp_path, monkeypatch)
  if file.stem == "quickstart":
    assert "neither a GPU nor a TPU here: skipped" in text


@pytest.mark.manual
def test_the_notebook_of_the_pretrained_model_runs_with_it(tmp_path, monkeypatch):
  if not os.environ.get("GTPO_SMOLLM2"):
    pytest.skip("GTPO_SMOLLM2 does not name a folder; tests/build_smollm2.py builds one")
  run_notebook(ROOT / "notebooks" / "real_model.ipynb", tmp_path, monkeypatch)


def run_notebook(file, tmp_path, monkeypatch):
  """Runs the small version of a notebook, checks its outputs, and returns its text."""
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
  return text
