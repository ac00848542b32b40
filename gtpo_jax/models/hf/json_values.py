"""Values of a model's config.json: bounds, required values, and keys that change nothing here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gtpo_jax.models.families import Family
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import ABOVE_0, Bound, find_problem

# The largest sizes that are plausible. Larger ones are refused before anything of that size is
# built.
LARGEST_SIZES = {
  "num_hidden_layers": 2**12,
  "num_attention_heads": 2**16,
  "num_key_value_heads": 2**16,
  "head_dim": 2**16,
  "hidden_size": 2**20,
  "intermediate_size": 2**24,
  "vocab_size": 2**24,
  "max_position_embeddings": 2**31 - 1,
  "sliding_window": 2**31 - 1,
  "original_max_position_embeddings": 2**31 - 1,
  "num_experts": 2**16 - 1,
  "num_local_experts": 2**16 - 1,
  "num_experts_per_tok": 2**8,
  "moe_intermediate_size": 2**24,
  "shared_expert_intermediate_size": 2**24,
  "decoder_sparse_step": 2**12,
  "linear_num_key_heads": 2**16,
  "linear_num_value_heads": 2**16,
  "linear_key_head_dim": 2**16,
  "linear_value_head_dim": 2**16,
  "linear_conv_kernel_dim": 2**8,
}
# How the names of sizes begin that only mixtures and gated delta nets have.
OF_SOME_FAMILIES = ("num_experts", "num_local_experts", "moe_", "shared_", "decoder_", "linear_")


def size(values: dict[str, Any], key: str, path: str, default: int | None = None) -> int:
  """Returns the size `values[key]`, or `default` if it is absent or null.

  Args:
    values: the object in the file.
    key: a key of `LARGEST_SIZES`.
    path: the file, for the message of an error.
    default: the size that an absent key has; None if there must be one.
  """
  value = values.get(key)
  if value is None and default is not None:
    return default
  if not isinstance(value, int) or isinstance(value, bool):
    raise UserError(f"{path!r} has {key} = {shown(value)}; it must be an integer")
  if not 1 <= value <= LARGEST_SIZES[key]:
    raise UserError(
      f"{path!r} has {key} = {shown(value)}; it must be from 1 to {LARGEST_SIZES[key]}"
    )
  return value


def number(values: dict[str, Any], key: str, path: str, bound: Bound = ABOVE_0) -> float:
  """Returns the number `values[key]`."""
  value = values.get(key)
  if not isinstance(value, int | float) or isinstance(value, bool):
    raise UserError(f"{path!r} has {key} = {shown(value)}; it must be a number")
  if problem := find_problem(value, bound):
    reason = problem.partition(", got ")[0]
    raise UserError(f"{path!r} has {key} = {shown(value)}; it {reason}")
  return float(value)


def flag(values: dict[str, Any], key: str, path: str) -> bool:
  """Returns the setting `key`, which is False if it is absent or null."""
  value = values.get(key)
  if value is not None and not isinstance(value, bool):
    raise UserError(f"{path!r} has {key} = {shown(value)}; it must be true or false")
  return bool(value)


def check_same(path: str, stated: Mapping[str, Any]) -> None:
  """Raises UserError if a file states one fact by several keys, and differently.

  Args:
    path: the file.
    stated: the values by key; None for a key that is absent.
  """
  given = {key: value for key, value in stated.items() if value is not None}
  values = list(given.values())
  if any(value != values[0] for value in values):
    listed = " and ".join(f"{key} = {shown(value)}" for key, value in given.items())
    raise UserError(f"{path!r} has {listed}, which differ; keep the right one")


def check_layers(path: str, key: str, given: Sequence[Any], rule: str, implied: Sequence) -> None:
  """Raises UserError if a list with a value per layer differs from a rule that implies one."""
  for layer, (value, expected) in enumerate(zip(given, implied, strict=True)):
    if value != expected:
      raise UserError(
        f"{path!r} has {key}[{layer}] = {shown(value)}, but {rule} makes it {shown(expected)}; "
        "keep the right one"
      )


def shown(value: Any) -> str:
  """Returns a value of the file as an error message shows it."""
  return repr(value)[:80]


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
  "is_causal": True,
  "causal": True,
  "prefix_lm": False,
  "alibi": False,
  "use_alibi": False,
  "parallel_residual": False,
  "use_parallel_residual": False,
  "use_rms_norm": True,
}
# Settings that `read_config` reads, besides the sizes and the keys that a `Family` names.
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
# Names of settings in the config.json of other families. Nothing reads them, so they must agree.
ACTIVATIONS = (
  *("hidden_act", "hidden_activation", "activation_function", "activation", "act_fn", "hidden_fn"),
)
OTHER_NAMES = {
  "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
  "hidden_size": ("n_embd", "d_model", "dim"),
  "num_attention_heads": ("n_head", "n_heads", "num_heads"),
  "num_key_value_heads": ("n_kv_heads", "num_kv_heads", "n_head_kv"),
  "intermediate_size": ("n_inner", "ffn_dim", "intermediate_dim", "d_ff", "ffn_hidden_size"),
  "head_dim": ("d_head", "attention_head_dim", "kv_channels"),
  "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
  "rope_theta": ("rotary_emb_base", "rope_base"),
  "partial_rotary_factor": ("rotary_pct",),
  "num_experts": ("num_local_experts", "n_routed_experts"),
  "tie_word_embeddings": ("tie_embeddings", "tie_weights"),
  "num_experts_per_tok": ("num_experts_per_token", "moe_top_k", "moe_topk"),
}


def check_supported(values: dict[str, Any], family: Family, path: str) -> None:
  """Raises UserError if a setting has a value that is not supported, or two that differ."""
  activations = dict.fromkeys((family.activation_key, *ACTIVATIONS), family.activation)
  required = SUPPORTED | family.required | activations
  if not family.rope_share:
    required["partial_rotary_factor"] = 1.0
  for key, supported in required.items():
    value = values.get(key)
    same = value == supported and isinstance(value, bool) == isinstance(supported, bool)
    if value is not None and not same:
      only = "models without it are" if supported is None else f"{supported!r} is"
      raise UserError(f"{path!r} has {key} = {shown(value)}; only {only} supported")
  for key, others in OTHER_NAMES.items():
    check_same(path, {name: values.get(name) for name in (key, *others)})


def unused_keys(values: dict[str, Any], family: Family) -> list[str]:
  """Returns the keys that are not null and that nothing here reads or knows, sorted.

  Args:
    values: the contents of config.json.
    family: of the model.
  """
  sizes = {key for key in LARGEST_SIZES if not key.startswith(OF_SOME_FAMILIES)}
  if not family.has_windows and "use_sliding_window" not in values:
    sizes.remove("sliding_window")
  known = READ | SUPPORTED.keys() | sizes | WITHOUT_EFFECT | family.known_keys
  return sorted(key for key, value in values.items() if value is not None and key not in known)
