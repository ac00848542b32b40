"""Credit records are written, read, removed on resume, and rejected if damaged."""

import zipfile

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gtpo_jax.algorithms import make
from gtpo_jax.config.monitoring import LogSection
from gtpo_jax.data.chat import Chat, load_chat
from gtpo_jax.logs.credit import CreditRecord, credit_files, read_credit, repair_credit, save_credit
from gtpo_jax.logs.journal import Journal
from gtpo_jax.runtime.errors import UserError


def make_record(step=3):
  """Returns a record of two groups of two completions with at most four tokens each.

  The report shows the tokens of the second group.
  """
  lengths = np.array([[1, 4], [2, 3]], np.int32)
  mask = np.arange(4) < lengths[..., None]
  false = np.zeros((2, 2), bool)
  return CreditRecord(
    step=step,
    lengths=lengths,
    mask=mask,
    entropy=np.where(mask, np.arange(16, dtype=np.float32).reshape(2, 2, 4) / 8, 0),
    correct=np.array([[True, False], [False, True]]),
    reward=np.array([[1, 0], [0, 1]], np.float32),
    penalty=np.full((2, 2), -0.25, np.float32),
    parts=np.arange(12, dtype=np.float32).reshape(2, 2, 3),
    part_weights=np.array([[1, 0.5, 2]] * 2, np.float32),
    valid=np.array([[True, True], [True, False]]),
    finished=~false,
    guided=false,
    divergence=np.where(mask, np.float32(0.25), 0),
    turn_reward=np.where(mask, np.float32(0.5), 0),
    turn_state=np.where(mask, np.int32(2), 0),
    score_norms=np.where(mask, np.float32(1.5), 0),
    value_gains=np.where(mask, np.float32(-0.5), 0),
    turn_truth=np.where(mask, np.float32(-0.75), 0),
    truth=np.where(mask, 12, 0).astype(np.uint8),
    shown=np.array([1], np.int32),
    ids=np.where(mask[1:], 7, 0).astype(np.int32),
    log_probs=np.where(mask[1:], np.float32(-0.5), 0),
    piece=np.where(mask[1:], 1, 0).astype(np.int32),
    pieces=["\ud83d", "</script>\x00\u202e"],
    prompts=["1+1:"],
    answers=["2"],
    stops=[["env_done", ""]],
    timeline=np.array([[1, 0, 2.5, 0.5]], np.float32),
  )


def assert_equal(record, expected):
  for name, value in vars(expected).items():
    np.testing.assert_array_equal(getattr(record, name), value, name)
    assert isinstance(value, list | int) or getattr(record, name).dtype == value.dtype, name


def test_a_record_is_read_back(tmp_path):
  save_credit(tmp_path, make_record())
  (file,) = credit_files(tmp_path).values()
  assert [path.name for path in file.parent.iterdir()] == ["3.npz"]
  record = read_credit(file)
  assert_equal(record, make_record())
  assert record.mask.tolist() == [
    [[True, False, False, False], [True] * 4],
    [[True, True, False, False], [True, True, True, False]],
  ]
  signals = record.signals(make("gtpo"))
  assert signals.guided is None and signals.divergence is None
  assert signals.entropy[1, 1].tolist() == [1.5, 1.625, 1.75, 0.0]
  assert not signals.mask[1, 1].any()  # not valid


@pytest.mark.parametrize(
  ("every", "last", "expected"),
  [(10, 25, [1, 10, 20, 25]), (1, 3, [1, 2, 3]), (0, 5, []), (50, 1, [1])],
)
def test_steps_that_are_recorded(every, last, expected):
  section = LogSection(credit_every=every)
  assert [step for step in range(1, last + 1) if section.keeps_credit(step, last)] == expected


