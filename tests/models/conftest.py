"""Model folders that a test may damage."""

import shutil
from pathlib import Path

import pytest
from hf_folders import hf_folder


@pytest.fixture
def folder(tmp_path):
  """A copy of a valid folder with one file of weights."""
  return Path(shutil.copytree(hf_folder()[0], tmp_path / "home" / "hf"))


@pytest.fixture
def shards(tmp_path):
  """A copy of a valid folder of the same model, with several files of weights and an index."""
  return Path(shutil.copytree(hf_folder(shard="20KB")[0], tmp_path / "home" / "hf"))
