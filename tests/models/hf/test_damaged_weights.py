"""Damaged weights, wrong tensors and hostile indexes are rejected in one line; no file changes."""

import json
import re
import shutil

import numpy as np
import pytest
from hf_folders import join_file, split_file
from hostile import INDEX, first_shard, rejection, weights

NORM = "model.norm.weight"


def edit_header(file, change):
  header, data = split_file(file)
  changed = change(header)
  join_file(file, header if changed is None else changed, data)


def truncated(folder):
  weights(folder).write_bytes(weights(folder).read_bytes()[:-100])


def cut_in_the_header(folder):
  weights(folder).write_bytes(weights(folder).read_bytes()[:200])


def empty_file(folder):
  weights(folder).write_bytes(b"")


def header_beyond_the_file(folder):
  weights(folder).write_bytes((10**7).to_bytes(8, "little") + weights(folder).read_bytes()[8:])


def header_beyond_all_memory(folder):
  weights(folder).write_bytes(b"\xff" * 8 + weights(folder).read_bytes()[8:])


def trailing_bytes(folder):
  weights(folder).write_bytes(weights(folder).read_bytes() + b"\0" * 64)


def offsets_beyond_the_data(folder):
  edit_header(
    weights(folder),
    lambda header: header["model.norm.weight"].update(data_offsets=[10**6, 10**6 + 128]),
  )


def offsets_that_overlap(folder):
  edit_header(
    weights(folder), lambda header: header["model.norm.weight"].update(data_offsets=[0, 128])
  )


def offsets_backwards(folder):
  edit_header(weights(folder), lambda header: header["model.norm.weight"]["data_offsets"].reverse())


def offsets_negative(folder):
  edit_header(
    weights(folder), lambda header: header["model.norm.weight"].update(data_offsets=[-128, 0])
  )


def shape_unlike_its_bytes(folder):
  edit_header(weights(folder), lambda header: header["model.norm.weight"].update(shape=[33]))


def shape_that_overflows(folder):
  edit_header(
    weights(folder), lambda header: header["model.norm.weight"].update(shape=[2**62, 2**62])
  )


def header_no_object(folder):
  edit_header(weights(folder), lambda header: "[]")


def header_deep(folder):
  edit_header(weights(folder), lambda header: '{"a":' * 5000 + "1" + "}" * 5000)


def header_not_utf8(folder):
  _, data = split_file(weights(folder))
  weights(folder).write_bytes((4).to_bytes(8, "little") + b"\xff\xfe{}" + data)


def name_twice_in_a_header(folder):
  def twice(header):
    inner = json.dumps(header["model.norm.weight"])
    return json.dumps(header)[:-1] + f', "model.norm.weight": {inner}}}'

  edit_header(weights(folder), twice)


def integers(folder):
  edit_header(weights(folder), lambda header: header["model.norm.weight"].update(dtype="I32"))


def nan(folder):
  poison(folder, np.nan)


def infinity(folder):
  poison(folder, -np.inf)


def poison(folder, value):
  header, data = split_file(weights(folder))
  start = header["model.layers.1.mlp.up_proj.weight"]["data_offsets"][0]
  join_file(
    weights(folder), header, data[: start + 40] + np.float32(value).tobytes() + data[start + 44 :]
  )


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    *(
      (damage, r"is not a valid safetensors file")
      for damage in (
        truncated,
        cut_in_the_header,
        empty_file,
        header_beyond_the_file,
        header_beyond_all_memory,
        trailing_bytes,
        offsets_beyond_the_data,
        offsets_that_overlap,
        offsets_backwards,
        offsets_negative,
        shape_unlike_its_bytes,
        shape_that_overflows,
        header_deep,
        header_not_utf8,
      )
    ),
    (header_no_object, "safetensors"),
    (name_twice_in_a_header, "model.norm.weight"),
    (integers, r"'model\.norm\.weight'.*has dtype I32"),
    (nan, "NaN or infinity, in layers/up/kernel$"),
    (infinity, "NaN or infinity, in layers/up/kernel$"),
  ],
  ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_weights(damage, message, folder):
  damage(folder)
  line = rejection(folder)
  assert re.search(message, line), line


def edit_tensors(folder, change):
  from safetensors.numpy import load_file, save_file

  tensors = load_file(weights(folder))
  change(tensors)
  save_file(tensors, weights(folder))


