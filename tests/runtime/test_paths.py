"""Object stores: what is written is complete, exclusive and readable in parts; errors are lines."""

import os

import numpy as np
import pytest
from etils import epath

from gtpo_jax.runtime import paths
from gtpo_jax.runtime.errors import RunError, UserError
from gtpo_jax.runtime.paths import (
  create_exclusively,
  is_remote,
  list_files,
  read_range,
  storage_errors,
  storage_path,
  write_atomically,
)
from gtpo_jax.runtime.startup import prepare_libraries


def test_an_owner_without_a_name(tmp_path):
  """As in containers: `epath` describes the file instead of raising KeyError."""
  if os.getuid():
    pytest.skip("only root can give files away")
  file = tmp_path / "file"
  file.write_bytes(b"abc")
  os.chown(file, 54321, 54322)
  prepare_libraries()
  found = epath.Path(file).stat()
  assert (found.owner, found.group, found.length, found.is_directory) == (
    "54321",
    "54322",
    3,
    False,
  )
  assert epath.Path("/").stat().owner == "root"


def test_what_is_remote():
  assert is_remote("gs://bucket/run") and is_remote(epath.Path("s3://bucket/run"))
  assert not is_remote("runs/a") and not is_remote(epath.Path("/runs/a:b"))


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("ftp://host/run", r"ftp:// is not supported; valid are gs://, s3://, az:// and paths"),
    ("s3://bucket/run", r"s3:// needs the package s3fs: pip install s3fs"),
  ],
)
def test_urls_that_nothing_here_opens(name, message, monkeypatch):
  paths._open_store.cache_clear()
  monkeypatch.setattr(paths.importlib.util, "find_spec", lambda package: None)
  with pytest.raises(UserError, match=message):
    storage_path(name)
  paths._open_store.cache_clear()


def test_a_local_file_is_replaced_at_once(tmp_path):
  file = epath.Path(tmp_path / "a.json")
  write_atomically(file, b"old")
  write_atomically(file, b"new")
  assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"] and file.read_bytes() == b"new"


def test_an_object_is_written_at_once(store):
  write_atomically(storage_path(f"{store.url}/run/a.json"), b"text")
  assert store.uploads() == ["run/a.json"] and store.read("run/a.json") == b"text"


def test_only_one_process_creates_an_object(store):
  file = storage_path(f"{store.url}/lock")
  assert create_exclusively(file, b"first")
  assert not create_exclusively(file, b"second")
  assert store.read("lock") == b"first"


@pytest.mark.parametrize(("start", "end"), [(0, 10), (0, 1000), (995, 1000), (3, 777), (5, 5)])
def test_a_range_is_read_in_several_requests(store, start, end, monkeypatch):
  data = np.random.default_rng(0).bytes(1000)
  write_atomically(storage_path(f"{store.url}/data"), data)
  monkeypatch.setattr(paths, "RANGE_BYTES", 100)
  store.requests = []
  assert read_range(storage_path(f"{store.url}/data"), start, end) == data[start:end]
  assert len(store.requests) == -(-(end - start) // 100)


def test_the_files_below_a_folder(store):
  for name in ("run/b/c/d", "run/a", "run/b/e", "other/f"):
    write_atomically(storage_path(f"{store.url}/{name}"), b"x")
  assert list(list_files(storage_path(f"{store.url}/run"))) == ["a", "b/c/d", "b/e"]


def test_errors_become_one_line(store):
  with (
    pytest.raises(UserError, match=r"^cannot write: no such bucket or object$"),
    storage_errors("cannot write", UserError),
  ):
    storage_path("gs://missing/a").write_text("text")
  store.fault = lambda method, path, query: 403
  with (
    pytest.raises(RunError, match=r"^cannot write: .*Forbidden.*$") as error,
    storage_errors("cannot write"),
  ):
    storage_path(f"{store.url}/a").write_text("text")
  assert "\n" not in str(error.value)


def test_a_listing_is_never_stale(store):
  folder = storage_path(f"{store.url}/run")
  (folder / "a").write_text("x")
  assert [entry.name for entry in folder.iterdir()] == ["a"]
  store.storage.delete_file("bucket", "run/a")  # as another process would
  assert not folder.exists() and not (folder / "a").exists()
