"""Reads single values of a model's config.json, with the bounds that make them meaningful."""

from __future__ import annotations

from typing import Any

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


def size(values: dict[str, Any], key: str, path: str, default: int | None = None) -> int:
  """Returns the size `values[key]`, or `default` if it is absent or null.

  Args:
    values: the object in the file.
    key: a key of `LARGEST_SIZES`.
    path: the file, for the message of an error.
    default: the size that an absent key has; None if there must be one.

  Raises:
    UserError: it is not an integer from 1 to the largest size.
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
  """Returns the number `values[key]`.

  Raises:
    UserError: it is not a number, or not within its bound in float32.
  """
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


def shown(value: Any) -> str:
  """Returns a value of the file as an error message shows it."""
  return repr(value)[:80]
