"""Small models of every family, as settings of Transformers' configs."""

LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 64,
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WIDE = {"hidden_size": 64, **NO_TOKENS}  # heads of 16, as the kernels for pages need
FAMILY_CASES = {
  "qwen2": {},
  "qwen2-untied": {"tie_word_embeddings": False},
  "qwen3": {"model_type": "qwen3", "head_dim": 16},
  "qwen3-biases": {
    "model_type": "qwen3",
    "head_dim": 8,
    "attention_bias": True,
    "tie_word_embeddings": False,
  },
  "llama": {"model_type": "llama", "rope_parameters": {"rope_theta": 100.0, **LLAMA3}},
  "llama-untied": {
    "model_type": "llama",
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
  },
  "mistral": {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
  "mistral-heads": {"model_type": "mistral", "sliding_window": 128, "head_dim": 16},
  "mistral-window": {"model_type": "mistral", "sliding_window": 9, "head_dim": 16},
  "smollm3": {
    "model_type": "smollm3",
    "num_hidden_layers": 5,
    "no_rope_layers": [1, 0, 1, 0, 1],
    **WIDE,
  },
  "olmo2": {"model_type": "olmo2", "tie_word_embeddings": False, **WIDE},
  "olmo3": {
    "model_type": "olmo3",
    "num_hidden_layers": 5,
    "sliding_window": 7,
    "rope_parameters": {
      "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
      "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
      },
    },
    **WIDE,
  },
  "gemma3": {
    "model_type": "gemma3_text",
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    "sliding_window": 5,
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "rope_parameters": {
      "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
      "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    },
    **NO_TOKENS,
  },
  "qwen3_5": {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 5,
    "tie_word_embeddings": False,
    "head_dim": 16,
    "rms_norm_eps": 1e-2,  # with a smaller one, rounding errors of torch are as large as 1e-4
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": {
      "rope_type": "default",
      "rope_theta": 100.0,
      "partial_rotary_factor": 0.25,
      "mrope_section": [1, 1, 0],
    },
    **NO_TOKENS,
  },
  "qwen3_moe": {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
  },
  "qwen3_moe-dense": {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_hidden_layers": 5,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
  },
  "qwen2_moe": {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 3,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "decoder_sparse_step": 2,
    **WIDE,
  },
  "olmoe": {
    "model_type": "olmoe",
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "clip_qkv": 0.5,
    **WIDE,
  },
}
# Those with layers of several kinds, or with other norms than the families before them.
NEWER = ("smollm3", "olmo2", "olmo3", "gemma3", "qwen3_5")
# Those with mixtures of experts.
MIXTURES = ("qwen3_moe", "qwen3_moe-dense", "qwen2_moe", "olmoe")
