"""Batches and positions that do not divide evenly over the mesh are rejected."""

import pytest
from meshes import mesh_of
from update_cases import CONFIG

from gtpo_jax.models import Transformer
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.training.packing import check_batch_divisible, check_positions_divisible

pytestmark = pytest.mark.devices


def test_batches_that_do_not_divide_evenly_are_rejected():
  model = Transformer(CONFIG, mesh_of(2, 2, 1, 2))
  check_batch_divisible("batch.prompts", 8, 2, model)
  message = r"batch.prompts = 12 is not a multiple of 8: 2 part.* x 4 batch shard.*; change batch"
  with pytest.raises(UserError, match=message):
    check_batch_divisible("batch.prompts", 12, 2, model)


def test_positions_that_do_not_divide_evenly_are_rejected():
  check_positions_divisible(41, Transformer(CONFIG, mesh_of(2, 2, 1, 2)))
  model = Transformer(CONFIG, mesh_of(1, 1, 4, 2))
  check_positions_divisible(40, model)
  message = "sampling.max_tokens = 42 is not a multiple of mesh.context x mesh.tensor = 8; change"
  with pytest.raises(UserError, match=message):
    check_positions_divisible(42, model)
