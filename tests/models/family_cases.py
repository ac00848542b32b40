"""Small models of every family, as settings of Transformers' configs."""

LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 64,
}
FAMILY_CASES = {
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
}
