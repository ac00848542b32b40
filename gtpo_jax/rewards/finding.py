"""Finds where a text states its answer: after thinking, in a tag, in a box, or after a phrase."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from gtpo_jax.rewards.languages import LANGUAGES, Language, nfc, words_of

# What models write around their thinking.
THINKING = (
  ("<think>", "</think>"),
  ("<thinking>", "</thinking>"),
  ("<thought>", "</thought>"),
  ("<reasoning>", "</reasoning>"),
  ("<seed:think>", "</seed:think>"),
  ("[THINK]", "[/THINK]"),
  ("◁think▷", "◁/think▷"),
)
_TAG = re.compile(r"<(/?)(?:final_)?answer>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(\{)|\\.|[{}]", re.DOTALL)
_BOX_WITHOUT_BRACES = re.compile(r"\\boxed\s+([-+]?[\w.,/]+)")
HASHES = re.compile(r"####[^\S\n]*([^\n]+)")
_ENDINGS = tuple(words_of("endings").split("|"))
_STOPS = " \t\r\n*。．.！"  # without the sign of factorials


class Marked(NamedTuple):
  """An answer that a text marks."""

  text: str  # what is in the mark, or after it on its line
  is_whole: bool  # whether the text is the answer itself, and not perhaps a sentence around it


def after_thinking(text: str) -> str:
  """Returns the text after the last thinking block, or before a block that never ends."""
  ends = (text.rfind(close) + len(close) for _, close in THINKING if close in text)
  rest = text[max(ends, default=0) :]
  starts = (rest.find(start) for start, _ in THINKING if start in rest)
  return rest[: min(starts, default=len(rest))]


def marked_answers(text: str) -> list[Marked]:
  """Returns the answers that a completion marks, the preferred one first; [] if it marks none.

  Of what follows the thinking, it is the last <answer>...</answer>, whose end may be missing. In
  it, or in the entire text if there is none, it is the last box, or else the later of the last
  `Answer: ...` ("The answer is ..."), in the languages of `LANGUAGES`, and the last `#### ...`.
  """
  text = nfc(after_thinking(text))
  tagged = _tagged(text)
  if tagged is None:
    return _in_text(text)
  return _in_text(tagged) or [Marked(tagged.strip(), not tagged.strip())]


def marked_answer(text: str) -> str | None:
  """Returns the first of `marked_answers`, or None."""
  answers = marked_answers(text)
  return answers[0].text if answers else None


def without_ending(text: str) -> str:
  """Returns an answer without what may end its sentence, such as a full stop, です or 입니다."""
  text = text.rstrip(_STOPS)
  ending = next((ending for ending in _ENDINGS if text.endswith(ending)), "")
  return text.removesuffix(ending).rstrip(_STOPS)


def _in_text(text: str) -> list[Marked]:
  boxed = boxed_answer(text)
  if boxed is not None:
    return [Marked(boxed, True)]
  patterns = (phrases(text), HASHES)
  matches = filter(None, (last_match(pattern, text) for pattern in patterns))
  latest = sorted(matches, key=lambda match: -match.start())
  return [Marked(match[1].strip(), False) for match in latest]


def _tagged(text: str) -> str | None:
  """Returns the content of the last <answer>; of one without an end only if none has one."""
  if "<" not in text:
    return None
  closed = None
  start = None
  for tag in _TAG.finditer(text):
    if not tag[1]:
      start = tag.end()
    elif start is not None:
      closed = text[start : tag.start()]
      start = None
  return text[start:] if closed is None and start is not None else closed


def phrases(text: str) -> re.Pattern:
  """Returns the pattern of "The answer is ..." in the languages whose words a text has."""
  folded = text.casefold()
  present = [name for name, row in LANGUAGES.items() if any(w in folded for w in _words(row))]
  return _phrases(tuple(present))


@functools.cache
def _words(row: Language) -> tuple[str, ...]:
  return tuple(row.answers.casefold().split("|"))


@functools.cache
def _phrases(names: tuple[str, ...]) -> re.Pattern:
  parts = [_phrase(LANGUAGES[name]) for name in names]
  return re.compile(rf"(?i)(?:{'|'.join(parts) or '(?!)'})[*_\s]*([^\n]+)")


def _phrase(row: Language) -> str:
  """Returns the pattern of an answer's name with a colon, an equals sign, or words and a copula."""
  if not row.spaced:
    return rf"(?:{row.answers})[*_]*\s*(?:[:：=＝]|(?:{row.copulas})[:：、，,]?)"
  copula = rf"|(?:\s+\w+){{0,4}}?\s+(?:{row.copulas})(?!\w)[*_]*:?" if row.copulas else ""
  between = rf"(?:\s+\w+){{0,{row.between}}}?" if row.between else ""
  return rf"\b(?:{row.answers})[*_]*(?:{between}\s*[:：]{copula}|\s*=)"


def last_match(pattern: re.Pattern, text: str) -> re.Match | None:
  """Returns the last match of the pattern in the text, or None."""
  match = None
  for match in pattern.finditer(text):  # noqa: B007
    pass
  return match


def boxed_answer(text: str) -> str | None:
  """Returns the content of the last balanced box, or None if there is none.

  It takes one pass with a stack. A separate search from every box would take quadratic time.
  """
  if "box" not in text:
    return None
  open_braces = []  # (start of the content, whether it belongs to a box)
  span = None
  for match in _BOX.finditer(text):
    if match[0] == "}":
      if open_braces:
        start, is_box = open_braces.pop()
        if is_box and (span is None or start > span[0]):
          span = (start, match.start())
    elif match[1] or match[0] == "{":
      open_braces.append((match.end(), bool(match[1])))
  if span:
    return text[span[0] : span[1]]
  match = last_match(_BOX_WITHOUT_BRACES, text)
  return match[1] if match else None
