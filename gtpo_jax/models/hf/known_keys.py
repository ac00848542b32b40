"""The keys of config.json that must have one value, and keys that change nothing here."""

from __future__ import annotations

from typing import Any

from gtpo_jax.models.families import Family
from gtpo_jax.models.hf.json_values import LARGEST_SIZES, shown
from gtpo_jax.runtime.errors import UserError

# Settings with only one implemented value. An absent or null setting has that value.
SUPPORTED = {
  "use_sliding_window": False,
  "attention_dropout": 0.0,
  "rope_interleaved": False,
  "quantization_config": None,
  "dual_chunk_attention_config": None,
  "per_layer_config": None,
  "is_encoder_decoder": False,
  "add_cross_attention": False,
  "attn_logit_softcapping": None,
  "final_logit_softcapping": None,
  "use_bidirectional_attention": False,
}
# Settings that `read_config` reads, besides the sizes and what a `Family` names.
READ = {
  "model_type",
  "rms_norm_eps",
  "tie_word_embeddings",
  "rope_parameters",
  "rope_scaling",
  "rope_theta",
  "layer_types",
  "partial_rotary_factor",
}
# Settings that do not change what these families compute: of the program that wrote the file, of
# training from random weights, of other heads, and of generation.
_WITHOUT_EFFECT = """
  architectures transformers_version transformers.js_config unsloth_version unsloth_fixed
  name_or_path _name_or_path _model_name_or_path tokenizer_class dtype torch_dtype use_cache
  attn_implementation _attn_implementation _attn_implementation_autoset
  _attn_implementation_internal
  _experts_implementation experts_implementation output_router_logits router_aux_loss_coef
  torchscript use_bfloat16 is_llama_config
  initializer_range pretraining_tp max_window_layers chunk_size_feed_forward gradient_checkpointing
  is_decoder cross_attention_hidden_size tie_encoder_decoder tie_last_hidden_states pruned_heads
  output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
  id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout
  bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id prefix
  max_length min_length do_sample early_stopping num_beams num_beam_groups num_return_sequences
  temperature top_k top_p typical_p diversity_penalty repetition_penalty length_penalty
  no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids forced_bos_token_id
  forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
  begin_suppress_tokens
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())


def check_supported(values: dict[str, Any], family: Family, path: str) -> None:
  """Raises UserError if a setting of `SUPPORTED`, or the activation, has another value."""
  required = SUPPORTED | family.required | {family.activation_key: family.activation}
  if not family.rope_share:
    required["partial_rotary_factor"] = 1.0
  for key, supported in required.items():
    value = values.get(key)
    same = value == supported and isinstance(value, bool) == isinstance(supported, bool)
    if value is not None and not same:
      only = "models without it are" if supported is None else f"{supported!r} is"
      raise UserError(f"{path!r} has {key} = {shown(value)}; only {only} supported")


def unused_keys(values: dict[str, Any], family: Family) -> list[str]:
  """Returns the keys that are not null and that nothing here reads or knows, sorted.

  Args:
    values: the contents of config.json.
    family: of the model.
  """
  known = READ | SUPPORTED.keys() | LARGEST_SIZES.keys() | WITHOUT_EFFECT | family.known_keys
  return sorted(key for key, value in values.items() if value is not None and key not in known)
