"""Folders that are damaged or mean harm: one line each, nothing executed, nothing written."""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hf_folders import edit_json, hf_folder, join_file, split_file

from gtpo_jax.data.chat import TOKENIZER_DIR, load_chat
from gtpo_jax.models import load
from gtpo_jax.models.folder import is_hf_folder
from gtpo_jax.runtime.errors import UserError

ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"
CODE = "import pathlib\npathlib.Path({!r}).touch()\n"


@pytest.fixture
def folder(tmp_path):
  return Path(shutil.copytree(hf_folder()[0], tmp_path / "home" / "hf"))


@pytest.fixture
def shards(tmp_path):
  """The same in several files with an index."""
  return Path(shutil.copytree(hf_folder(shard="20KB")[0], tmp_path / "home" / "hf"))


def contents(place):
  read = lambda file: (
    os.readlink(file) if file.is_symlink() else None if file.is_dir() else file.read_bytes()
  )
  return {str(file.relative_to(place)): read(file) for file in sorted(place.rglob("*"))}


def refusal(folder, opening=lambda folder: load(folder, "float32")):
  """The one line that a folder is refused with; nothing beside it has changed, and no code of it left its mark."""
  home = folder.parent.parent
  before = contents(home)
  with pytest.raises(UserError) as caught:
    opening(folder)
  message = str(caught.value)
  assert message and "\n" not in message and len(message) < 1200, message
  assert contents(home) == before
  assert not list(home.rglob("canary"))
  return message


def weights(folder):
  return folder / "model.safetensors"


def first_shard(folder):
  return sorted(folder.glob("*.safetensors"))[0]


def edit_header(file, change):
  header, data = split_file(file)
  changed = change(header)
  join_file(file, header if changed is None else changed, data)


