"""Damaged weights, wrong tensors and hostile indexes are rejected in one line; no file changes."""

import json
import re
import shutil

import numpy as np
import pytest
from hf_folders import join_file, split_file
from hostile import INDEX, first_shard, rejection, weights

NORM = "model.norm.weight"
UP = "model.layers.0.mlp.up_proj.weight"
INVALID = "is not a valid safetensors file"
# What is written instead of the bytes of the file.
BYTES = {
  "truncated": lambda content: content[:-100],
  "cut in the header": lambda content: content[:200],
  "empty": lambda content: b"",
  "a header beyond the file": lambda content: (10**7).to_bytes(8, "little") + content[8:],
  "a header beyond all memory": lambda content: b"\xff" * 8 + content[8:],
  "trailing bytes": lambda content: content + b"\0" * 64,
}


def entry(**changes):
  """A change of the norm's entry in the header."""
  return lambda header: header[NORM].update(changes)


# By name: a change of the header, which may return a text instead, and the message.
HEADERS = {
  "offsets beyond the data": (entry(data_offsets=[10**6, 10**6 + 128]), INVALID),
  "offsets that overlap": (entry(data_offsets=[0, 128]), INVALID),
  "offsets backwards": (lambda header: header[NORM]["data_offsets"].reverse(), INVALID),
  "negative offsets": (entry(data_offsets=[-128, 0]), INVALID),
  "a shape unlike its bytes": (entry(shape=[33]), INVALID),
  "a shape that overflows": (entry(shape=[2**62, 2**62]), INVALID),
  "deep": (lambda header: '{"a":' * 5000 + "1" + "}" * 5000, INVALID),
  "no object": (lambda header: "[]", "safetensors"),
  "a name twice": (
    lambda header: json.dumps(header)[:-1] + f', "{NORM}": {json.dumps(header[NORM])}}}',
    NORM,
  ),
  "integers": (entry(dtype="I32"), f"'{NORM}'.*has dtype I32"),
}
# The same of the tensors.
TENSORS = {
  "missing": (
    lambda tensors: [tensors.pop(f"model.layers.{i}.self_attn.q_proj.bias") for i in (0, 1)],
    "2 tensor(s) missing: model.layers.0.self_attn.q_proj.bias, "
    "model.layers.1.self_attn.q_proj.bias; config.json has model_type = qwen2, "
    "tie_word_embeddings = True",
  ),
  "of another layer": (
    lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": np.zeros((2, 2))}),
    "num_hidden_layers = 2, but there are tensors of 3 layers",
  ),
  "another shape": (
    lambda tensors: tensors.update({NORM: np.zeros((32, 1))}),
    f"1 tensor(s) of the wrong shape: {NORM} (32, 1) instead of (32,);",
  ),
  "transposed": (
    lambda tensors: tensors.update({UP: np.zeros((32, 48))}),
    f"1 tensor(s) of the wrong shape: {UP} (32, 48) instead of (48, 32)",
  ),
  "many names": (
    lambda tensors: tensors.update({f"x{i}": np.zeros(1) for i in range(500)}),
    "500 tensor(s) not of this architecture: x0, x1,",
  ),
  "a name of many lines": (
    lambda tensors: tensors.update({"a\nb\x1b[31m": np.zeros(1)}),
    "1 tensor(s) not of this architecture: ",
  ),
}


@pytest.mark.parametrize("damage", BYTES)
def test_damaged_files(damage, folder):
  file = weights(folder)
  file.write_bytes(BYTES[damage](file.read_bytes()))
  assert INVALID in rejection(folder)


def test_a_header_that_is_not_utf8(folder):
  _, data = split_file(weights(folder))
  weights(folder).write_bytes((4).to_bytes(8, "little") + b"\xff\xfe{}" + data)
  assert INVALID in rejection(folder)


@pytest.mark.parametrize("damage", HEADERS)
def test_damaged_headers(damage, folder):
  change, message = HEADERS[damage]
  header, data = split_file(weights(folder))
  changed = change(header)
  join_file(weights(folder), changed if isinstance(changed, str) else header, data)
  line = rejection(folder)
  assert re.search(message, line), line


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_numbers_that_are_not_finite(value, folder):
  header, data = split_file(weights(folder))
  at = header["model.layers.1.mlp.up_proj.weight"]["data_offsets"][0] + 40
  join_file(weights(folder), header, data[:at] + np.float32(value).tobytes() + data[at + 4 :])
  assert rejection(folder).endswith("NaN or infinity, in layers/up/kernel")


