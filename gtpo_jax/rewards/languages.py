"""Words of several languages, from `words.toml`, and characters of all scripts."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple


class Language(NamedTuple):
  """The words of a language, separated by bars as in regular expressions, in Unicode's form NFC."""

  answers: str  # what an answer is called, as in "The answer is 7"
  copulas: str  # what stands between that and the answer, besides a colon
  options: str = ""  # what a choice is called, as in "option B"
  endings: str = ""  # what may follow the answer in a sentence
  spaced: bool = True  # whether spaces separate words
  between: int = 2  # how many words may stand between the answer's name and a colon


_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
LANGUAGES = {name: Language(**row) for name, row in _WORDS["languages"].items()}
# Words after a number that multiply it.
SCALES = {
  word: Fraction(factor) for factor, row in _WORDS["scales"].items() for word in row.split("|")
}
# Words that may stand beside a number without changing it, by kind; see the file.
HEDGES = _WORDS["hedges"]  # what makes a number no answer, before and after it
CHARACTERS = _WORDS["characters"]  # their replacements, by form
UNITS = {kind: tuple(words.split()) for kind, words in _WORDS["units"].items()}

# Letters of other scripts than those of mathematics (Latin without accents, and Greek).
FOREIGN = (
  "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0300-\u036f\u0400-\u052f\u0590-\u05ff\u0610-\u065f"
  "\u066e-\u06ef\u0900-\u0965\u0970-\u0dff\u0e00-\u0e4f\u1100-\u11ff\u1e00-\u1eff\u3040-\u30ff"
  "\u3400-\u9fff\uac00-\ud7a3"
)
# Hyphens, dashes and minus signs that are not in Unicode's category of dashes.
_MINUS_SIGNS = "\u00ad\u02d7\u207b\u208b\u2212\u2796"
# Characters without a width that are in no category of their own.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u20e3\u2800\u3164\ufe00-\ufe0f\uffa0]")
_SOFT_HYPHENS = re.compile("(?<=[-\u2010-\u2015\u2212\xad])\xad|\xad(?=[-\u2010-\u2015\u2212])")
_RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207f]+")
_LOWERED = re.compile("[\u2080-\u208e]+")


class _Ascii(dict):
  """What characters are in ASCII, for `str.translate`; looked up on first use.

  Decimal digits of all scripts, dashes, spaces, fractions, full-width forms and the letters of
  mathematics have an equivalent; invisible characters become nothing. Others stay.
  """

  def __missing__(self, code: int) -> str:
    self[code] = self._equivalent(chr(code))
    return self[code]

  @staticmethod
  def _equivalent(char: str) -> str:
    category = unicodedata.category(char)
    if char.isascii():
      return char
    if category == "Nd":
      return str(unicodedata.decimal(char))
    if category == "Pd" or char in _MINUS_SIGNS:
      return "-"
    if category == "Cf" or _INVISIBLE.match(char):
      return ""
    if category in ("Zs", "Zl", "Zp"):
      return " " if category == "Zs" else "\n"
    form = unicodedata.decomposition(char).partition(" ")[0]
    plain = unicodedata.normalize("NFKC", char)
    if form == "<fraction>" and not plain.endswith("\u2044"):
      return "\\frac{{{}}}{{{}}}".format(*plain.split("\u2044"))
    is_letter = form == "<font>" and ord(char) >= 0x1D400
    return plain if plain.isascii() and (is_letter or form in ("<wide>", "<small>")) else char


TO_ASCII = _Ascii(str.maketrans(CHARACTERS["ascii"]))


def nfc(text: str) -> str:
  """Returns the text with each letter and its accents as one character, where there is one."""
  return text if text.isascii() else unicodedata.normalize("NFC", text)


def to_ascii(text: str) -> str:
  """Returns the text with the equivalents of `TO_ASCII`, and with raised text as exponents."""
  if text.isascii():
    return text
  text = _SOFT_HYPHENS.sub("", text)
  text = _RAISED.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
  text = _LOWERED.sub(lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
  return text.translate(TO_ASCII)


def words_of(part: str) -> str:
  """Returns a part of all languages, such as "endings", as a regular expression."""
  words = {word for row in LANGUAGES.values() for word in getattr(row, part).split("|") if word}
  return "|".join(sorted(words, key=lambda word: (-len(word), word)))
