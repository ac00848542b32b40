"""The roofline against arithmetic by hand."""

import dataclasses
from pathlib import Path

import pytest
from plan_cases import small_config

from gtpo_jax.config import load, resolve_model
from gtpo_jax.config.roofline import sample_seconds, update_flops, update_seconds
from gtpo_jax.runtime.chips import CHIPS

CONFIGS = Path(__file__).parents[3] / "configs"


def flops_of(config):
  return update_flops(config, resolve_model(config).config)


def test_update_flops_by_hand():
  # 3 (2 N + 2 layers heads head_dim S) per token; N counts the matrices, the head once.
  n = 3 * (128 * 32 * (2 * 4 + 2 * 2) + 3 * 128 * 352) + 384 * 128
  tokens = 16 * 32 + 16 * 16 * 40
  length = 32 + 40
  assert flops_of(small_config()) == 3 * tokens * (2 * n + 2 * 3 * 4 * 32 * length)


def test_update_flops_with_minibatches_and_epochs():
  assert flops_of(small_config(**{"batch.minibatches": 4})) == flops_of(small_config())
  assert flops_of(small_config(**{"batch.epochs": 3})) == 3 * flops_of(small_config())


def test_the_roofline_by_hand():
  """7B on 32 chips, from the published shape."""
  chip = CHIPS["v5p"]
  mesh = {"data": 1, "expert": 1, "fsdp": 32, "tensor": 1}
  config = load(str(CONFIGS / "qwen2_5_7b_gtpo.py"))
  # In bfloat16 also on a CPU that has no units for it.
  architecture = dataclasses.replace(resolve_model(config).config, compute_dtype="bfloat16")
  n = 28 * (3584 * 128 * (2 * 28 + 2 * 4) + 3 * 3584 * 18944) + 152064 * 3584
  tokens = 128 * 2048 + 128 * 16 * 4096
  flops = 3 * tokens * (2 * n + 2 * 28 * 28 * 128 * 6144)
  assert flops_of(config) == flops
  compute_bound = flops * 4 / 3 / 32 / 459e12
  assert update_seconds(config, architecture, chip, 32, 0) == pytest.approx(compute_bound)
  assert update_seconds(config, architecture, chip, 32, 2000.0) == 2000

  kv = 2 * 28 * 4 * 128 * 2
  prefill = 2 * n * 128 * 2048 / 32 / 459e12
  # All 64 completions of a chip at once.
  bytes_read = 2 * n + kv * (64 * 4096 / 2 + 4 * 2048)
  expected = 4096 * bytes_read / 2765e9 + prefill
  assert sample_seconds(config, architecture, chip, mesh, 8192) == pytest.approx(expected)
  # 16 at a time, in four rounds.
  bytes_read = 2 * n + kv * (16 * 4096 / 2 + 2048)
  expected = 4 * 4096 * bytes_read / 2765e9 + prefill
  assert sample_seconds(config, architecture, chip, mesh, 512) == pytest.approx(expected)
