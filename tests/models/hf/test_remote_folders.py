"""Models, data and exports in an object store: read by ranges, each slice once, and verified."""

import gzip
import hashlib
import json

import jax
import numpy as np
import pytest
from hf_folders import hf_folder
from meshes import mesh_of

from gtpo_jax.data.chat import load_chat
from gtpo_jax.data.readers import read_rows
from gtpo_jax.models import load, save
from gtpo_jax.models.hf.load import stored_tensors
from gtpo_jax.runtime.errors import RunError, UserError
from gtpo_jax.runtime.paths import storage_path


@pytest.fixture
def folder(store):
  """A model in two shards, and its copy in the bucket."""
  local, _ = hf_folder(shard="20KB")
  copy(local, storage_path(f"{store.url}/model"))
  store.requests = []
  return local, f"{store.url}/model"


def copy(local, remote):
  for file in local.iterdir():
    if file.is_file():
      (remote / file.name).write_bytes(file.read_bytes())


@pytest.mark.slow
def test_slices_are_those_of_the_local_file(folder):
  local, url = folder
  remote = stored_tensors(storage_path(url))
  random = np.random.default_rng(0)
  for name, tensor in stored_tensors(local).items():
    assert tensor.shape == remote[name].shape
    np.testing.assert_array_equal(tensor[...], remote[name][...])
    for _ in range(3):
      bounds = [sorted(random.integers(0, size + 1, 2)) for size in tensor.shape]
      index = tuple(slice(int(low), int(high)) for low, high in bounds)
      np.testing.assert_array_equal(tensor[index], remote[name][index])


@pytest.mark.devices
@pytest.mark.slow
def test_the_model_is_the_same_on_eight_devices(folder):
  local, url = folder
  _, params = load(url, dtype="float32", mesh=mesh_of(2, 2, 1, 2))
  _, expected = load(local, dtype="float32", mesh=mesh_of(2, 2, 1, 2))
  jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("damage", ["truncated", "longer", "gap", "huge header", "empty"])
@pytest.mark.some(1, slow=1)
def test_a_damaged_file_is_refused(folder, store, damage):
  _, url = folder
  name = next(name for name in store.names("model/") if name.endswith(".safetensors"))
  data = store.read(name)
  length = int.from_bytes(data[:8], "little")
  if damage == "gap":
    header = json.loads(data[8 : 8 + length])
    tensor = next(value for key, value in header.items() if key != "__metadata__")
    tensor["data_offsets"] = [offset + 4 for offset in tensor["data_offsets"]]
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + data[8 + length :]
  changed = {
    "truncated": data[:-3],
    "longer": data + b"xyz",
    "gap": data,
    "huge header": (10**15).to_bytes(8, "little") + data[8:],
    "empty": b"",
  }[damage]
  storage_path(f"{store.url}/{name}").write_bytes(changed)
  with pytest.raises(UserError, match="is not a valid safetensors file"):
    stored_tensors(storage_path(url))


def test_a_read_that_fails_is_one_line(folder, store):
  _, url = folder
  tensors = stored_tensors(storage_path(url))
  store.fault = lambda method, path, query: 403
  with pytest.raises(RunError, match=r"^cannot read 'gs://bucket/model/.*': .*Forbidden"):
    next(iter(tensors.values()))[...]


def test_a_folder_without_a_model(store):
  with pytest.raises(UserError, match=r"no model and no run at 'gs://bucket/nothing'"):
    load(f"{store.url}/nothing")


@pytest.mark.slow
def test_an_export_is_complete_and_can_be_loaded(folder, store):
  local, _ = folder
  model, params = load(local, dtype="float32")
  out = f"{store.url}/out"
  save(model, params, load_chat().tokenizer, out, shard_bytes=20_000, files={"README.md": "card"})
  sums = dict(reversed(line.split()) for line in store.read("out/SHA256SUMS").decode().splitlines())
  assert {f"out/{name}" for name in sums} | {"out/SHA256SUMS"} == set(store.names("out/"))
  for name, digest in sums.items():
    assert hashlib.sha256(store.read(f"out/{name}")).hexdigest() == digest
  _, again = load(out, dtype="float32")
  jax.tree.map(np.testing.assert_array_equal, params, again)
  assert load_chat(out).encode_text("1+2:") == load_chat().encode_text("1+2:")
  with pytest.raises(UserError, match=r"'gs://bucket/out' is not empty; remove it, or name a new"):
    save(model, params, None, out)


def test_an_export_that_fails_leaves_nothing(folder, store):
  local, _ = folder
  model, params = load(local, dtype="float32")
  store.fault = lambda method, path, query: 403 if query.get("name") == "out/config.json" else None
  with pytest.raises(UserError, match=r"^cannot write 'gs://bucket/out': "):
    save(model, params, None, f"{store.url}/out")
  assert store.names("out/") == []


def test_an_export_that_was_killed_is_named(folder, store):
  local, _ = folder
  model, params = load(local, dtype="float32")
  storage_path(f"{store.url}/out/model.safetensors").write_bytes(b"half")
  with pytest.raises(UserError, match="incomplete: it has no SHA256SUMS; remove it"):
    save(model, params, None, f"{store.url}/out")


@pytest.mark.slow
def test_data_files(store, tmp_path):
  rows = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(3)]
  text = "".join(json.dumps(row) + "\n" for row in rows).encode()
  folder = storage_path(f"{store.url}/data")
  (folder / "a.jsonl").write_bytes(text)
  (folder / "more" / "b.jsonl.gz").write_bytes(gzip.compress(text))
  import pyarrow
  import pyarrow.parquet

  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
  (folder / "c.parquet").write_bytes((tmp_path / "c.parquet").read_bytes())
  read = list(read_rows(f"{store.url}/data"))
  assert [row for _, row in read] == rows * 3
  assert read[0][0] == "gs://bucket/data/a.jsonl:1"
  assert [row for _, row in read_rows(f"{store.url}/data/a.jsonl")] == rows
  with pytest.raises(UserError, match=r"no file or folder at 'gs://bucket/none.jsonl'"):
    list(read_rows(f"{store.url}/none.jsonl"))
