"""What is kept of a step's credit: written, cut back, read, and refused where it is not what it should be."""

import numpy as np
import pytest

from gtpo_jax.config.sections import LogSection
from gtpo_jax.data.chat import load_chat
from gtpo_jax.reporting.credit import CreditRecord, credit_files, read_credit, save_credit
from gtpo_jax.reporting.journal import Journal
from gtpo_jax.runtime.errors import UserError


def credit(step=3):
  """Two groups of two completions of at most four tokens; the second group is shown."""
  lengths = np.array([[1, 4], [2, 3]], np.int32)
  mask = np.arange(4) < lengths[..., None]
  false = np.zeros((2, 2), bool)
  return CreditRecord(
    step,
    lengths,
    np.where(mask, np.arange(16, dtype=np.float32).reshape(2, 2, 4) / 8, 0),
    np.array([[True, False], [False, True]]),
    np.array([[1, 0], [0, 1]], np.float32),
    np.full((2, 2), -0.25, np.float32),
    ~false,
    ~false,
    false,
    np.array([1], np.int32),
    np.where(mask[1:], 7, 0).astype(np.int32),
    np.where(mask[1:], np.float32(-0.5), 0),
    np.where(mask[1:], 1, 0).astype(np.int32),
    ["\ud83d", "</script>\x00\u202e"],
    ["1+1:"],
    ["2"],
  )


def test_what_is_written_comes_back(tmp_path):
  save_credit(tmp_path, credit())
  (file,) = credit_files(tmp_path).values()
  assert file.name == "3.npz" and [path.name for path in file.parent.iterdir()] == ["3.npz"]
  back = read_credit(file)
  for name, value in vars(credit()).items():
    np.testing.assert_array_equal(getattr(back, name), value, name)
    assert isinstance(value, list | int) or getattr(back, name).dtype == value.dtype, name
  assert back.mask.tolist() == [
    [[True, False, False, False], [True] * 4],
    [[True, True, False, False], [True, True, True, False]],
  ]
  signals = back.signals(guided=False)
  assert signals["guided"] is None and signals["entropy"][1, 1].tolist() == [1.5, 1.625, 1.75, 0.0]


def test_when_a_step_is_kept():
  kept = lambda every, last: [
    step for step in range(1, last + 1) if LogSection(credit_every=every).keeps_credit(step, last)
  ]
  assert (
    kept(10, 25) == [1, 10, 20, 25]
    and kept(1, 3) == [1, 2, 3]
    and kept(0, 5) == []
    and kept(50, 1) == [1]
  )


def test_a_resumed_run_keeps_what_its_checkpoint_knows(tmp_path):
  for step in (1, 2, 10):
    save_credit(tmp_path, credit(step))
  assert list(credit_files(tmp_path)) == [1, 2, 10]
  Journal(tmp_path, 2, tensorboard=False)
  assert list(credit_files(tmp_path)) == [1, 2]
  Journal(tmp_path, 0, tensorboard=False)
  assert credit_files(tmp_path) == {}


def test_evaluations_are_cut_back_too(tmp_path):
  journal = Journal(tmp_path, 0, tensorboard=False)
  for step in (0, 2, 4):
    journal.write_evaluation(step, {"problems": 3, "intervals": {"eval/sums/pass@1": [0.25, 0.5]}})
  assert (tmp_path / "evaluations.jsonl").read_text().count("\n") == 3
  Journal(tmp_path, 2, tensorboard=False)
  assert (
    (tmp_path / "evaluations.jsonl")
    .read_text()
    .splitlines()[-1]
    .startswith('{"step": 2, "problems": 3, "intervals": {"eval/sums')
  )


@pytest.mark.parametrize("cut", [0, 10, 300, -30])
def test_a_damaged_file_is_one_line(tmp_path, cut):
  save_credit(tmp_path, credit())
  file = credit_files(tmp_path)[3]
  file.write_bytes(file.read_bytes()[:cut])
  with pytest.raises(UserError, match=r"3\.npz' is damaged") as refused:
    read_credit(file)
  assert "\n" not in str(refused.value)


@pytest.mark.parametrize("flips", [0, 1, 2])
def test_a_damaged_byte_does_not_come_back_as_numbers(tmp_path, flips):
  save_credit(tmp_path, credit())
  file = credit_files(tmp_path)[3]
  rng = np.random.default_rng(flips)
  with np.load(file) as stored:
    whole = {name: stored[name].tobytes() for name in stored}
  for _ in range(40):
    data = bytearray(file.read_bytes())
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    broken = tmp_path / "broken.npz"
    broken.write_bytes(data)
    try:
      read = read_credit(broken)
    except UserError:
      continue
    assert (
      read.entropy[read.mask].tobytes() == whole["entropy"]
      and read.log_probs[read.mask[read.shown]].tobytes() == whole["log_probs"]
    )


def test_another_format_is_named(tmp_path):
  save_credit(tmp_path, credit())
  file = credit_files(tmp_path)[3]
  with np.load(file) as stored:
    np.savez_compressed(file, **{**stored, "format": 2})
  with pytest.raises(UserError, match="is of format 2, this version of gtpo_jax reads 1"):
    read_credit(file)


def test_a_pickle_in_it_is_not_opened(tmp_path):
  save_credit(tmp_path, credit())
  file = credit_files(tmp_path)[3]
  with np.load(file) as stored:
    np.savez_compressed(file, **{**stored, "shown": np.array([{"a": 1}], object)})
  with pytest.raises(UserError, match="is damaged"):
    read_credit(file)


@pytest.mark.parametrize(
  "text", ["1+2:", "hé 🙂🙂 a</script>", "日本語\n\t\x00\u202e", "👨‍👩‍👧", " "]
)
def test_pieces_join_to_the_text(text):
  chat = load_chat()
  ids = chat.encode_completion(text)
  pieces = chat.pieces(ids)
  assert len(pieces) == len(ids) and "".join(pieces) == text + "<|im_end|>"


def test_a_character_of_several_tokens_stands_at_its_last():
  chat = load_chat()
  smile = chat.encode_text("🙂")
  assert len(smile) == 4  # the small tokenizer knows bytes
  assert chat.pieces([*smile, *chat.encode_text("a")]) == ["", "", "", "🙂", "a"]
  assert chat.pieces(smile[:2]) == ["", "\ufffd"]  # cut off within it
  assert chat.pieces([]) == []
