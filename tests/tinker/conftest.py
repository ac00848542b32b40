"""The model that servers of these tests have."""

import pytest
from served import small_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory):
  """A Hugging Face folder with random weights."""
  return small_folder(tmp_path_factory)
