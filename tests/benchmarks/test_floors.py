"""The matrix products that benchmarks/step.py compares a step with."""

import floors
import pytest

from gtpo_jax.models import ModelConfig

# 12 x 8 (q), 2 of 12 x 4 (k, v), 8 x 12 (o), and 3 of 12 x 20 in each layer
CONFIG = ModelConfig(vocab_size=50, width=12, layers=3, heads=4, kv_heads=2, head_dim=2, mlp=20)
LAYER_WEIGHTS = 96 + 48 + 48 + 96 + 720
HEAD_WEIGHTS = 600


def test_an_update_needs_six_flop_for_each_weight_and_token():
  products = floors.update_products(CONFIG, prompt_tokens=10, completion_tokens=32, chunk=12)
  layers = 6 * 3 * LAYER_WEIGHTS * (10 + 32)
  # Three chunks of at most 12 tokens have 11, 11 and 10.
  head = 6 * HEAD_WEIGHTS * 33
  assert floors.total_flops(products) == layers + head


def test_sampling_reads_each_token_but_the_last():
  """20 completions of 5 tokens are sampled in three batches of at most 8."""
  products = floors.sampling_products(CONFIG, prompt_tokens=10, completions=20, slots=8, steps=5)
  prefill = 2 * 3 * LAYER_WEIGHTS * 10
  layers = 2 * 3 * LAYER_WEIGHTS * 8 * 3 * 4
  head = 2 * HEAD_WEIGHTS * 8 * 3 * 5
  assert floors.total_flops(products) == prefill + layers + head


def test_equal_shapes_are_measured_once_and_counted_each_time(monkeypatch):
  measured = []

  def seconds(rows, inner, columns, count, dtype):
    measured.append((rows, inner, columns))
    return rows

  monkeypatch.setattr(floors, "_seconds", seconds)
  products = [floors.Product(2, 3, 4, 5), floors.Product(7, 3, 4, 1), floors.Product(2, 3, 4, 10)]
  assert floors.measure_seconds(products, "float32") == 2 * 15 + 7
  assert measured == [(2, 3, 4), (7, 3, 4)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_takes_time(dtype):
  assert floors.measure_seconds([floors.Product(8, 16, 4, 3)], dtype) > 0