def test_missing_tensors_are_named(folder):
  edit_tensors(
    folder, lambda tensors: [tensors.pop(f"model.layers.{i}.self_attn.q_proj.bias") for i in (0, 1)]
  )
  assert rejection(folder) == (
    "2 tensor(s) missing: model.layers.0.self_attn.q_proj.bias, "
    "model.layers.1.self_attn.q_proj.bias; config.json has model_type = qwen2, "
    "tie_word_embeddings = True"
  )


def test_extra_tensors_are_named(folder):
  edit_tensors(
    folder,
    lambda tensors: tensors.update(
      {"model.layers.2.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}
    ),
  )
  assert rejection(folder) == "num_hidden_layers = 2, but there are tensors of 3 layers"


def test_tensors_of_the_wrong_shape_are_named(folder):
  edit_tensors(
    folder, lambda tensors: tensors.update({"model.norm.weight": np.zeros((32, 1), np.float32)})
  )
  assert rejection(folder).startswith(
    "1 tensor(s) of the wrong shape: model.norm.weight (32, 1) instead of (32,);"
  )


def test_a_transposed_matrix_has_the_wrong_shape(folder):
  edit_tensors(
    folder,
    lambda tensors: tensors.update(
      {"model.layers.0.mlp.up_proj.weight": np.zeros((32, 48), np.float32)}
    ),
  )
  assert "model.layers.0.mlp.up_proj.weight (32, 48) instead of (48, 32)" in rejection(folder)


def test_many_names_are_cut_short(folder):
  edit_tensors(
    folder, lambda tensors: tensors.update({f"x{i}": np.zeros(1, np.float32) for i in range(500)})
  )
  assert rejection(folder).startswith("500 tensor(s) not of this architecture: x0, x1,")


def test_a_tensor_name_of_many_lines_is_still_one_line(folder):
  edit_tensors(folder, lambda tensors: tensors.update({"a\nb\x1b[31m": np.zeros(1, np.float32)}))
  rejection(folder)


def redirect(name, target):
  def change(folder):
    values = json.loads((folder / INDEX).read_text())
    values["weight_map"][name] = target
    (folder / INDEX).write_text(json.dumps(values))

  return change


def with_index(values):
  return lambda folder: (folder / INDEX).write_text(
    values if isinstance(values, str) else json.dumps(values)
  )


def put_secret_beside(folder):
  shutil.copy(first_shard(folder), folder.parent / "secret.safetensors")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (redirect(NORM, "../secret.safetensors"), "is not a file name in that folder"),
    (redirect(NORM, "../../home/secret.safetensors"), "is not a file name in that folder"),
    (redirect(NORM, "/etc/passwd"), "safetensors"),
    (redirect(NORM, "/tmp/x.safetensors"), "is not a file name in that folder"),
    (redirect(NORM, "sub/../x.safetensors"), "is not a file name in that folder"),
    (redirect(NORM, ".."), "safetensors"),
    (redirect(NORM, ""), "safetensors"),
    (redirect(NORM, "a\0.safetensors"), "safetensors"),
    (redirect(NORM, "none.safetensors"), "none.safetensors"),
    (redirect(NORM, "pytorch_model.bin"), "only .safetensors files are supported"),
    (redirect(NORM, 3), "no weight_map"),
    (redirect(NORM, ["a"]), "no weight_map"),
    (
      redirect("not.there", "model-00001-of-00004.safetensors"),
      "lists not.there in model-00001-of-00004",
    ),
    (redirect(NORM, "\n.safetensors"), ""),
    (with_index("[1]"), "holds list, not an object"),
    (with_index("{"), "is not valid JSON"),
    (with_index({}), "no weight_map"),
    (with_index({"weight_map": [1]}), "no weight_map"),
    (with_index({"weight_map": {}}), "no weight_map"),
    (with_index("[" * 10**5), "is not valid JSON"),
  ],
  ids=[
    "up",
    "up-and-down",
    "absolute",
    "absolute-safetensors",
    "through-a-folder",
    "parent",
    "empty",
    "nul",
    "missing",
    "bin",
    "number",
    "list",
    "false-promise",
    "newline",
    "index-list",
    "index-broken",
    "index-empty",
    "map-list",
    "map-empty",
    "index-deep",
  ],
)
def test_hostile_indexes(change, message, shards):
  put_secret_beside(shards)
  files = len(list(shards.glob("*.safetensors")))
  first_shard(shards).rename(shards / f"model-00001-of-{files:05d}.safetensors")
  change(shards)
  line = rejection(shards)
  assert message in line, line


def test_an_index_that_is_not_utf8(shards):
  (shards / INDEX).write_bytes(b'{"weight_map": {"\xff": "a.safetensors"}}')
  assert "is not valid JSON" in rejection(shards)


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
