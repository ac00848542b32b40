"""Batches that do not divide over the mesh are rejected."""

import pytest
from update_cases import CONFIG

from gtpo_jax.models import Qwen2
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.training.micro_batches import check_divides, check_positions


def test_batches_that_do_not_divide_are_rejected():
  model = Qwen2(CONFIG, make_mesh(2, 2, 2))
  check_divides("batch.prompts", 8, 2, model)
  message = r"batch.prompts = 12 does not divide into 2 .* 4 batch shard.*multiple of 8"
  with pytest.raises(UserError, match=message):
    check_divides("batch.prompts", 12, 2, model)


def test_positions_that_do_not_divide_over_a_context_axis_are_rejected():
  check_positions(41, Qwen2(CONFIG, make_mesh(2, 2, 2)))
  model = Qwen2(CONFIG, make_mesh(1, 1, 2, context=4))
  check_positions(40, model)
  message = "sampling.max_tokens = 42 does not divide over mesh.context x mesh.tensor = 8; make it"
  with pytest.raises(UserError, match=message):
    check_positions(42, model)
