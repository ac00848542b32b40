"""Packing places every token exactly once, in a row of its prompt, and does not change updates."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import mesh_of
from update_cases import EVERY_LOSS_TERM, assert_same, batch, full_batch, plain, run, turn_batch

from gtpo_jax.arrays import array_lengths, max_per_row
from gtpo_jax.training.packing import abstract_packing, plan_rows, row_shapes


def test_rows_by_hand():
  """The four completions of a prompt share two rows of 6 positions.

  The longest is placed first, and each goes to the row with the most space left.
  """
  packing = plan_rows(np.asarray([[5, 2, 1, 4], [3, 3, 0, 6]]), 6)
  assert packing.source[0].tolist() == [[0, 1, 2, 3, 4, 12], [18, 19, 20, 21, 6, 7]]
  assert packing.segment[0].tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 1]]
  assert packing.start[0].tolist() == [0, 10, 5, 6]
  assert packing.segment[1].tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1]]
  x = np.arange(48).reshape(2, 4, 6)
  assert packing.pack(x)[0].tolist() == packing.source[0].tolist()
  assert packing.unpack(packing.pack(x), 6)[0, 3, :4].tolist() == [18, 19, 20, 21]


def test_completions_that_cannot_share_a_row_get_their_own():
  assert plan_rows(np.asarray([[6, 6, 6, 1]]), 6) is None
  needs_four_rows = [6, 4, 4, 3]
  assert plan_rows(np.asarray([[1, 1, 1, 1], needs_four_rows]), 6) is None
  assert plan_rows(np.asarray([[1, 1, 1, 1], [6, 4, 4, 2]]), 6).source.shape == (2, 3, 6)


def test_row_shapes_by_hand():
  """At most eight shapes, from a 128th of all positions on."""
  full = [(4, 18432), (6, 18432), (8, 18432), (12, 18432), (16, 18432)]
  assert row_shapes(16, 18432) == [(4, 576), (4, 2304), (4, 9216), *full]
  assert row_shapes(4, 100) == [(1, 100), (2, 100), (3, 100), (4, 100)]
  assert row_shapes(4, 256) == [(1, 128), (1, 256), (3, 128), (2, 256), (3, 256), (4, 256)]
  assert row_shapes(1, 128) == [(1, 64), (1, 128)]
  assert row_shapes(8, 384, shards=3) == [
    (2, 192),
    (2, 384),
    (3, 384),
    (4, 384),
    (6, 384),
    (8, 384),
  ]
  assert max(len(row_shapes(g, t)) for g in range(1, 65) for t in (64, 2048, 20480)) == 8


def test_the_smallest_shape_that_fits_is_chosen():
  assert plan_rows(np.asarray([[100, 90, 90, 80]]), 256).source.shape == (1, 2, 256)
  assert plan_rows(np.asarray([[60, 30, 20, 18]]), 256).source.shape == (1, 1, 128)
  alone = plan_rows(np.asarray([[50]]), 128)
  assert alone.source.shape == (1, 1, 64) and alone.segment is None


def test_what_is_warmed_up_has_the_shapes_of_what_is_planned():
  rng = np.random.default_rng(0)
  for g, t in ((1, 128), (4, 18), (8, 512)):
    shapes = row_shapes(g, t)
    seen = set()
    for longest in np.repeat([t // 40, t // 8, t // 3, t], 12):
      lengths = rng.integers(0, longest + 1, (2, g))
      packing = plan_rows(lengths, t)
      shape = (g, t) if packing is None else packing.source.shape[1:]
      expected = abstract_packing(2, g, t, *shape)
      assert jax.tree.structure(packing) == jax.tree.structure(expected)
      like = lambda x: (x.shape, x.dtype)
      assert jax.tree.map(like, packing) == jax.tree.map(like, expected)
      seen.add(shape)
    assert seen <= set(shapes) and len(seen) >= min(len(shapes), 3)


def test_array_lengths():
  assert array_lengths(10) == [10]
  assert array_lengths(36) == [36]
  assert array_lengths(64) == [64]
  assert array_lengths(80) == [80]
  assert array_lengths(128) == [64, 128]
  assert array_lengths(600) == [75, 150, 300, 600]
  assert array_lengths(1024) == [64, 128, 256, 512, 1024]
  assert array_lengths(20480) == [80, 160, 320, 640, 1280, 2560, 5120, 10240, 20480]


def test_array_lengths_are_divisible_by_the_shards():
  assert array_lengths(256, 4) == [64, 128, 256]
  assert array_lengths(1024, 128) == [128, 256, 512, 1024]
  assert array_lengths(384, 3) == [96, 192, 384]
  assert array_lengths(130, 2) == [66, 130]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_token_appears_once_in_a_row_of_its_prompt(data):
  n = data.draw(st.sampled_from([1, 3]))  # few shapes, because each is compiled
  g = data.draw(st.sampled_from([1, 5]))
  t = data.draw(st.sampled_from([7, 130]))
  group_lengths = st.lists(st.integers(0, t), min_size=g, max_size=g)
  lengths = np.asarray(data.draw(st.lists(group_lengths, min_size=n, max_size=n)))
  packing = plan_rows(lengths, t)
  if packing is None:
    return
  w, s = packing.source.shape[1:]
  x = np.arange(n * g * t).reshape(n, g, t)
  rows = np.asarray(packing.pack(x))
  unpacked = np.asarray(packing.unpack(packing.pack(x), t))
  assert w * s < g * t
  for i, j in np.ndindex(n, g):
    length = lengths[i, j]
    assert unpacked[i, j, :length].tolist() == x[i, j, :length].tolist()
    if packing.segment is not None and length:
      row, first = divmod(packing.start[i, j], s)
      assert first + length <= s
      index = packing.segment[i, row, first]
      positions = np.flatnonzero(packing.segment[i, row] == index)
      assert (positions == np.arange(first, first + length)).all()
  if packing.segment is not None:
    is_token = packing.segment < max_per_row(g, w)
    assert is_token.sum() == lengths.sum()
    assert rows[is_token].size == np.unique(rows[is_token]).size
    np.testing.assert_array_equal(packing.source >= 0, is_token)


def packed(data, t=9):
  """The batch, packed by the lengths of its completions."""
  rollouts, rewards = data
  packing = plan_rows(np.asarray(rollouts.lengths), t)
  assert packing.source.shape[1] == 2
  return rollouts.replace(packing=packing), rewards


def shortened(data):
  """The batch with every completion cut to at most 4 of its 9 tokens."""
  rollouts, rewards = data
  first = np.arange(9) < 4
  return rollouts.replace(mask=rollouts.mask & first, present=rollouts.present & first), rewards


def without_padding_metric(result):
  state, metrics = result
  return state, {name: value for name, value in metrics.items() if name != "tokens/padding"}


@pytest.mark.devices
@pytest.mark.parametrize(
  ("name", "data", "settings"),
  [
    pytest.param("gtpo", batch, {}, marks=pytest.mark.manual),
    ("dapo_mixed", full_batch, {**EVERY_LOSS_TERM, "guide_completions": 1, "guide_cap": 1.1}),
    ("gtpo", turn_batch, {"turn_credit": "state", "compare": "state", "contrast": False}),
    *(
      pytest.param(name, turn_batch, {}, marks=pytest.mark.manual)
      for name in ("gigpo", "turn_return", "mt_grpo")
    ),
  ],
)
@pytest.mark.slow
def test_packing_does_not_change_an_update(name, data, settings):
  data = shortened(data())
  separate = run(name, data=data, **settings)
  together = run(name, data=packed(data), **settings)
  assert separate[1]["grad_norm"] > 1e-3
  assert together[1]["tokens/padding"] < 0.7 * separate[1]["tokens/padding"]
  assert_same(without_padding_metric(separate), without_padding_metric(together))
  sharded = run(name, mesh_of(2, 2, 1, 2), micro_batches=2, data=packed(data), **settings)
  assert_same(together, sharded)


def test_the_fraction_of_padding_is_reported():
  rollouts, _ = batch()
  tokens = rollouts.mask.sum() + np.asarray(rollouts.prompts.lengths).sum()
  positions = 8 * 4 * 9 + 8 * 5
  assert plain("gtpo")[1]["tokens/padding"] == pytest.approx(1 - tokens / positions)


@pytest.mark.devices
def test_packing_moves_nothing_between_devices():
  packing = plan_rows(np.full((8, 4), 3), 9)
  mesh = mesh_of(8, 1, 1, 1)
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  round_trip = jax.jit(
    lambda packing, x: packing.unpack(packing.pack(x), 9),
    in_shardings=sharding,
    out_shardings=sharding,
  )
  text = round_trip.lower(packing, np.zeros((8, 4, 9), np.float32)).compile().as_text()
  collectives = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
  assert not any(name in text for name in collectives)
