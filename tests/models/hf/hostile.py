"""A check that a damaged or malicious folder is rejected, and common ways to damage a folder."""

import os

import pytest

from gtpo_jax.models import load
from gtpo_jax.runtime.errors import UserError

INDEX = "model.safetensors.index.json"
MAX_MESSAGE = 1200  # characters; a longer message would not be one readable line


def contents(folder):
  """Maps every path below a folder to its bytes, its link target, or None if it is a folder."""

  def read(file):
    if file.is_symlink():
      return os.readlink(file)
    return None if file.is_dir() else file.read_bytes()

  return {str(file.relative_to(folder)): read(file) for file in sorted(folder.rglob("*"))}


def rejection(folder, load_folder=lambda folder: load(folder, "float32")):
  """Returns the error message of loading a folder, and checks it.

  The message must be one line, no file may change, and no code in the folder may run.
  """
  home = folder.parent.parent
  before = contents(home)
  with pytest.raises(UserError) as caught:
    load_folder(folder)
  message = str(caught.value)
  assert message and "\n" not in message and len(message) < MAX_MESSAGE, message
  assert contents(home) == before
  assert not list(home.rglob("canary"))
  return message


def weights(folder):
  return folder / "model.safetensors"


def first_shard(folder):
  return sorted(folder.glob("*.safetensors"))[0]


def move_out(file):
  """Moves a file out of its folder and leaves a link to it."""
  outside = file.parent.parent / f"outside-{file.name}"
  file.rename(outside)
  file.symlink_to(outside)