# Damaged files.


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
  ("spoil", "message"),
  [
    *(
      (spoil, r"is not a sound safetensors file")
      for spoil in (
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
    (integers, r"'model\.norm\.weight'.*of type I32"),
    (nan, "NaN or infinity, in layers/up/kernel$"),
    (infinity, "NaN or infinity, in layers/up/kernel$"),
  ],
  ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_weights(spoil, message, folder):
  spoil(folder)
  line = refusal(folder)
  assert re.search(message, line), line


# Tensors that are not the model's.


def edit_tensors(folder, change):
  from safetensors.numpy import load_file, save_file

  tensors = load_file(weights(folder))
  change(tensors)
  save_file(tensors, weights(folder))


def test_missing_extra_and_misshapen_tensors_are_named(folder):
  edit_tensors(
    folder, lambda tensors: [tensors.pop(f"model.layers.{i}.self_attn.q_proj.bias") for i in (0, 1)]
  )
  assert refusal(folder) == (
    "2 tensor(s) missing: model.layers.0.self_attn.q_proj.bias, model.layers.1.self_attn.q_proj.bias"
  )


def test_extra_tensors_are_named(folder):
  edit_tensors(
    folder,
    lambda tensors: tensors.update(
      {"model.layers.2.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}
    ),
  )
  assert (
    refusal(folder) == "1 tensor(s) not of this architecture: model.layers.2.mlp.up_proj.weight"
  )


def test_misshapen_tensors_are_named(folder):
  edit_tensors(
    folder, lambda tensors: tensors.update({"model.norm.weight": np.zeros((32, 1), np.float32)})
  )
  assert (
    refusal(folder) == "1 tensor(s) of the wrong shape: model.norm.weight (32, 1) instead of (32,)"
  )


def test_a_transposed_matrix_is_misshapen(folder):
  edit_tensors(
    folder,
    lambda tensors: tensors.update(
      {"model.layers.0.mlp.up_proj.weight": np.zeros((32, 48), np.float32)}
    ),
  )
  assert "model.layers.0.mlp.up_proj.weight (32, 48) instead of (48, 32)" in refusal(folder)


def test_many_names_are_cut_short(folder):
  edit_tensors(
    folder, lambda tensors: tensors.update({f"x{i}": np.zeros(1, np.float32) for i in range(500)})
  )
  assert refusal(folder).startswith("500 tensor(s) not of this architecture: x0, x1,")


def test_a_tensor_name_of_many_lines_is_still_one_line(folder):
  edit_tensors(folder, lambda tensors: tensors.update({"a\nb\x1b[31m": np.zeros(1, np.float32)}))
  refusal(folder)


# Indexes.


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


def a_secret_beside(folder):
  shutil.copy(first_shard(folder), folder.parent / "secret.safetensors")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (redirect(NORM, "../secret.safetensors"), "is not the name of a file"),
    (redirect(NORM, "../../home/secret.safetensors"), "is not the name of a file"),
    (redirect(NORM, "/etc/passwd"), "safetensors"),
    (redirect(NORM, "/tmp/x.safetensors"), "is not the name of a file"),
    (redirect(NORM, "sub/../x.safetensors"), "is not the name of a file"),
    (redirect(NORM, ".."), "safetensors"),
    (redirect(NORM, ""), "safetensors"),
    (redirect(NORM, "a\0.safetensors"), "safetensors"),
    (redirect(NORM, "none.safetensors"), "none.safetensors"),
    (redirect(NORM, "pytorch_model.bin"), "reads .safetensors alone"),
    (redirect(NORM, 3), "no weight_map"),
    (redirect(NORM, ["a"]), "no weight_map"),
    (redirect("not.there", "model-00001-of-00004.safetensors"), "holds not.there"),
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
  a_secret_beside(shards)
  files = len(list(shards.glob("*.safetensors")))
  first_shard(shards).rename(shards / f"model-00001-of-{files:05d}.safetensors")
  change(shards)
  line = refusal(shards)
  assert message in line, line


def test_an_index_that_is_not_utf8(shards):
  (shards / INDEX).write_bytes(b'{"weight_map": {"\xff": "a.safetensors"}}')
  assert "is not valid JSON" in refusal(shards)


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
  message = refusal(shards)
  assert name in message and files[0].name in message and files[1].name in message


def test_the_same_tensor_in_two_files_without_an_index(folder):
  shutil.copy(weights(folder), folder / "again.safetensors")
  assert "again.safetensors" in refusal(folder)


# Links.


def move_out(file):
  outside = file.parent.parent / f"outside-{file.name}"
  file.rename(outside)
  file.symlink_to(outside)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_out_of_the_folder(name, folder):
  move_out(folder / name)
  assert f"{name}' is a link out of its folder" in refusal(folder)


@pytest.mark.parametrize("which", [INDEX, "shard"])
def test_a_link_out_of_a_sharded_folder(which, shards):
  file = first_shard(shards) if which == "shard" else shards / which
  move_out(file)
  assert f"{file.name}' is a link out of its folder" in refusal(shards)


def test_a_link_to_the_parent_by_dots(folder):
  weights(folder).rename(folder.parent / "w.safetensors")
  weights(folder).symlink_to("../w.safetensors")
  assert "a link out of its folder" in refusal(folder)


def test_a_link_that_goes_round_in_circles(folder):
  weights(folder).unlink()
  weights(folder).symlink_to("model.safetensors")
  refusal(folder)


def test_a_dangling_index_link_is_not_no_index(shards):
  (shards / INDEX).unlink()
  (shards / INDEX).symlink_to("/nowhere/index.json")
  try:
    load(
      shards, "float32"
    )  # taken for a folder without an index: all of its files are read, and they are whole
  except UserError as error:
    assert "\n" not in str(error)


def test_links_within_the_folder_and_to_it_are_fine(folder, tmp_path):
  weights(folder).rename(folder / "blob")
  weights(folder).symlink_to("blob")
  (tmp_path / "link").symlink_to(folder)
  load(tmp_path / "link", "float32")


def hub_cache(home, source, name="models--gtpo--tiny"):
  """The layout of huggingface_hub: snapshots/HASH/* are links to blobs/*."""
  store = home / name
  snapshot = store / "snapshots" / ("0" * 40)
  snapshot.mkdir(parents=True)
  (store / "blobs").mkdir()
  (store / "refs").mkdir()
  (store / "refs" / "main").write_text("0" * 40)
  for i, file in enumerate(sorted(source.iterdir())):
    shutil.copy(file, store / "blobs" / f"{i:064x}")
    (snapshot / file.name).symlink_to(f"../../blobs/{i:064x}")
  return snapshot


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_the_hubs_own_links_are_followed(shard, tmp_path):
  load(hub_cache(tmp_path, hf_folder(shard=shard)[0]), "float32")


def test_a_link_out_of_the_hubs_cache_is_refused(tmp_path):
  snapshot = hub_cache(tmp_path / "hub", hf_folder()[0])
  weights(snapshot).unlink()
  shutil.copy(hf_folder()[0] / "model.safetensors", tmp_path / "hub" / "other.safetensors")
  weights(snapshot).symlink_to("../../../other.safetensors")
  assert "a link out of its folder" in refusal(snapshot)


# Code.


class Payload:
  def __init__(self, canary):
    self.canary = canary

  def __reduce__(self):
    return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize(
  "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"]
)
def test_a_pickle_is_never_opened(name, folder):
  weights(folder).unlink()
  (folder / name).write_bytes(pickle.dumps(Payload(folder / "canary")))
  assert f"{name} is a pickle" in refusal(folder)


def test_a_pickle_that_calls_itself_safetensors(folder):
  weights(folder).write_bytes(pickle.dumps(Payload(folder / "canary")))
  assert "not a sound safetensors file" in refusal(folder)


def test_code_of_a_model_is_refused(folder):
  (folder / "modeling_evil.py").write_text(CODE.format(str(folder / "canary")))
  edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
  assert "auto_map" in refusal(folder)


def with_tokenizer(folder):
  for file in TOKENIZER_DIR.iterdir():
    shutil.copy(file, folder)
  return folder


def test_code_of_a_tokenizer_is_refused(folder):
  with_tokenizer(folder)
  (folder / "tokenization_evil.py").write_text(CODE.format(str(folder / "canary")))
  edit_json(
    folder / "tokenizer_config.json",
    auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]},
    tokenizer_class="Evil",
  )
  assert "auto_map" in refusal(folder, load_chat)


