"""What a model folder says is understood as Transformers understands it, named, or refused."""

import dataclasses
import functools
import json
import math
import random
import shutil
import signal

import numpy as np
import pytest
from family_cases import FAMILY_CASES
from hf_folders import edit_json, hf_folder, our_logits, padded_batch, torch_logits
from hostile import MAX_MESSAGE, rejection

from gtpo_jax.data.chat import TOKENIZER_DIR, load_chat
from gtpo_jax.models import load
from gtpo_jax.models.families import FAMILIES
from gtpo_jax.models.hf.config_json import describe_unused_keys, read_config
from gtpo_jax.models.hf.json_values import unused_keys
from gtpo_jax.runtime.errors import UserError


def transformers_logits(folder):
  """Returns the logits of the folder in transformers; None if it refuses the folder."""
  import transformers

  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  loaded = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, folder)
  try:
    model = loaded(dtype="float32", attn_implementation="eager").eval()
    return torch_logits(model, *padded_batch())
  except Exception:
    return None


@functools.cache
def logits_of(folder, config):
  """Returns our logits of a folder. Folders with equal configs have equal weights here."""
  del config
  return our_logits(*load(folder, "float32"), *padded_batch())


def assert_same(ours, theirs, message=""):
  mask = padded_batch()[1]
  np.testing.assert_allclose(ours[mask], theirs[mask], rtol=2e-3, atol=2e-4, err_msg=message)


def test_a_head_that_is_tied_must_be_a_copy_of_the_embedding(folder, capfd):
  from safetensors.numpy import load_file, save_file

  tensors = load_file(folder / "model.safetensors")
  embedding = tensors["model.embed_tokens.weight"]
  save_file(tensors | {"lm_head.weight": embedding.copy()}, folder / "model.safetensors")
  assert_same(our_logits(*load(folder, "float32"), *padded_batch()), transformers_logits(folder))
  assert capfd.readouterr().err == ""
  save_file(tensors | {"lm_head.weight": embedding[::-1].copy()}, folder / "model.safetensors")
  assert "lm_head.weight is not a copy of model.embed_tokens.weight" in rejection(folder)
  theirs = transformers_logits(folder)
  edit_json(folder / "config.json", tie_word_embeddings=False)  # as the message says
  assert_same(our_logits(*load(folder, "float32"), *padded_batch()), theirs)


def test_every_setting_of_transformers_is_known():
  """The fields of its configs, and what it writes for every family. There is no false line."""
  pytest.importorskip("torch", reason="Transformers has these classes only with torch")
  transformers = pytest.importorskip("transformers")
  for name, family in FAMILIES.items():
    kind = getattr(transformers, family.architecture).config_class
    fields = {field.name: "x" for field in dataclasses.fields(kind)}
    assert unused_keys(fields, family) == [], name
  for name, changes in FAMILY_CASES.items():
    assert describe_unused_keys(hf_folder(**changes)[0]) == "", name


def test_what_is_not_used_is_named_once(shards, capfd):
  changes = {"logit_scale": 2.0, "mlp_bias": True, "num_experts": 8}
  edit_json(shards / "config.json", **changes, unknown=None, use_cache=False)
  stale = sorted(shards.glob("*.safetensors"))[0]
  shutil.copy(stale, shards / "stale.safetensors")
  for _ in range(2):
    load(shards, "float32")
  config = f"gtpo: {str(shards / 'config.json')!r} has 3 key(s) that are not used"
  assert capfd.readouterr().err.splitlines() == [
    f"{config}: logit_scale, mlp_bias, num_experts",
    f"gtpo: {str(shards)!r} has 1 file(s) that model.safetensors.index.json does not list: "
    "stale.safetensors",
  ]
  shutil.copy(stale, shards / "model.safetensors")
  assert "has model.safetensors and model.safetensors.index.json" in rejection(shards)


# --- random changes of config.json ---

