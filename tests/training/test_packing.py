"""Packing: every token once, in a row of its own prompt, and an update that does not know the difference."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_update import FULL, assert_same, batch, full_batch, plain, run

from gtpo_jax.arrays import most_in_row
from gtpo_jax.runtime.mesh import make_mesh
from gtpo_jax.training.packing import plan_rows, widths


def test_rows_by_hand():
  """Four completions of up to 6 tokens in two rows: the longest first, each where most room is left."""
  packing = plan_rows(np.asarray([[5, 2, 1, 4], [3, 3, 0, 6]]), 6)
  assert packing.source[0].tolist() == [[0, 1, 2, 3, 4, 12], [18, 19, 20, 21, 6, 7]]
  assert packing.segment[0].tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 1]]
  assert packing.place[0].tolist() == [0, 10, 5, 6]
  assert packing.segment[1].tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1]]
  x = np.arange(48).reshape(2, 4, 6)
  assert packing.pack(x)[0].tolist() == packing.source[0].tolist()
  assert packing.unpack(packing.pack(x), 6)[0, 3, :4].tolist() == [18, 19, 20, 21]


def test_what_does_not_fit_has_a_row_each():
  assert plan_rows(np.asarray([[6, 6, 6, 1]]), 6) is None
  assert (
    plan_rows(np.asarray([[1, 1, 1, 1], [6, 4, 4, 3]]), 6) is None
  )  # the second prompt needs four rows
  assert plan_rows(np.asarray([[1, 1, 1, 1], [6, 4, 4, 2]]), 6).source.shape == (2, 3, 6)
  packing = plan_rows(np.asarray([[100, 90, 90, 80]]), 256)  # narrower rows alone
  assert packing.source.shape == (1, 4, 128) and packing.segment is None
  assert (
    widths(256, 4) == [64, 128, 256]
    and widths(320, 3) == [320]
    and widths(384, 3) == [96, 192, 384]
  )
  packing = plan_rows(np.asarray([[100, 20, 10, 80]]), 256, share=False)
  assert packing.source.shape == (1, 4, 128) and packing.segment is None


def test_widths():
  assert (
    widths(32) == [32]
    and widths(256) == [64, 128, 256]
    and widths(20480) == [80, 160, 320, 640, 1280, 2560, 5120, 10240, 20480]
  )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_token_stands_once_in_a_row_of_its_prompt(data):
  n = data.draw(st.integers(1, 4))
  g = data.draw(st.integers(1, 9))
  t = data.draw(st.sampled_from([7, 128, 130]))
  lengths = np.asarray(
    data.draw(st.lists(st.lists(st.integers(0, t), min_size=g, max_size=g), min_size=n, max_size=n))
  )
  packing = plan_rows(lengths, t)
  if packing is None:
    return
  w, s = packing.source.shape[1:]
  x = np.arange(n * g * t).reshape(n, g, t)
  there = np.asarray(packing.unpack(packing.pack(x), t))
  rows = np.asarray(packing.pack(x))
  assert w * s < g * t
  for i, j in np.ndindex(n, g):
    length = lengths[i, j]
    assert there[i, j, :length].tolist() == x[i, j, :length].tolist()
    if packing.segment is not None and length:
      row, first = divmod(packing.place[i, j], s)
      assert first + length <= s
      number = packing.segment[i, row, first]
      assert (
        np.flatnonzero(packing.segment[i, row] == number) == np.arange(first, first + length)
      ).all()
  if packing.segment is not None:
    real = packing.segment < most_in_row(g, w)
    assert real.sum() == lengths.sum() and rows[real].size == np.unique(rows[real]).size
    np.testing.assert_array_equal(packing.source >= 0, real)


def packed(data, t=9):
  """The batch with short completions, so that they pack."""
  rollouts, verdicts = data
  packing = plan_rows(np.asarray(rollouts.mask.sum(-1)), t)
  assert packing.source.shape[1] == 2
  return rollouts.replace(packing=packing), verdicts


def short(data):
  """The batch with no completion of more than 4 of its 9 tokens."""
  rollouts, verdicts = data
  return rollouts.replace(mask=rollouts.mask & (np.arange(9) < 4)), verdicts


def without_padding(result):
  state, metrics = result
  return state, {name: value for name, value in metrics.items() if name != "tokens/padding"}


@pytest.mark.parametrize(
  ("name", "data", "settings"),
  [
    ("gtpo", batch, {}),
    ("dapo_mixed", full_batch, {**FULL, "guide_completions": 1, "guide_cap": 1.1}),
  ],
)
def test_an_update_is_the_same_packed(name, data, settings):
  data = short(data())
  apart = run(name, data=data, **settings)
  together = run(name, data=packed(data), **settings)
  assert apart[1]["grad_norm"] > 1e-3
  assert together[1]["tokens/padding"] < 0.7 * apart[1]["tokens/padding"]
  assert_same(without_padding(apart), without_padding(together))
  assert_same(
    together, run(name, make_mesh(2, 2, 2), micro_batches=2, data=packed(data), **settings)
  )


def test_padding_is_counted():
  rollouts, _ = batch()
  tokens = rollouts.mask.sum()
  prompts = np.asarray(rollouts.prompts.lengths).sum()
  assert plain("gtpo")[1]["tokens/padding"] == pytest.approx(
    1 - (tokens + prompts) / (8 * 4 * 9 + 8 * 5)
  )


def test_rows_stay_where_their_prompt_is():
  """Packing and unpacking send nothing between devices."""
  packing = plan_rows(np.full((8, 4), 3), 9)
  mesh = make_mesh(8, 1, 1)
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  there_and_back = jax.jit(
    lambda packing, x: packing.unpack(packing.pack(x), 9),
    in_shardings=sharding,
    out_shardings=sharding,
  )
  text = there_and_back.lower(packing, np.zeros((8, 4, 9), np.float32)).compile().as_text()
  assert not any(
    name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
  )