def flip_contents(file):
  """Flips a bit of the largest array of an archive."""
  with zipfile.ZipFile(file) as archive:
    largest = max(archive.infolist(), key=lambda member: member.compress_size)
    starts = [member.header_offset for member in archive.infolist()] + [archive.start_dir]
  end = min(start for start in starts if start > largest.header_offset)
  data = bytearray(file.read_bytes())
  data[end - largest.compress_size // 2] ^= 1
  file.write_bytes(data)


def test_resuming_removes_the_records_of_later_steps(tmp_path):
  for step in (1, 2, 10):
    save_credit(tmp_path, make_record(step))
  assert list(credit_files(tmp_path)) == [1, 2, 10]
  recorded = lambda step: step in (1, 2, 3, 10)
  assert repair_credit(tmp_path, 2, recorded) == []
  assert list(credit_files(tmp_path)) == [1, 2]
  assert repair_credit(tmp_path, 3, recorded) == [
    "credit lacks step 3, which cannot be known again"
  ]
  (tmp_path / "credit" / "1.npz").write_bytes(b"PK and no more")
  assert repair_credit(tmp_path, 2, recorded) == [
    "credit/1.npz is damaged and was renamed to 1.npz.damaged"
  ]
  flip_contents(tmp_path / "credit" / "2.npz")
  assert "credit/2.npz is damaged and was renamed" in repair_credit(tmp_path, 2, recorded)[0]
  assert credit_files(tmp_path) == {}
  save_credit(tmp_path, make_record(1))
  assert repair_credit(tmp_path, 0, recorded) == []
  assert credit_files(tmp_path) == {}


def test_resuming_removes_later_evaluations(tmp_path):
  journal = Journal(tmp_path, 0, tensorboard=False)
  for step in (0, 2, 4):
    summary = {"problems": 3, "intervals": {"eval/sums/pass@1": [0.25, 0.5]}}
    journal.write_evaluation(step, summary, {"eval/sums/pass@1": 0.4})
  assert (tmp_path / "evaluations.jsonl").read_text().count("\n") == 3
  Journal(tmp_path, 2, tensorboard=False)
  last = (tmp_path / "evaluations.jsonl").read_text().splitlines()[-1]
  assert last.startswith('{"step": 2, "problems": 3, "intervals": {"eval/sums')


@pytest.mark.parametrize("cut", [0, 10, 300, -30])
def test_a_truncated_file_is_rejected_with_one_line(tmp_path, cut):
  save_credit(tmp_path, make_record())
  file = credit_files(tmp_path)[3]
  file.write_bytes(file.read_bytes()[:cut])
  with pytest.raises(UserError, match=r"3\.npz' is damaged") as rejected:
    read_credit(file)
  assert "\n" not in str(rejected.value)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_flipped_bit_raises_an_error_or_changes_no_number(tmp_path, seed):
  save_credit(tmp_path, make_record())
  file = credit_files(tmp_path)[3]
  rng = np.random.default_rng(seed)
  with np.load(file) as stored:
    sound = {name: stored[name].tobytes() for name in stored}
  for _ in range(40):
    data = bytearray(file.read_bytes())
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    broken = tmp_path / "broken.npz"
    broken.write_bytes(data)
    try:
      read = read_credit(broken)
    except UserError:
      continue
    assert read.entropy[read.mask].tobytes() == sound["entropy"]
    assert read.log_probs[read.mask[read.shown]].tobytes() == sound["log_probs"]


def test_a_pickle_is_never_loaded(tmp_path):
  save_credit(tmp_path, make_record())
  file = credit_files(tmp_path)[3]
  with np.load(file) as stored:
    np.savez_compressed(file, **{**stored, "shown": np.array([{"a": 1}], object)})
  with pytest.raises(UserError, match="is damaged"):
    read_credit(file)


@pytest.mark.parametrize(
  "text", ["1+2:", "hé 🙂🙂 a</script>", "日本語\n\t\x00\u202e", "👨‍👩‍👧", " "]
)
def test_pieces_concatenate_to_the_text(text):
  chat = load_chat()
  ids = chat.encode_completion(text)
  pieces = chat.pieces(ids)
  assert len(pieces) == len(ids) and "".join(pieces) == text + "<|im_end|>"


def test_pieces_of_a_sentencepiece_tokenizer_keep_their_spaces():
  words = ["\u2581two", "\u2581words", "\u2581", "a", "\u2581a"]
  bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
  vocab = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *bytes_, *words])}
  model = models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
  steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
  tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
  fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
  )
  smile = [vocab[f"<0x{byte:02X}>"] for byte in "🙂".encode()]
  ids = [vocab["\u2581two"], vocab["\u2581words"], *smile, vocab["\u2581two"], vocab["\u2581"]]
  pieces = Chat(fast).pieces(ids)
  assert pieces == ["two", " words", "", "", "", "🙂", " two", " "]
  assert "".join(pieces) == fast.decode(ids)


def test_a_character_of_several_tokens_is_the_text_of_the_last():
  chat = load_chat()
  smile = chat.encode_text("🙂")
  assert len(smile) == 4  # the small tokenizer falls back to bytes
  assert chat.pieces([*smile, *chat.encode_text("a")]) == ["", "", "", "🙂", "a"]
  assert chat.pieces(smile[:2]) == ["", "\ufffd"]  # the completion ends within the character
  assert chat.pieces([]) == []
