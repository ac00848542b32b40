"""config.json: unsupported architectures and wrong values are rejected in one line."""

import signal

import pytest
from hf_folders import edit_json
from hostile import rejection

from gtpo_jax.models.hf.folder import is_hf_folder


def config(**changes):
  return lambda folder: edit_json(folder / "config.json", **changes)


def rope(**scaling):
  return config(rope_parameters=None, rope_scaling=scaling, rope_theta=1e4)


def text(raw):
  return lambda folder: (folder / "config.json").write_bytes(
    raw.encode() if isinstance(raw, str) else raw
  )


MISTRAL = {"model_type": "mistral", "max_position_embeddings": 8192}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0}
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
  rejection(folder)


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
  assert f"has {name} = None" in rejection(folder)
  if name != "rms_norm_eps":
    config(**{name: 0})(folder)
    assert "at least 1, got 0" in rejection(folder)


def test_a_billion_layers_are_rejected_before_they_are_listed(folder):
  config(num_hidden_layers=10**9)(folder)

  def too_long(*_):
    raise TimeoutError("still listing")

  before = signal.signal(signal.SIGALRM, too_long)
  signal.setitimer(signal.ITIMER_REAL, 2)
  try:
    assert "num_hidden_layers" in rejection(folder) or "missing" in rejection(folder)
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
  "name", ["vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "head_dim"]
)
def test_sizes_beyond_the_tensors_are_rejected_before_anything_is_built(name, folder):
  config(num_key_value_heads=1, head_dim=8)(folder)
  config(**{name: 2**70})(folder)
  assert f"{name} = {2**70}, but the tensors hold" in rejection(folder)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (config(model_type="gemma2"), "has model_type 'gemma2'; supported are qwen2, qwen3, llama, m"),
    (config(model_type="llama"), "not of this architecture"),  # the folder has biases
    (config(model_type=None), "has model_type None"),
    (config(model_type="qwen3_moe", num_experts=128), "'qwen3_moe'; mixtures of experts are not"),
    (config(model_type="mixtral", num_local_experts=8), "'mixtral'; mixtures of experts are not"),
    (config(model_type="mistral3", text_config={}), "'mistral3'; models of several modalities"),
    (config(model_type=["qwen2"]), "['qwen2']"),
    (config(**MISTRAL), "a sliding window (sliding_window = 4096) below its context of 8192"),
    (config(model_type="mistral", sliding_window=64), "(sliding_window = 64) below its context"),
    (config(model_type="mistral", sliding_window="x"), "(sliding_window = 'x')"),
    (config(model_type="llama", attention_bias=1), "attention_bias = 1; it must be true or false"),
    (config(model_type="llama", mlp_bias="no"), "mlp_bias = 'no'; it must be true or false"),
    (config(model_type="llama", rope_interleaved=True), "rope_interleaved = True"),
    (config(model_type="qwen3", head_dim=8), "missing: model.layers.0.self_attn.k_norm.weight"),
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
    (
      rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0),
      "'llama3' without high_freq_factor",
    ),
    (rope(rope_type="llama3", low_freq_factor=4.0, **LLAMA3), "llama3 RoPE scaling needs"),
    (rope(rope_type="llama3", low_freq_factor=1.0, beta_fast=2, **LLAMA3), "'llama3': beta_fast"),
    (rope(rope_type="longrope"), "'longrope'"),
    (config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "'linear'"),
    (rope(rope_type=["yarn"]), "RoPE"),
    (rope(type="yarn"), "'yarn' without factor"),
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
    (
      config(quantization_config={"quant_method": "gptq", "bits": 4}),
      "only models without it are supported",
    ),
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
def test_unsupported_architectures(change, message, folder):
  change(folder)
  line = rejection(folder)
  assert message in line, line


@pytest.mark.parametrize(
  "raw",
  ["3", "null", "[]", "true", '"model_type"', "[" * 10**5, "{", "\0"],
  ids=lambda raw: raw[:12],
)
def test_is_hf_folder_never_raises(raw, folder):
  text(raw)(folder)
  assert is_hf_folder(folder) is False