@pytest.mark.parametrize("damage", TENSORS)
def test_other_tensors_are_named(damage, folder):
  safetensors = pytest.importorskip("safetensors.numpy")
  change, message = TENSORS[damage]
  tensors = safetensors.load_file(weights(folder))
  change(tensors)
  tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
  safetensors.save_file(tensors, weights(folder))
  assert rejection(folder).startswith(message)


def redirect(name, target):
  def change(folder):
    values = json.loads((folder / INDEX).read_text())
    values["weight_map"][name] = target
    (folder / INDEX).write_text(json.dumps(values))

  return change


def with_index(values):
  raw = json.dumps(values) if isinstance(values, dict) else values
  raw = raw.encode() if isinstance(raw, str) else raw
  return lambda folder: (folder / INDEX).write_bytes(raw)


def put_secret_beside(folder):
  shutil.copy(first_shard(folder), folder.parent / "secret.safetensors")


# By name: what becomes of the index, and the message.
INDEXES = {
  "up": (redirect(NORM, "../secret.safetensors"), "is not a file name in that folder"),
  "up and down": (redirect(NORM, "../../home/secret.safetensors"), "is not a file name in that"),
  "absolute": (redirect(NORM, "/etc/passwd"), "safetensors"),
  "absolute safetensors": (redirect(NORM, "/tmp/x.safetensors"), "is not a file name in that"),
  "through a folder": (redirect(NORM, "sub/../x.safetensors"), "is not a file name in that folder"),
  "parent": (redirect(NORM, ".."), "safetensors"),
  "empty": (redirect(NORM, ""), "safetensors"),
  "nul": (redirect(NORM, "a\0.safetensors"), "safetensors"),
  "missing": (redirect(NORM, "none.safetensors"), "none.safetensors"),
  "bin": (redirect(NORM, "pytorch_model.bin"), "only .safetensors files are supported"),
  "number": (redirect(NORM, 3), "no weight_map"),
  "list": (redirect(NORM, ["a"]), "no weight_map"),
  "false promise": (
    redirect("not.there", "model-00001-of-00004.safetensors"),
    "lists not.there in model-00001-of-00004",
  ),
  "newline": (redirect(NORM, "\n.safetensors"), ""),
  "index list": (with_index("[1]"), "holds list, not an object"),
  "index broken": (with_index("{"), "is not valid JSON"),
  "index empty": (with_index({}), "no weight_map"),
  "map list": (with_index({"weight_map": [1]}), "no weight_map"),
  "map empty": (with_index({"weight_map": {}}), "no weight_map"),
  "index deep": (with_index("[" * 10**5), "is not valid JSON"),
  "index not utf-8": (
    with_index(b'{"weight_map": {"\xff": "a.safetensors"}}'),
    "is not valid JSON",
  ),
}


@pytest.mark.parametrize("name", INDEXES)
def test_hostile_indexes(name, shards):
  change, message = INDEXES[name]
  put_secret_beside(shards)
  files = len(list(shards.glob("*.safetensors")))
  first_shard(shards).rename(shards / f"model-00001-of-{files:05d}.safetensors")
  change(shards)
  line = rejection(shards)
  assert message in line, line


def test_a_tensor_in_two_shards(shards):
  files = sorted(shards.glob("*.safetensors"))
  header, data = split_file(files[0])
  header.pop("__metadata__", None)
  other, rest = split_file(files[1])
  name = min(header, key=lambda key: header[key]["data_offsets"])
  start, end = header[name]["data_offsets"]
  join_file(
    files[1],
    other | {name: header[name] | {"data_offsets": [len(rest), len(rest) + end - start]}},
    rest + data[start:end],
  )
  message = rejection(shards)
  assert name in message and files[0].name in message and files[1].name in message


def test_the_same_tensor_in_two_files_without_an_index(folder):
  shutil.copy(weights(folder), folder / "again.safetensors")
  assert "again.safetensors" in rejection(folder)
