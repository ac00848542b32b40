"""config.json: unsupported architectures and wrong values are rejected in one line."""

import shutil
import signal

import pytest
from hf_folders import edit_json
from hostile import rejection

from gtpo_jax.data.chat import TOKENIZER_DIR, load_chat
from gtpo_jax.models.hf.folder import is_hf_folder


def config(**changes):
  if "model_type" in changes:
    changes = {"architectures": None} | changes
  return lambda folder: edit_json(folder / "config.json", **changes)


def rope(**scaling):
  return config(rope_parameters=None, rope_scaling=scaling, rope_theta=1e4)


def text(raw):
  return lambda folder: (folder / "config.json").write_bytes(
    raw.encode() if isinstance(raw, str) else raw
  )


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
    assert f"has {name} = 0; it must be from 1 to" in rejection(folder)


def test_absurd_sizes_are_rejected_before_anything_is_built(folder):
  """By the architecture, and without asking Transformers, which builds a list of the layers."""

  def too_long(*_):
    raise TimeoutError("still listing")

  before = signal.signal(signal.SIGALRM, too_long)
  signal.setitimer(signal.ITIMER_REAL, 20)
  try:
    shutil.copytree(TOKENIZER_DIR, folder, dirs_exist_ok=True)
    original = (folder / "config.json").read_bytes()
    for name in (*SIZES, "head_dim", "max_position_embeddings"):
      for value in (2**31, 2**70, 10**400):
        config(**{name: value})(folder)
        assert f"has {name} = {value}"[:60] in rejection(folder)
        load_chat(folder)
        (folder / "config.json").write_bytes(original)
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_sizes_that_are_not_those_of_the_tensors_are_named(folder):
  original = (folder / "config.json").read_bytes()
  for changes, message in (
    ({"num_hidden_layers": 3}, "num_hidden_layers = 3, but there are tensors of 2 layers"),
    ({"num_hidden_layers": 1}, "num_hidden_layers = 1, but there are tensors of 2 layers"),
    ({"vocab_size": 65}, "vocab_size = 65, but model.embed_tokens.weight has the shape (64, 32)"),
    ({"hidden_size": 64}, "hidden_size = 64, but model.embed_tokens.weight has the shape (64, 32)"),
    ({"num_attention_heads": 8}, "num_attention_heads * head_dim = 64, but model.layers.0.self_a"),
    ({"num_key_value_heads": 1}, "num_key_value_heads * head_dim = 8, but model.layers.0.self_a"),
    ({"intermediate_size": 2**24}, "intermediate_size = 16777216, but model.layers.0.mlp.gate_p"),
  ):
    config(head_dim=8, layer_types=None, **changes)(folder)
    assert message in rejection(folder)
    (folder / "config.json").write_bytes(original)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      config(model_type="gemma2"),
      "'gemma2'; not supported: soft-capping of attention scores and lo",
    ),
    (config(model_type="gpt_oss", num_local_experts=8), "not supported: attention sinks"),
    (config(model_type="gemma4", text_config={}), "not supported: per-layer embeddings"),
    (config(model_type="phi3"), "not supported: LongRoPE, and projections"),
    (
      config(model_type="gpt2"),
      "has model_type 'gpt2'; supported are qwen2, qwen3, llama, mistral",
    ),
    (config(model_type="gemma3"), "text_config = None; it must be an object"),
    (config(model_type="gemma3_text", hidden_activation="silu"), "hidden_activation = 'silu'"),
    (config(model_type="gemma3_text", attn_logit_softcapping=50.0), "attn_logit_softcapping = 50"),
    (config(model_type="gemma3_text", use_bidirectional_attention=True), "bidirectional_attention"),
    (
      config(model_type="gemma3_text", hidden_act=None, rope_parameters={"rope_type": "default"}),
      "for full_attenti",
    ),
    (
      config(
        model_type="gemma3_text", hidden_act=None, rope_parameters=None, sliding_window_pattern=0
      ),
      "from 1",
    ),
    (config(model_type="smollm3", no_rope_layers=[1]), "there must be 0 or 1 for each of the 2"),
    (config(model_type="llama"), "not of this architecture"),  # the folder has biases
    (config(model_type=None), "has model_type None"),
    (config(model_type="mixtral", num_local_experts=8), "'mixtral'; other mixtures of experts are"),
    (config(model_type="mistral3", text_config={}), "'mistral3'; models of several modalities"),
    (config(model_type=["qwen2"]), "['qwen2']"),
    (config(model_type="mistral", layer_types=None, sliding_window="x"), "sliding_window = 'x'"),
    (config(model_type="mistral", sliding_window=64), "layer_types, but a sliding_window for all"),
    (config(model_type="llama", attention_bias=1), "attention_bias = 1; it must be true or false"),
    (config(model_type="llama", mlp_bias="no"), "mlp_bias = 'no'; it must be true or false"),
    (config(model_type="llama", rope_interleaved=True), "rope_interleaved = True"),
    (config(model_type="qwen3", head_dim=8), "missing: model.layers.0.self_attn.k_norm.weight"),
    (config(use_sliding_window=True), "use_sliding_window = True"),
    (config(hidden_act="gelu"), "hidden_act = 'gelu'"),
    (config(layer_types=["sliding_attention"] * 2), "supported for qwen2 are full_attention"),
    (config(layer_types=["full_attention"] * 3), "3 layer_types for num_hidden_layers = 2"),
    (config(layer_types=[]), "0 layer_types for num_hidden_layers = 2"),
    (config(rms_norm_eps=1e-39), "rms_norm_eps = 1e-39; it must be 0 or from 1e-30 to 1e+15"),
    (config(rms_norm_eps=10**400), "rms_norm_eps = 1000"),
    (config(per_layer_config={"0": {"head_dim": 4}}), "per_layer_config"),
    (config(use_sliding_window=0), "use_sliding_window = 0; only False is supported"),
    (
      config(
        rope_parameters={"rope_theta": 1e6}, rope_scaling={"rope_type": "yarn", "factor": 4.0}
      ),
      "rope_parameters and rope_scaling, which differ",
    ),
    (
      config(
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
        original_max_position_embeddings=64,
      ),
      "original_max_position_embeddings outside the RoPE scaling",
    ),
    (
      config(num_attention_heads=5, num_key_value_heads=5),
      "= 32, which is not a multiple of num_a",
    ),
    (config(num_key_value_heads=3), "= 4, which is not a multiple of num_key_value_heads = 3"),
    (config(hidden_size=33), "hidden_size = 33, which is not a multiple of num_attention_heads"),
    (config(head_dim=7), "even"),
    (config(tie_word_embeddings=False), "lm_head.weight"),
    (config(tie_word_embeddings="false"), "tie_word_embeddings"),
    (rope(type="linear", factor=0.5), "the linear RoPE scaling needs a finite factor >= 1"),
    (rope(rope_type="dynamic", factor=2.0), "'dynamic'"),
    (
      rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0),
      "'llama3' without high_freq_factor",
    ),
    (rope(rope_type="llama3", low_freq_factor=4.0, **LLAMA3), "llama3 RoPE scaling needs"),
    (rope(rope_type="llama3", low_freq_factor=1.0, beta_fast=2, **LLAMA3), "'llama3': beta_fast"),
    (rope(rope_type="longrope"), "'longrope'"),
    (config(rope_parameters={"rope_type": "ntk", "factor": 2.0, "rope_theta": 1e4}), "'ntk'"),
    (rope(rope_type=["yarn"]), "RoPE"),
    (rope(type="yarn"), "'yarn' without factor"),
    (rope(type="yarn", factor="4"), "factor = '4'"),
    (rope(type="yarn", factor=4.0, mscale=0.7), "mscale"),
    (rope(type="yarn", factor=0.5), "YaRN needs"),
    (rope(type="yarn", factor=4.0, beta_fast="x"), "beta_fast"),
    (rope(type="yarn", factor=4.0, attention_factor="x"), "attention_factor"),
    (rope(type="yarn", factor=4.0, original_max_position_embeddings="x"), "original"),
    (rope(type="yarn", factor=float("inf")), "factor = inf; it must be above 0 and finite"),
    (config(rope_parameters=None, rope_theta="1e4"), "rope_theta"),
    (config(rope_parameters=None, rope_theta=-1), "rope_theta"),
    (config(rope_parameters=None, rope_theta=float("nan")), "rope_theta"),
    (rope(type="yarn", factor=4.0, attention_factor=0), "attention_factor = 0; it must be ab"),
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
    (config(rope_parameters=None, rope_theta=0), "rope_theta = 0; it must be above 1 and finite"),
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
