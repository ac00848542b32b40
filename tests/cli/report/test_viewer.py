"""The text and numbers that the page of the viewer receives."""

import base64
import gzip

import numpy as np
import pytest

from gtpo_jax.cli.report.viewer import pack, spread
from gtpo_jax.logs.credit import CreditRecord
from gtpo_jax.logs.text import visible


@pytest.mark.parametrize(
  ("text", "shown"),
  [
    ("a b", "a b"),
    ("\n", "⏎"),
    ("\t\r", "⇥␍"),
    ("\x00\x1b\x7f", "␀␛␡"),
    ("\u202e\u2066\u200f", "‹U+202E›‹U+2066›‹U+200F›"),
    ("\ud800\ufffe\ue000", "‹U+D800›‹U+FFFE›‹U+E000›"),
    ("\u2028\u2029", "‹U+2028›‹U+2029›"),
    ("\u200d\u200b", "‹ZWJ›‹ZWSP›"),
    ("日本é🙂\ufffd", "日本é🙂\ufffd"),
    ("", ""),
  ],
)
def test_invisible_and_directional_characters_are_shown_as_symbols(text, shown):
  assert visible(text) == shown
  assert visible("a\n" + text, "\n\t\r").startswith("a\n")


def test_packed_numbers_keep_five_digits():
  rng = np.random.default_rng(0)
  integers = rng.integers(-5, 2**31 - 1, 1000).astype(np.int32)
  real = rng.normal(size=1000) * 10.0 ** rng.integers(-30, 30, 1000)
  floats = np.append(real[:-3], [0.0, np.inf, 1.0]).astype(np.float32)
  raw = gzip.decompress(base64.b64decode(pack([integers, floats])))
  words = np.frombuffer(raw, np.uint8).reshape(4, -1).T.copy().view("<u4").reshape(2, -1)
  np.testing.assert_array_equal(words[0].view("<i4"), integers)
  np.testing.assert_allclose(words[1].view("<f4"), floats, rtol=2**-16)
  assert words[1].view("<f4")[-3:].tolist() == [0.0, np.inf, 1.0]


def record_of(correct, lengths, width):
  """Returns a record of one group, with only what `spread` reads."""
  shape = (1, len(correct))
  none = np.zeros(shape)
  return CreditRecord(
    step=1,
    lengths=np.asarray([lengths]),
    mask=np.arange(width) < np.asarray([lengths])[..., None],
    entropy=np.zeros((*shape, width), np.float32),
    divergence=np.zeros((*shape, width), np.float32),
    turn_reward=np.zeros((*shape, width), np.float32),
    turn_state=np.zeros((*shape, width), np.int32),
    turn_truth=np.zeros((*shape, width), np.float32),
    score_norms=np.zeros((*shape, width), np.float32),
    value_gains=np.zeros((*shape, width), np.float32),
    correct=np.asarray([correct]),
    reward=none,
    parts=np.zeros((*shape, 0), np.float32),
    part_weights=np.zeros((1, 0), np.float32),
    penalty=none,
    valid=np.ones(shape, bool),
    finished=np.ones(shape, bool),
    guided=none,
    truth=np.zeros((*shape, width), np.uint8),
    shown=np.asarray([0]),
    ids=none,
    log_probs=none,
    piece=none,
    pieces=[],
    prompts=[],
    answers=[],
    stops=[],
    timeline=np.zeros((0, 4), np.float32),
  )


def test_the_spread_of_each_side_by_hand():
  record = record_of([True, True, False, False], [2, 2, 2, 1], width=2)
  shaped = np.float32([[1.0, 1.2], [1.1, 1.1], [-1.0, -1.0], [-1.0, 99.0]])  # 99 is padding
  # The median of O+ is 1.1, the mean difference from it 0.05, and the largest value 1.2.
  assert spread(shaped, record, 0) == pytest.approx([0.05 / 1.2, 0.0])
  one_sided = record_of([True] * 4, [2, 2, 2, 1], width=2)
  assert spread(np.abs(shaped), one_sided, 0)[1] == 0.0
