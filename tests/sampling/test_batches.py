"""Padding of prompts on the host."""

import numpy as np
import pytest

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.prefill.batches import PrefillBatch, pad_prompts, without_copies

PAD = 3


def test_prompts_are_padded_on_the_left():
  padded = pad_prompts([[1, 2], [9]], 4, PAD)
  np.testing.assert_array_equal(padded.tokens, [[3, 3, 1, 2], [3, 3, 3, 9]])
  mask = [[False, False, True, True], [False, False, False, True]]
  np.testing.assert_array_equal(padded.mask, mask)


def test_bad_prompts_are_rejected():
  with pytest.raises(UserError, match="a prompt is empty"):
    pad_prompts([[1], []], 4, PAD)
  with pytest.raises(UserError, match="5 tokens, over the limit of 4"):
    pad_prompts([[1, 2, 3, 4, 5]], 4, PAD)


def test_a_prefill_batch_has_the_same_rows_in_every_shard():
  batch = PrefillBatch(2, 2, [[(4, 1), (0, 0)], [(2, 2)]])
  tokens = batch.tokens([[1], [5, 6], [8]], PAD)
  np.testing.assert_array_equal(tokens.tokens, [[5, 6], [3, 1], [3, 8], [3, 3]])
  assert batch.written({}) == [[[(4, 1)], [(0, 0)]], [[(2, 2)]]]
  assert batch.names({}) == [(0, 1), (1, 0), (2, 2)]


def test_equal_prompts_are_prefilled_once():
  """Prompts 0, 2 and 3 of shard 0 are the same; in shard 1, one of them is alone."""
  prompts = [[1, 2], [5], [1, 2], [1, 2], [1, 2]]
  assigned = [[(0, 0), (1, 1), (2, 2), (3, 3)], [(0, 4)]]
  distinct, copies = without_copies(assigned, prompts)
  assert distinct == [[(0, 0), (1, 1)], [(0, 4)]]
  assert copies == {(0, 0): [(2, 2), (3, 3)]}
  batch = PrefillBatch(2, 2, distinct)
  assert batch.written(copies) == [[[(0, 0), (2, 2), (3, 3)], [(1, 1)]], [[(0, 4)]]]
  assert batch.names(copies) == [(0, 0), (0, 2), (0, 3), (1, 1), (2, 4)]
