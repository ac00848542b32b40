"""Padding of prompts on the host."""

import numpy as np
import pytest

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.batches import pad_prefill, pad_prompts, places_of_copies, without_copies

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
  """Two shards have two rows and five entries each; an unused row gets entry 5, past the last."""
  assigned = [[(4, 1), (0, 0)], [(2, 2)]]
  batch, entries = pad_prefill(assigned, [[1], [5, 6], [8]], width=2, rows=2, entries=5, pad=PAD)
  np.testing.assert_array_equal(batch.tokens, [[5, 6], [3, 1], [3, 8], [3, 3]])
  np.testing.assert_array_equal(entries, [[4, 0], [2, 5]])


def test_equal_prompts_are_prefilled_once():
  """Prompts 0, 2 and 3 of shard 0 are the same; in shard 1, one of them is alone."""
  prompts = [[1, 2], [5], [1, 2], [1, 2], [1, 2]]
  assigned = [[(0, 0), (1, 1), (2, 2), (3, 3)], [(0, 4)]]
  distinct, copies = without_copies(assigned, prompts)
  assert distinct == [[(0, 0), (1, 1)], [(0, 4)]]
  assert copies == {(0, 0): [2, 3]}
  _, first = pad_prefill(distinct, prompts, width=2, rows=2, entries=5, pad=PAD)
  np.testing.assert_array_equal(first, [[0, 1], [0, 5]])
  places = list(places_of_copies(distinct, copies, first, entries=5))
  np.testing.assert_array_equal(places, [[[3, 5], [5, 5]], [[2, 5], [5, 5]]])
