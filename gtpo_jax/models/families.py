"""The model families that the transformer covers, by the `model_type` of their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ATTENTION = ("q", "k", "v", "o")
MLP = ("gate", "up", "down")
MATRICES = ATTENTION + MLP
# Settings of mixtures of experts that need no default.
MIXTURE_KEYS = ("num_local_experts", "norm_topk_prob", "mlp_only_layers")


class Family(NamedTuple):
  """The features that the models of one `model_type` share."""

  architecture: str  # the class in Transformers
  defaults: Mapping[str, Any] = {}  # the values of keys that config.json may leave out
  # further settings of an export, for example to turn sliding windows off
  settings: Mapping[str, Any] = {}
  # whether queries and keys are normalised, per "head" or over their "width"; "" if not
  qk_norm: str = ""
  pre_norms: bool = True  # whether attention and MLP read a normalised residual stream
  post_norms: bool = False  # whether their outputs are normalised before they are added to it
  # whether the scale of a norm is stored without the 1 that it is added to
  centred_norms: bool = False
  # Hugging Face names of modules within a layer, where they differ from the common ones
  modules: Mapping[str, str] = {}
  activation: str = "silu"  # of the gated MLP, by its name in Transformers
  activation_key: str = "hidden_act"  # the key of config.json that names it
  # whether embeddings are multiplied by the square root of the width
  scaled_embedding: bool = False
  biases: tuple[str, ...] = ()  # the matrices that always have a bias
  # by setting of config.json, the matrices that have a bias if it is true
  optional_biases: Mapping[str, tuple[str, ...]] = {}
  # if config.json has no `layer_types`, each layer whose number is a multiple of this attends to
  # all positions, and the others are `others`; 0 if no layer does
  full_interval: int = 1
  # what layers are that do not attend to all positions: attention to a "window", or "delta" for
  # gated delta nets
  others: str = "window"
  interval_key: str = ""  # the key of config.json for another `full_interval`; "" if there is none
  # whether attention's output is multiplied by a gate, which `q` computes too
  output_gate: bool = False
  # the share of the features of a head that are rotated, if config.json has none; None if all are
  rope_share: float | None = None
  # the key of the base of the rotary angles within windows, which are not scaled; "" if all
  # layers have the same angles
  local_theta: str = ""
  # if config.json has no `no_rope_layers`, each layer whose number is a multiple of this has no
  # rotary angles; 0 if all layers have them
  no_rope_interval: int = 0
  expert_mlp: str = ""  # the key of the features of an expert; "" if all MLPs are dense
  shared_mlp: str = ""  # the key of the features of a shared expert; "" if there is none
  keys: tuple[str, ...] = ()  # keys of config.json that only this family has
  # the settings of config.json that must have one value, if they are there
  required: Mapping[str, Any] = {}
  # keys of config.json that change nothing here, and that exports keep from their source
  carried: tuple[str, ...] = ()
  # what the names of tensors begin with that are not loaded, and that exports keep
  untrained: tuple[str, ...] = ()
  rope_theta: float = 1e4  # the base of the rotary angles if config.json has none

  @property
  def has_windows(self) -> bool:
    """Whether layers of this family may attend to a window only."""
    return self.full_interval != 1 and self.others == "window"

  @property
  def has_delta(self) -> bool:
    """Whether layers of this family may be gated delta nets."""
    return self.others == "delta"

  @property
  def known_keys(self) -> set[str]:
    """The keys of config.json that are read for models of this family only."""
    names = {*self.defaults, *self.optional_biases, *self.keys, *self.required, *self.carried}
    return names | set(filter(None, (self.activation_key, self.local_theta, self.interval_key)))


# Transformers has ids of the published tokenizers as defaults of these families.
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# OLMo 2 and 3 normalise the outputs of attention and MLP, not their inputs.
_OLMO = {
  "settings": _NO_TOKENS,
  "qk_norm": "width",
  "pre_norms": False,
  "post_norms": True,
  "optional_biases": {"attention_bias": ATTENTION},
}
FAMILIES = {
  "qwen2": Family(  # Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen
    "Qwen2ForCausalLM",
    {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    {"use_sliding_window": False},
    biases=("q", "k", "v"),
  ),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    {"use_sliding_window": False},
    qk_norm="head",
    optional_biases={"attention_bias": ATTENTION},
  ),
  "llama": Family(  # Llama 3, DeepSeek-R1-Distill-Llama, SmolLM2
    "LlamaForCausalLM",
    {"max_position_embeddings": 2048},
    optional_biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
  ),
  "mistral": Family(
    "MistralForCausalLM",
    {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    full_interval=0,
  ),
  "smollm3": Family(
    "SmolLM3ForCausalLM",
    {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    {"use_sliding_window": False, **_NO_TOKENS},
    optional_biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
    no_rope_interval=4,
    rope_theta=2e6,
    keys=("no_rope_layers", "no_rope_layer_interval"),
  ),
  "olmo2": Family("Olmo2ForCausalLM", {"max_position_embeddings": 2048}, **_OLMO),
  "olmo3": Family(
    "Olmo3ForCausalLM",
    {"max_position_embeddings": 2048, "sliding_window": 4096},
    full_interval=4,
    local_theta="rope_theta",
    rope_theta=5e5,
    **_OLMO,
  ),
  "gemma3_text": Family(
    "Gemma3ForCausalLM",
    {
      "vocab_size": 262208,
      "hidden_size": 2304,
      "intermediate_size": 9216,
      "num_hidden_layers": 26,
      "num_attention_heads": 8,
      "num_key_value_heads": 4,
      "head_dim": 256,
      "query_pre_attn_scalar": 256,
      "sliding_window": 4096,
      "max_position_embeddings": 131072,
      "rms_norm_eps": 1e-6,
      "tie_word_embeddings": True,
    },
    _NO_TOKENS,
    qk_norm="head",
    post_norms=True,
    centred_norms=True,
    modules={"mlp_norm": "pre_feedforward_layernorm"},
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    scaled_embedding=True,
    optional_biases={"attention_bias": ATTENTION},
    full_interval=6,
    local_theta="rope_local_base_freq",
    rope_theta=1e6,
    interval_key="sliding_window_pattern",
    keys=("_sliding_window_pattern",),
  ),
  "qwen3_5_text": Family(
    "Qwen3_5ForCausalLM",
    {
      "vocab_size": 248320,
      "hidden_size": 4096,
      "intermediate_size": 12288,
      "num_hidden_layers": 32,
      "num_attention_heads": 16,
      "num_key_value_heads": 4,
      "head_dim": 256,
      "max_position_embeddings": 32768,
      "rms_norm_eps": 1e-6,
      "linear_conv_kernel_dim": 4,
      "linear_key_head_dim": 128,
      "linear_value_head_dim": 128,
      "linear_num_key_heads": 16,
      "linear_num_value_heads": 32,
    },
    _NO_TOKENS,
    qk_norm="head",
    centred_norms=True,
    optional_biases={"attention_bias": ATTENTION},
    full_interval=4,
    others="delta",
    interval_key="full_attention_interval",
    output_gate=True,
    rope_share=0.25,
    required={"attn_output_gate": True, "mlp_only_layers": []},
    # Of the head that predicts several tokens, and of programs that run the model.
    carried=("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"),
    untrained=("mtp.", "model.visual."),
  ),
  "qwen3_moe": Family(
    "Qwen3MoeForCausalLM",
    {
      "num_key_value_heads": 4,
      "head_dim": 128,
      "max_position_embeddings": 32768,
      "num_experts": 128,
      "num_experts_per_tok": 8,
      "moe_intermediate_size": 768,
      "decoder_sparse_step": 1,
    },
    {"use_sliding_window": False},
    qk_norm="head",
    optional_biases={"attention_bias": ATTENTION},
    expert_mlp="moe_intermediate_size",
    keys=MIXTURE_KEYS,
  ),
  "qwen2_moe": Family(  # Qwen1.5-MoE, Qwen2-57B-A14B
    "Qwen2MoeForCausalLM",
    {
      "num_key_value_heads": 16,
      "max_position_embeddings": 32768,
      "qkv_bias": True,
      "num_experts": 60,
      "num_experts_per_tok": 4,
      "moe_intermediate_size": 1408,
      "shared_expert_intermediate_size": 5632,
      "decoder_sparse_step": 1,
    },
    {"use_sliding_window": False},
    optional_biases={"qkv_bias": ATTENTION[:3]},
    expert_mlp="moe_intermediate_size",
    shared_mlp="shared_expert_intermediate_size",
    keys=MIXTURE_KEYS,
  ),
  "olmoe": Family(
    "OlmoeForCausalLM",
    {"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
    _NO_TOKENS,
    qk_norm="width",
    optional_biases={"attention_bias": ATTENTION},
    expert_mlp="intermediate_size",
    keys=("num_local_experts", "norm_topk_prob", "clip_qkv"),
  ),
}

# Models with other parts than text, and the family of their text model, in `text_config`.
MULTIMODAL = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}

# Architectures that people ask for, and the missing features that they need.
NOT_COVERED = {
  "gemma2": "soft-capping of attention scores and logits",
  "gemma3n": "per-layer embeddings, sparse MLPs and shared keys and values",
  "gemma3n_text": "per-layer embeddings, sparse MLPs and shared keys and values",
  "gemma4": "per-layer embeddings, heads of two widths and shared keys and values",
  "gemma4_text": "per-layer embeddings, heads of two widths and shared keys and values",
  "gpt_oss": "attention sinks, experts with biases and MXFP4 weights",
  "qwen3_next": "gated delta nets beside mixtures of experts, and other layouts of their weights",
  "qwen3_5_moe": "gated delta nets beside mixtures of experts",
  "qwen3_5_moe_text": "gated delta nets beside mixtures of experts",
  "phi3": "LongRoPE, and projections stored as one matrix",
}