def test_code_of_a_tokenizer_named_in_the_models_config_is_not_even_asked_about(folder):
  """transformers asks on the terminal whether to run such code; a hostile pipe would say yes."""
  with_tokenizer(folder)
  canary = folder / "canary"
  (folder / "tokenization_evil.py").write_text(CODE.format(str(canary)) + "class Evil: pass\n")
  edit_json(folder / "config.json", auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]})
  edit_json(folder / "tokenizer_config.json", tokenizer_class=None)
  script = (
    "import sys; from gtpo_jax.data.chat import load_chat; from gtpo_jax.runtime.errors import UserError\n"
    "try: load_chat(sys.argv[1])\nexcept UserError as error: print('refused', error)"
  )
  done = subprocess.run(
    [sys.executable, "-c", script, folder],
    cwd=ROOT,
    input="y\n" * 9,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert not canary.exists(), done.stdout + done.stderr
  assert done.returncode == 0 and "custom code" not in done.stdout + done.stderr, (
    done.stdout + done.stderr
  )


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (lambda f: (f / "tokenizer_config.json").unlink(), "no tokenizer in"),
    (lambda f: (f / "tokenizer_config.json").write_text("["), "is not valid JSON"),
    (lambda f: (f / "tokenizer_config.json").write_text("[]"), "holds list, not an object"),
    (lambda f: (f / "tokenizer_config.json").write_text("[" * 10**5), "is not valid JSON"),
    (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot be read"),
    (lambda f: (f / "tokenizer.json").write_bytes(b"\xff\0"), "cannot be read"),
    (lambda f: (f / "generation_config.json").write_text("3"), "holds int, not an object"),
    (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "x"}'), "eos_token_id"),
    (
      lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [1, null]}'),
      "eos_token_id",
    ),
    (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": -1}'), "eos_token_id"),
  ],
  ids=[
    "missing",
    "broken",
    "list",
    "deep",
    "empty-object",
    "bytes",
    "generation-number",
    "eos-text",
    "eos-null",
    "eos-negative",
  ],
)
def test_hostile_tokenizers(spoil, message, folder):
  spoil(with_tokenizer(folder))
  assert message in refusal(folder, load_chat)


