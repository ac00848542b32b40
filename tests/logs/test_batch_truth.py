"""Truth codes of tokens."""

import numpy as np
import pytest
from completions import completion

from gtpo_jax.data.chat import load_chat
from gtpo_jax.data.records import Problem, user
from gtpo_jax.logs.truth import completion_codes, decides, is_wrong, of_class, token_truth
from gtpo_jax.rollout.groups import Group


@pytest.fixture(scope="module")
def chat():
  return load_chat()


def test_a_token_takes_the_strongest_mark_of_its_characters(chat):
  text = "total=7 question"
  ids = np.asarray(chat.encode_completion(text))
  marks = "ffffDidfffffffcf"
  pieces = chat.pieces(ids)[:-1]
  assert len(pieces) < len(text)  # some tokens have several characters
  codes = completion_codes(ids, text, marks, chat)
  start = 0
  strength = "ifcdCD"
  for piece, code in zip(pieces, codes, strict=False):
    strongest = max(marks[start : start + len(piece)], key=strength.index)
    assert code == {"i": 1, "f": 2, "c": 3, "d": 4, "D": 12}[strongest], piece
    start += len(piece)
  assert codes[-1] == 1  # the stop token


def test_marks_of_another_length_or_text_are_unknown(chat):
  ids = np.asarray(chat.encode_completion("8=8"))
  assert completion_codes(ids, "8=8", "dic", chat).tolist() == [4, 1, 3, 1]
  assert not completion_codes(ids, "8=8", "di", chat).any()
  assert not completion_codes(ids, "9=9", "dic", chat).any()


def groups_of(chat, problems, texts):
  """Returns a group of one completion for each problem."""
  groups = []
  for i, (problem, text) in enumerate(zip(problems, texts, strict=True)):
    made = completion((0, i), 0, chat.encode_completion(text))
    made.text = text
    groups.append(Group((0, i), problem, 0, [made]))
  return groups


def test_codes_of_a_batch(chat):
  texts = ["QA:3=8", "7"]
  problems = [Problem("a", user("38:"), "8", "forks"), Problem("b", user("3+4?"), "7", "math")]
  codes = token_truth(groups_of(chat, problems, texts), 7, chat)
  assert codes.tolist() == [[[2, 2, 2, 12, 1, 11, 1]], [[0] * 7]]
  assert decides(codes)[0, 0].tolist() == [False] * 3 + [True, False, True, False]
  assert is_wrong(codes)[0, 0].tolist() == [False] * 3 + [True, False, True, False]
  assert of_class(codes, "filler").sum() == 3
  assert not decides(codes[1]).any()
  assert token_truth(groups_of(chat, problems[1:], texts[1:]), 7, chat) is None


def test_a_verifier_of_the_user_knows_only_what_the_rows_say(chat):
  problem = Problem("a", user("38:"), "8", "forks")
  assert token_truth(groups_of(chat, [problem], ["8=8"]), 4, chat, own_verifier=True) is None
  said = Problem("a", user("38:"), "8", "forks", {"truth": [["=", "8"]]})
  codes = token_truth(groups_of(chat, [said], ["8=8"]), 4, chat, own_verifier=True)
  assert codes.tolist() == [[[1, 1, 4, 1]]]