WRONG_TYPES = ("x", "", [1], {"a": 1}, True, 2.5, None, {}, [])
NUMBERS = (0, -1, 1, 3, 2**31, 10**9, 2**70, 10**400, 1e39, 1e-39, -0.5, math.nan, math.inf, 7.5)
SMALL = (2, 4, 8, 16, 64, 100)


def mutate(values, draw):
  """Changes one key of a config.json, or of an object in it. Returns the keys that lead to it."""
  key = draw.choice([*sorted(values), "unknown_key"])
  value = values.get(key)
  if isinstance(value, dict) and value and draw.random() < 0.7:
    return [key, *mutate(value, draw)]
  kind = draw.choice(("delete", "type", "number", "number", "near", "length"))
  if kind == "delete" and key in values:
    del values[key]
  elif kind == "length" and isinstance(value, list):
    values[key] = draw.choice((value[:-1], value * 2, [*value, "full_attention"]))
  elif kind == "near" and isinstance(value, int | float):
    values[key] = draw.choice((value * 2, value + 1, not value, *SMALL))
  elif kind == "type":
    values[key] = draw.choice(WRONG_TYPES)
  else:
    values[key] = draw.choice(NUMBERS)
  return [key]


def accepted_form(original, values, keys):
  """Returns a config.json that Transformers accepts and that must mean the same as `values`.

  Transformers refuses integers as floats, and wrong values of settings without effect.
  """
  first, *rest = keys
  if rest:
    return original | {first: accepted_form(original[first], values[first], rest)}
  floats = ("rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor")
  if first in floats and values.get(first) is not None:
    return original | {first: float(values[first])}
  if first == "pad_token_id":  # without it, SmolLM3 pads with an id beyond a small vocabulary
    return original | {first: None}
  return {key: value for key, value in original.items() if key != first}


def check_mutation(folder, original, draw):
  """Checks that a changed folder is refused in a line that names the key, or read correctly.

  If Transformers refuses what is read here, `accepted_form` says what it means.
  """
  values = json.loads(original)
  keys = mutate(values, draw)
  key = keys[-1]
  change = f"{key}: {values}"
  (folder / "config.json").write_text(json.dumps(values))
  load_chat(folder)  # does not read the sizes
  try:
    config = read_config(folder, "float32")
    ours = logits_of(folder, config)
  except UserError as error:
    message = str(error)
    assert "\n" not in message and len(message) < MAX_MESSAGE, change
    assert key in message or (key == "rope_type" and "RoPE" in message), (change, message)
    return False
  theirs = transformers_logits(folder)
  if theirs is None:
    accepted = accepted_form(json.loads(original), values, keys)
    (folder / "config.json").write_text(json.dumps(accepted))
    theirs = transformers_logits(folder)
  assert theirs is not None, change
  assert_same(ours, theirs, change)
  known = keys != ["unknown_key"] or values.get(key) is None
  (folder / "config.json").write_text(json.dumps(values))
  assert known or f": {key}" in describe_unused_keys(folder), change
  return True


@pytest.mark.parametrize(
  ("name", "count"),
  [
    ("qwen2", 10),
    *(pytest.param(name, 10, marks=pytest.mark.slow) for name in FAMILY_CASES if name != "qwen2"),
    *(pytest.param(name, 200, marks=pytest.mark.manual) for name in FAMILY_CASES),
  ],
)
def test_a_changed_config_is_read_as_by_transformers_or_refused_by_name(name, count, tmp_path):
  folder = tmp_path / "hf"
  shutil.copytree(hf_folder(**FAMILY_CASES[name])[0], folder)
  shutil.copytree(TOKENIZER_DIR, folder, dirs_exist_ok=True)
  original = (folder / "config.json").read_text()

  def too_long(*_):
    raise TimeoutError("no answer")

  before = signal.signal(signal.SIGALRM, too_long)
  accepted = 0
  try:
    for seed in range(count):
      signal.setitimer(signal.ITIMER_REAL, 60)
      accepted += check_mutation(folder, original, random.Random(f"{name} {count} {seed}"))
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    logits_of.cache_clear()
  assert min(accepted, count - accepted) >= count // 10