@pytest.mark.parametrize(
  "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_tokenizers_links_out_of_the_folder(name, folder):
  move_out(with_tokenizer(folder) / name)
  assert "link out of its folder" in refusal(folder, load_chat)


@pytest.mark.parametrize(("ends", "stop"), [(7, {7}), ([7, 9], {7, 9}), (None, set())])
def test_every_eos_of_generation_config_stops(ends, stop, folder):
  with_tokenizer(folder)
  (folder / "generation_config.json").unlink()
  if ends is not None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
  assert set(load_chat(folder).stop) == set(load_chat().stop) | stop


# config.json.


def config(**changes):
  return lambda folder: edit_json(folder / "config.json", **changes)


def rope(**scaling):
  return config(rope_parameters=None, rope_scaling=scaling, rope_theta=1e4)


def text(raw):
  return lambda folder: (folder / "config.json").write_bytes(
    raw.encode() if isinstance(raw, str) else raw
  )


SIZES = (
  "vocab_size",
  "hidden_size",
  "num_hidden_layers",
  "num_attention_heads",
  "num_key_value_heads",
  "intermediate_size",
)
FIELDS = (*SIZES, "head_dim", "max_position_embeddings", "rms_norm_eps")


@pytest.mark.parametrize(
  ("name", "value"),
  [
    (name, value)
    for name in FIELDS
    for value in (
      -1,
      "2",
      True,
      [2],
      {"a": 1},
      float("nan"),
      *([2.5] if name != "rms_norm_eps" else []),
    )
  ]
  + [
    ("head_dim", 8.0),
    ("num_key_value_heads", 2.0),
    ("num_key_value_heads", False),
    ("head_dim", 0),
  ],
  ids=lambda value: value if str(value) in FIELDS else repr(value),
)
def test_sizes_of_the_wrong_kind(name, value, folder):
  config(**{name: value})(folder)
  refusal(folder)


@pytest.mark.parametrize(
  "name",
  [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
  ],
)
def test_sizes_that_are_missing_or_zero(name, folder):
  config(**{name: None})(folder)
  assert f"has {name} = None" in refusal(folder)
  if name != "rms_norm_eps":
    config(**{name: 0})(folder)
    assert "at least 1, got 0" in refusal(folder)


def test_a_billion_layers_are_refused_before_they_are_listed(folder):
  config(num_hidden_layers=10**9)(folder)

  def too_long(*_):
    raise TimeoutError("still listing")

  before = signal.signal(signal.SIGALRM, too_long)
  signal.setitimer(signal.ITIMER_REAL, 2)
  try:
    assert "num_hidden_layers" in refusal(folder) or "missing" in refusal(folder)
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (config(model_type="llama"), "of model_type 'llama'"),
    (config(model_type=None), "of model_type None"),
    (config(model_type="qwen2_moe"), "'qwen2_moe'"),
    (config(model_type=["qwen2"]), "['qwen2']"),
    (config(use_sliding_window=True), "use_sliding_window = True"),
    (config(hidden_act="gelu"), "hidden_act = 'gelu'"),
    (config(layer_types=["sliding_attention"] * 2), "layer_types"),
    (config(num_attention_heads=5, num_key_value_heads=5), "wrong shape"),
    (config(num_key_value_heads=3), "multiple of"),
    (config(hidden_size=33), "wrong shape"),
    (config(head_dim=7), "even"),
    (config(tie_word_embeddings=False), "lm_head.weight"),
    (config(tie_word_embeddings="false"), "tie_word_embeddings"),
    (rope(type="linear", factor=2.0), "'linear'"),
    (rope(rope_type="dynamic", factor=2.0), "'dynamic'"),
    (rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0), "'llama3'"),
    (rope(rope_type="longrope"), "'longrope'"),
    (config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "'linear'"),
    (rope(rope_type=["yarn"]), "RoPE"),
    (rope(type="yarn"), "YaRN without a factor"),
    (rope(type="yarn", factor="4"), "factor = '4'"),
    (rope(type="yarn", factor=4.0, mscale=0.7), "mscale"),
    (rope(type="yarn", factor=0.5), "YaRN needs"),
    (rope(type="yarn", factor=4.0, beta_fast="x"), "beta_fast"),
    (rope(type="yarn", factor=4.0, attention_factor="x"), "attention_factor"),
    (rope(type="yarn", factor=4.0, original_max_position_embeddings="x"), "original"),
    (rope(type="yarn", factor=float("inf")), "YaRN"),
    (config(rope_parameters=None, rope_theta="1e4"), "rope_theta"),
    (config(rope_parameters=None, rope_theta=-1), "rope_theta"),
    (config(rope_parameters=None, rope_theta=float("nan")), "rope_theta"),
    (rope(type="yarn", factor=4.0, attention_factor=0), "YaRN needs"),
    (rope(type="yarn", factor=4.0, truncate=False), "truncate = False"),
    (rope(type="yarn", factor=4.0, partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    (config(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    (
      config(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
      ),
      "partial_rotary_factor = 0.25",
    ),
    (
      config(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
      "for 'default': full_attention",
    ),
    (rope(factor=4.0), "for 'default': factor"),
    (rope(type="yarn", factor=4.0, rope_theta=7.0), "several rope_theta: 10000.0, 7.0"),
    (config(rope_theta=5e5), "several rope_theta: 500000.0, 10000.0"),
    (config(rope_parameters=None, rope_theta=0), "rope_theta = 0.0"),
    (config(rope_parameters=None, rope_theta=False), "rope_theta = False"),
    (config(quantization_config={"quant_method": "gptq", "bits": 4}), "computes models without it"),
    (config(dual_chunk_attention_config={"chunk_size": 262144}), "dual_chunk_attention_config"),
    (config(rope_scaling=[1]), "rope_scaling"),
    (config(rope_parameters="yarn"), "rope_parameters"),
    (text("[]"), "holds list, not an object"),
    (text("3"), "holds int, not an object"),
    (text("null"), "not an object"),
    (text("{"), "is not valid JSON"),
    (text(""), "is not valid JSON"),
    (text(b"\xff\xfe{}"), "is not valid JSON"),
    (text('{"a":' * 10**5), "is not valid JSON"),
    (text("[" * 10**5), "is not valid JSON"),
    (text('{"model_type": "qwen2", "vocab_size": ' + "9" * 10**4 + "}"), "is not valid JSON"),
  ],
  ids=lambda value: value.replace(" ", "-")[:40] if isinstance(value, str) else "",
)
def test_architectures_that_are_not_computed(change, message, folder):
  change(folder)
  line = refusal(folder)
  assert message in line, line


@pytest.mark.parametrize(
  "raw",
  ["3", "null", "[]", "true", '"model_type"', "[" * 10**5, "{", "\0"],
  ids=lambda raw: raw[:12],
)
def test_whether_a_folder_is_hugging_faces_never_raises(raw, folder):
  text(raw)(folder)
  assert is_hf_folder(folder) is False


# No folder at all.


def test_an_empty_folder(tmp_path):
  (tmp_path / "home" / "hf").mkdir(parents=True)
  assert "no config.json in" in refusal(tmp_path / "home" / "hf")


def test_no_weights(folder):
  weights(folder).unlink()
  assert refusal(folder) == f"no safetensors in {str(folder)!r}"


def test_a_folder_in_place_of_a_file(folder):
  (folder / "config.json").unlink()
  (folder / "config.json").mkdir()
  assert "config.json" in refusal(folder)
  shutil.rmtree(folder / "config.json")
  shutil.copy(hf_folder()[0] / "config.json", folder)
  weights(folder).unlink()
  weights(folder).mkdir()
  assert "not a sound safetensors file" in refusal(folder)


@pytest.mark.parametrize(
  "name",
  [
    "setup.py",
    "no/such/folder",
    "/nowhere",
    "",
    " ",
    "a b/c",
    "../../x",
    "a/b\0",
    "x" * 5000,
    "https://hf.co/a/b",
  ],
  ids=lambda name: name[:20],
)
def test_names_of_nothing(name):
  with pytest.raises(UserError) as caught:
    load(name)
  assert "\n" not in str(caught.value) and ("no folder at" in str(caught.value) or not name)


HUB = """
import sys, time
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.models import load
began = time.perf_counter()
try:
  load("gtpo/nowhere")
except UserError as error:
  print("refused:", error)
print("quick" if time.perf_counter() - began < 10 else "slow")
model, params = load("gtpo/tiny", "float32")
print("loaded", model.config.width)
"""


def test_a_hub_id_is_read_from_the_cache_and_else_is_one_line(tmp_path):
  hub_cache(tmp_path / "hub", hf_folder()[0])
  before = contents(tmp_path / "hub" / "models--gtpo--tiny")
  environment = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(tmp_path),
    "JAX_NUM_CPU_DEVICES": "1",
  }
  environment.pop("HF_HUB_CACHE", None)
  done = subprocess.run(
    [sys.executable, "-c", HUB],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert len(lines) == 3 and lines[1:] == ["quick", "loaded 32"] and done.stderr == "", done
  assert lines[0].startswith("refused: 'gtpo/nowhere' is neither a folder here nor cached")
  assert contents(tmp_path / "hub" / "models--gtpo--tiny") == before


def test_there_is_no_way_to_run_code_in_the_source():
  for file in (ROOT / "gtpo_jax").rglob("*.py"):
    source = file.read_text()
    for word in (
      "trust_remote_code",
      "pickle.load",
      "torch.load",
      "import pickle",
      "allow_pickle=True",
    ):
      assert word not in source, file
