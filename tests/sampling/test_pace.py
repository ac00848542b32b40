"""Where chunks end: how many tokens they have at most, and how many finished slots end them."""

from types import SimpleNamespace

import numpy as np
import pytest

from gtpo_jax.sampling.session import Pace


def inputs(active, new=0):
  """Of `active` of 64 slots, the first `new` of which have no token yet."""
  slots = np.arange(64)
  return SimpleNamespace(active=slots < active, is_new=slots < new)


@pytest.mark.parametrize(("active", "finished"), [(64, 8), (15, 1), (1, 1)])
def test_finished_slots_end_a_chunk_only_if_others_can_take_them(active, finished):
  pace = Pace(16)
  assert pace.limits(inputs(active, new=active), refills=True) == (16, finished)
  assert pace.limits(inputs(active), refills=False) == (16, active)


def test_chunks_of_a_server_last_as_long_as_a_request_may_wait():
  pace = Pace(16, chunk_s=0.2)
  tokens = lambda new=0: pace.limits(inputs(4, new), refills=False)[0]
  assert tokens() == 1  # nothing was measured
  pace.observe(5.0, 10)  # it has compiled
  assert tokens() == 1
  pace.observe(0.25, 10)
  assert tokens() == 8 and tokens(new=1) == 1
  for _ in range(4):  # of which the fastest counts
    pace.observe(0.01, 10)
  assert tokens() == 16
