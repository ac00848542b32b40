"""A saved folder appears complete or not at all, whatever interrupts the save."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hf_folders import random_model

from gtpo_jax.models import load, save
from gtpo_jax.runtime.errors import UserError

ROOT = Path(__file__).parents[3]


def rejection(place, **settings):
  """Returns the error message of a save, which must be one line."""
  with pytest.raises(UserError) as caught:
    save(*random_model(), None, place, **settings)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "notes").write_text("mine")
  (tmp_path / "file").write_text("mine")
  for name in ("full", "file"):
    assert "is not empty; name a new folder" in rejection(tmp_path / name)
  assert sorted(file.name for file in tmp_path.rglob("*")) == ["file", "full", "notes"]
  assert (tmp_path / "full" / "notes").read_text() == "mine" == (tmp_path / "file").read_text()


def test_an_empty_folder_is_filled(tmp_path):
  (tmp_path / "out").mkdir()
  save(*random_model(), None, tmp_path / "out")
  load(tmp_path / "out")
  assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_an_empty_current_folder_is_filled_or_rejected_in_one_line(tmp_path, monkeypatch):
  (tmp_path / "out").mkdir()
  monkeypatch.chdir(tmp_path / "out")
  try:
    save(*random_model(), None, ".")
  except UserError as error:
    assert "\n" not in str(error)
  else:
    load(tmp_path / "out")


def test_missing_parents_are_created(tmp_path):
  save(*random_model(), None, str(tmp_path / "a" / "b" / "out"))
  load(tmp_path / "a" / "b" / "out")


def test_a_place_that_cannot_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  assert rejection(tmp_path / "file" / "out").startswith(
    f"cannot write {str(tmp_path / 'file' / 'out')!r}: "
  )
  assert "cannot write" in rejection("/proc/out")
  (tmp_path / "link").symlink_to(tmp_path / "nowhere")
  assert "cannot write" in rejection(tmp_path / "link")
  assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize(
  "error",
  [OSError(28, "No space left on device"), RuntimeError("other"), KeyboardInterrupt()],
  ids=["disk", "other", "ctrl-c"],
)
def test_a_save_that_fails_midway_leaves_nothing(error, tmp_path, monkeypatch):
  # The attribute `gtpo_jax.models.hf.save` is the function, not the module.
  module = importlib.import_module("gtpo_jax.models.hf.save")
  written = []
  real = module._write_tensors

  def failing(file, *rest):
    if len(written) == 2:
      raise error
    written.append(file)
    real(file, *rest)

  monkeypatch.setattr(module, "_write_tensors", failing)
  if isinstance(error, OSError):
    assert (
      rejection(tmp_path / "out", shard_bytes=20_000)
      == f"cannot write {str(tmp_path / 'out')!r}: No space left on device"
    )
  else:
    with pytest.raises(type(error)):
      save(*random_model(), None, tmp_path / "out", shard_bytes=20_000)
  assert len(written) == 2 and not list(tmp_path.iterdir())
  monkeypatch.undo()
  save(*random_model(), None, tmp_path / "out")
  load(tmp_path / "out")


KILLED = """
import os, signal, sys
import importlib
module = importlib.import_module("gtpo_jax.models.hf.save")
from gtpo_jax.models import PRESETS, Transformer, init_params
from gtpo_jax.runtime.mesh import single_device_mesh
import dataclasses, jax
real, count = module._write_tensors, 0

def dying(*settings):
  global count
  count += 1
  real(*settings)
  if count == 3:
    os.kill(os.getpid(), signal.SIGKILL)

module._write_tensors = dying
config = dataclasses.replace(
  PRESETS["tiny"], vocab_size=64, width=32, heads=2, kv_heads=1, mlp=32, layers=1
)
model = Transformer(config, single_device_mesh())
module.save(model, init_params(model, jax.random.key(0)), None, sys.argv[1], shard_bytes=10_000)
"""


@pytest.mark.parametrize("name", ["out", "out[1]*"])
@pytest.mark.some(1)
def test_a_killed_save_leaves_no_folder_and_the_next_one_cleans_up(name, tmp_path):
  if name == "out":
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
      [sys.executable, "-c", KILLED, tmp_path / name],
      cwd=ROOT,
      env=environment,
      capture_output=True,
      text=True,
      timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
  else:
    (tmp_path / f".{name}.partial-1").mkdir()
  left = list(tmp_path.iterdir())
  assert not (tmp_path / name).exists() and len(left) == 1 and left[0].name.startswith(".")
  save(*random_model(), None, tmp_path / name)
  assert [file.name for file in tmp_path.iterdir()] == [name]
  load(tmp_path / name)


def test_cleaning_up_keeps_other_folders(tmp_path):
  """Only the remains of earlier saves to exactly the same folder name are deleted."""
  for other in (".mine.partial-7", ".out2.partial-7", "out.partial-7", "out2"):
    (tmp_path / other).mkdir()
    (tmp_path / other / "notes").write_text("mine")
  save(*random_model(), None, tmp_path / "out")
  save(*random_model(), None, tmp_path / "*")
  assert sorted(file.parent.name for file in tmp_path.rglob("notes")) == [
    ".mine.partial-7",
    ".out2.partial-7",
    "out.partial-7",
    "out2",
  ]
