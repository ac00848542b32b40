"""Checks that a damaged or malicious folder is refused, and common ways to damage one."""

import os

import pytest

from gtpo_jax.models import load
from gtpo_jax.runtime.errors import UserError

INDEX = "model.safetensors.index.json"
MAX_MESSAGE = 1200  # characters; a longer message is not one readable line


def contents(folder):
  """Every path below a folder with its bytes, its link target, or None for a folder."""

  def read(file):
    if file.is_symlink():
      return os.readlink(file)
    return None if file.is_dir() else file.read_bytes()

  return {str(file.relative_to(folder)): read(file) for file in sorted(folder.rglob("*"))}


def refusal(folder, load_folder=lambda folder: load(folder, "float32")):
  """Returns the one line that a folder is refused with; nothing changed and no code of it ran."""
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
  """Moves a file out of its folder and leaves a link."""
  outside = file.parent.parent / f"outside-{file.name}"
  file.rename(outside)
  file.symlink_to(outside)
