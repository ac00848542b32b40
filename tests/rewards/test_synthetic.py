"""The verifiers of the synthetic tasks."""

import time

import numpy as np
import pytest

from gtpo_jax.rewards import VERIFIERS
from gtpo_jax.rewards.synthetic import (
  countdown_correct,
  forks_correct,
  last_number_correct,
  sentence_correct,
)

HOSTILE = [
  "",
  " ",
  "\x00",
  "=",
  ",",
  ",,,",
  "+-*/",
  "١٢+٣=١٥",
  "１２",
  "²",
  "1e5",
  "inf",
  "nan",
  "(" * 5000,
  "9" * 100_000,
  "-" * 100_000,
  "1+1=" * 20_000,
  "1+1=2," * 20_000,
  "\ud800",
  "🙂" * 1000,
  "12+7=19\n,19-5=14\x00",
  "__import__('os')",
  "%s%n{}",
  "\\d+",
  "1" + ",1" * 50_000,
]


@pytest.mark.parametrize(
  ("text", "right"),
  [
    ("46+4=50,50+3=53", True),
    ("53", True),
    ("the answer is 53.", True),
    ("53 is 52+1, so 53", True),
    ("53\n", True),
    ("x=53%", True),
    ("53, or 54", False),
    ("54", False),
    ("153", False),
    ("530", False),
    ("5 3", False),
    ("053", False),
    ("fifty-three", False),
    ("", False),
    ("５３", False),
    ("53+", True),
    ("53.0", False),
  ],
)
def test_last_number(text, right):
  assert last_number_correct(text, "53") is right


NUMBERS = [5, 7, 12]
TARGET = 14


@pytest.mark.parametrize(
  ("text", "right"),
  [
    ("12+7=19,19-5=14", True),
    ("7-5=2,12+2=14", True),  # another chain to the same target
    (" 12+7=19, 19-5=14 \n", True),
    ("7+12=19,19-5=14", True),
    ("12+7=19,19-5=15", False),  # false arithmetic at the end
    ("12+7=20,19-5=14", False),  # false arithmetic before the end
    ("12+7=20,20-6=14", False),  # uses a number that is not in the pool
    ("7+7=14", False),  # a number used twice
    ("12+7=19,19-5=14,14+0=14", False),
    ("12+2=14", False),
    ("12+7=19", False),  # not at the target, one number left
    ("12-5=7,7+7=14", True),  # a result and a given number are equal
    ("5+7=12,12+12=24", False),  # ends elsewhere
    ("5*12=60,60-7=53", False),
    ("12+7=19,19-5=14,", False),
    (",12+7=19,19-5=14", False),
    ("12+7=19;19-5=14", False),
    ("12+7=19,19-5=14 yes", False),
    ("5-12=-7,7+7=14", False),  # no negative values
    ("12/7=1,19-5=14", False),
    ("14", False),
    ("14=14", False),
    ("", False),
  ],
)
def test_countdown(text, right):
  assert countdown_correct(text, NUMBERS, TARGET) is right


@pytest.mark.parametrize(
  ("text", "right"),
  [
    ("QA:8=8XZB:5=5", True),
    ("8855", True),
    ("8=8,5=5.", True),
    ("QA:3=8XZB:5=5", False),
    ("QA:8=3XZB:5=5", False),
    ("QA:8=8XZB:5=", False),
    ("QA:8=8XZB:5=55", False),
    ("", False),
    ("８８５５", False),
  ],
)
def test_forks(text, right):
  assert forks_correct(text, "85") is right


def test_countdown_multiplies():
  assert countdown_correct("3*4=12,12-5=7", [3, 4, 5], 7)
  assert not countdown_correct("3*4=13,13-5=8", [3, 4, 5], 8)


def test_countdown_counts_equal_numbers_separately():
  assert countdown_correct("4+4=8", [4, 4], 8)
  assert not countdown_correct("4+4=8", [4, 5], 8)
  assert not countdown_correct("4+4=8", [4, 4, 4], 8)
  assert countdown_correct("4-4=0,0+4=4", [4, 4, 4], 4)


def test_only_the_target_may_be_left():
  assert not countdown_correct("2+3=5", [2, 3, 5], 5)
  assert not countdown_correct("2+3=5", [2, 3, 9], 5)


def test_the_given_numbers_are_not_changed():
  numbers = [5, 7, 12]
  countdown_correct("12+7=19,19-5=14", numbers, TARGET)
  assert numbers == [5, 7, 12]


@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_no_text_raises_or_takes_long(index):
  began = time.perf_counter()
  verdicts = {
    name: VERIFIERS[name]([HOSTILE[index]], ["14"], [{"numbers": NUMBERS}], None)[0]
    for name in ("last_number", "countdown", "forks")
  }
  assert all(type(verdict) is bool for verdict in verdicts.values())
  assert not verdicts["countdown"]
  assert time.perf_counter() - began < 10


def test_random_text_never_raises_and_is_almost_never_right():
  rng = np.random.default_rng(0)
  alphabet = list("0123456789+-*=, \n,")
  verdicts = []
  for _ in range(3000):
    text = "".join(rng.choice(alphabet, rng.integers(0, 40)))
    verdicts += [
      VERIFIERS[name]([text], ["14"], [{"numbers": NUMBERS}], None)[0]
      for name in ("last_number", "countdown", "forks")
    ]
  assert {type(verdict) for verdict in verdicts} == {bool}
  assert sum(verdicts) < 60


@pytest.mark.parametrize(
  ("text", "verdict"),
  [
    ("The whale pulled a long rope through the cold sea.", True),
    ("  The whale's rope wasn't old, but it broke!\n", True),
    ("Why did the WHALE eat the sailor’s rope?", True),
    ("The whale pulled a rope.", False),  # five words
    (" ".join(["The whale pulled"] + ["a rope and"] * 5 + ["swam off."]), True),  # twenty
    (" ".join(["The whale pulled"] + ["a rope and"] * 5 + ["swam off again."]), False),
    ("The whale pulled a long chain through the sea.", False),
    ("The whales pulled a long rope through the sea.", False),
    ("The whale pulled ropes through the cold sea.", False),
    ("The whale pulled a long rope. It swam away.", False),
    ("The whale pulled a long rope through the sea", False),
    ('The whale pulled a long "rope" through the sea.', False),
    ("The whale pulled a long 'rope' through the sea.", False),
    ("The whale pulled a long ‘rope’ through the sea.", False),
    ("The whale pulled a long **rope** through the sea.", False),
    ("The whale is a word next to rope today.", False),
    ("The sea of a whale also contains a rope.", False),
    ("A rope is mentioned beside the big whale.", False),
    ("The whale pulled a rope\nthrough the cold sea.", False),
  ],
)
def test_a_sentence_uses_the_topic_and_the_word(text, verdict):
  assert sentence_correct(text, "whale", "rope") is verdict


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_sentences_are_wrong_and_fast(text):
  began = time.perf_counter()
  assert not sentence_correct(text, "whale", "rope")
  assert time.perf_counter() - began < 1
