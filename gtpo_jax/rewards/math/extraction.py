r"""Finds the answer in the text of a completion or of a gold solution.

Without a mark it is the last number of the text, with all of the expression that it is a part of.
The number in `3\sqrt{2}`, `2^10`, `5x` and `12 500` is the whole expression: to take a piece of it
would accept what the text does not state. What is next to a number is joined to it if it could
change its value; if the whole cannot be read, it equals nothing. A number that a text hedges, as in
"not 5", "less than 5" or "3 or 5", is no answer. Numbers in words are not read.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from gtpo_jax.rewards.finding import (
  HASHES,
  after_thinking,
  boxed_answer,
  last_match,
  marked_answers,
  phrases,
  without_ending,
)
from gtpo_jax.rewards.languages import FOREIGN, HEDGES, SCALES, UNITS, to_ascii
from gtpo_jax.rewards.math.normalize import TEXT_COMMAND, clean, spell_scales
from gtpo_jax.rewards.math.values import WORDS, Number, read, same

MAX_CHARS = 1000  # longest answer that is compared; the longest gold answer of MATH-500 has 159
BEFORE_CHARS = 150  # before the last number, which are read at least
AFTER_CHARS = 300  # after the last digit, which are read too

ORDINALS = "third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|hundredth"

# What is not mathematics, and its replacement.
_MARKUP = [
  (re.compile(pattern), replacement)
  for pattern, replacement in (
    (r"<<[^<>\n]*>>|</?[A-Za-z_]{2,}[^<>\n]*>|</?[biup]>", " "),  # of a calculator, or of HTML
    (r"(?<=[^\W\d_])[\u2013\u2014\u2015](?=\d)", ": "),  # a dash of prose
    (TEXT_COMMAND + r"\s*\{\s*-\s*\}", "-"),
    (TEXT_COMMAND + r"\s*\{([^{}]*)\}", r" \1 "),
    (r"\b(?:US|AU|CA|NZ|HK|[ACRS])(?=\\?\$\s?\d)|[\u20ac\u00a3\u00a5\u20b9](?=\s?\d)", ""),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-z])|\\?\$|\\[()\[\]]", ""),
    (r"\\(?:[,!;: ]|q?quad(?![a-z]))|~", " "),
    (r"\\\\", "\n"),
    (
      r"[-=]+>|[\u2190-\u21ff\u2234\u2235\u27f5-\u27ff]|\\(?:implies|to|(?:long)?(?:left)?rightarrow|Rightarrow|therefore)(?![a-z])",
      ": ",
    ),
    (r"(?<![\w)\]}*])\*\*(?=\S)(.+?)(?<=\S)\*\*(?![\w(*])", r"\1"),
    (r"\\%", "%"),
    (r"(?i)\b(?:an?|one)\s+(\d+)(?:th|rd)\b(?=\s*(?:[.,;]|of\b|$))", r"1/\1"),
    (r"(?<=\d)(?:st|nd|rd|th)\b", ""),
    (r"(?<=\d)\s*\u2026\s*(?=\d)", "..."),
    (r"(?<=[\d\s])((?:[kcdm]m|ft|yd|mi|in)|(?<=\d\s)m)\s?\^\s?\{?[23]\}?", r"\1"),
    (r"(?<=\d)\s*\u2022\s*(?=\d)", "*"),
    (r"((?:=|\b(?:is|are|was|be|equals?))\s*)-\s+(?=[\d.])", r"\1-"),
    (r"(?<![\d)]\s)(?<![\w)%])%(\d[\d.,]*)(?<![.,])", r"\1%"),
    (r"(?<=\d)\s*[,;(]\s*(?:and\s|but\s)?not\s+[-\d.,]*\d\)?(?!\s+but)", ""),
    (rf"(?<=\d)(?=\s+(?:{ORDINALS})\s+(?!of\b|as\b)[a-z])", ";"),  # 76 sixth graders
    (r"(?<![$\d.,])(\d[\d.,]*)[mghslLJNWV](?=\s+[a-z]{2})", r"\1"),  # in prose, a unit
  )
]
_TOKEN = re.compile(
  r"(?P<number>\d+(?:[-/:]\d+){2,}|\d*\.\d*\(\d+\)|\d+(?::\d+)+|(?:\d[\d,.'_`]*\d|\d|\.\d+)(?:[eE][-+]?\d+)?)"
  r"|(?P<word>(?P<named>\\[A-Za-z]+)|[^\W\d_]{2,})|(?P<letter>[^\W\d_])|(?P<space>\s+)"
  r"|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<relation>[<>!]=|[<>\u2260\u2264\u2265])"
  r"|(?P<stop>[;?\"#&@`!\u2026\u3002]|[.,:'](?!\d)|==?|[\u2248\u223c])"
  r"|(?P<operator>\*\*|[-+*/^_%|\u00d7\u00b7\u22c5\u00f7\u221a\u00b1])|(?P<other>.)",
  re.DOTALL,
)
_FUNCTIONS = str.split("sqrt pi sin cos tan cot sec csc log ln exp mod modulo infinity")
_NAMED_STOPS = ("\\approx", "\\sim", "\\ldots", "\\dots", "\\cdots", "\\boxed", "\\item", "\\equiv")
_NAMED_RELATIONS = str.split("\\le \\leq \\ge \\geq \\lt \\gt \\ne \\neq \\not \\in \\pm \\mp")
_BETWEEN = str.split("times plus minus over divided multiplied choose")
_OPERANDS = ("number", "letter", "close", "name", "symbol")
_STARTS = ("number", "letter", "open", "name", "symbol")
_SYMBOLS = ("Sm", "No", "Nl", "Mn", "Me", "Lm", "Sk")  # categories of Unicode
_MARKS = (
  "\u2308\u2309\u230a\u230b\u2030\u2031\u203e\u2032\u2033\u2034\u2715\u2716"  # further symbols
)

_HEDGED_BEFORE = re.compile(HEDGES["before"].replace("ORDINALS", ORDINALS))
_OR = re.compile(
  r"(?i)(.*(?:\d|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|twelve)\b).*?)"
  r"(?:,\s*|\s+)\(?(?:or|oder|или)(?:,?\s+if\s[^.\d]*|\s+(?:(?:maybe|perhaps|possibly|else)\s+)?)$",
  re.DOTALL,
)
_HEDGED_AFTER = re.compile(HEDGES["after"])
_NEGATED = re.compile(r"(?i)(?<![\w-])(?:minus|negative|neg\.?)\s+$")
# What changes a number before it.
_CHANGED = re.compile(
  rf"(?i)\s?-?\s*(?:\((?!plus|less|more|minus|times))?((?!{'|'.join(UNITS['scaled'])}|half\b|quarter)"
  r"(?:(?:whole|and)\s+(?:an?|one|\d+)?\s*(?:half|halves|quarters?|thirds?|[a-z]+ths?)\b"
  r"|squared|cubed|factorial|doubled|tripled|quadrupled|halved|per ?mille?|mod(?:ulo)?|base"
  r"|recurring|repeating|pp[mb]|bps|in (?:binary|octal|hex\w*|base)"
  r"|(?:minus|times|less)\s+(?:one|two|three|four|five|six|seven|eight|nine|ten|twelve)\b"
  r"|point\s+[a-z]+|raised|to the (?:power|[a-z]+th|third)|times (?:as|itself|more)"
  r"|reciprocals?|inverse|negat(?:ed|ive)|primorial|radical|double factorial|parts? per [a-z]+"
  r"|in an? (?:[a-z]+ )?(?:hundred|thousand|million)|(?:kibi|mebi|gibi|mega|giga|tera|milli|micro"
  r"|nano|pico|centi|deci|dec?ka|hecto)"
  r"|(?!maths|months|paths|baths|lengths|widths|depths|births|deaths|cloths|booths|moths|myths"
  r"|youths|mouths|sloths|mammoths|growths|strengths|wreaths|tooths)[a-z]+ths"
  r"|[a-z]*illions?|mil|thirds|plus|半|分之|打|成(?!为)|割|折|以上|以下"
  r"|以内|未|超|余"
  rf"|(?:{'|'.join(sorted(SCALES, key=len, reverse=True))})s?)(?![a-z]))"
)
_SENTENCE_END = re.compile(r"[.?](?:\s|$)|[。？]")
_REFUSED = re.compile(r"(?i)(?<=[\d$%)])\s*[,;(]\s*(?:and\s|but\s)?not\s[^()]*\)?$")  # 18, not 17
# A word that is not a LaTeX command, a conjunction, a function, or a unit directly after a digit.
_PROSE = re.compile(
  r"(?<![\\A-Za-z\d{])(?!(?:and|or|sqrt|sin|cos|tan|log|mod)\b)[A-Za-z]{3,}"
  rf"|(?<![\d{FOREIGN}])[{FOREIGN}]{{2,}}"
)
_FORMULA = re.compile(r"(?<!\\)\$([^$\n]+)(?<!\\)\$|\\\((.+?)\\\)")


def extract(completion: str) -> str | None:
  """Returns the text of a completion's answer, or None if it has none.

  `math_correct` describes which of several answers is preferred.
  """
  for answer in marked_answers(completion):
    text = answer.text if answer.is_whole else _focus(answer.text)
    if text or answer.is_whole:
      return text
  return last_expression(after_thinking(completion))


def gold_answer(gold: str) -> str:
  """Returns the answer in a gold text.

  This is the first that exists of: the last box, the text after the last `####`, the text after the
  last `Answer:`, the entire text.
  """
  boxed = boxed_answer(gold)
  if boxed is not None:
    return boxed
  match = last_match(HASHES, gold) or last_match(phrases(gold), gold)
  return match[1] if match else gold


def _focus(line: str) -> str | None:
  """Returns the answer in the text that follows `Answer:` or `####` on its line.

  This is the last formula if there is one. Otherwise it is the first sentence, or the last number
  of that sentence if it is prose. A line of more than MAX_CHARS characters gives its last number.
  """
  if len(line) > MAX_CHARS:
    return last_expression(line)
  formulas = list(_FORMULA.finditer(line))
  # In "$5 more than $8" the dollar signs are a currency.
  if formulas and not _PROSE.search(clean(formula := formulas[-1][1] or formulas[-1][2])):
    around = (line[: formulas[-1].start()], line[formulas[-1].end() :])
    return stated(around[0], formula, around[1]) or line
  line = _REFUSED.sub("", line)
  end = _SENTENCE_END.search(line)
  sentence = without_ending(line[: end.start()] if end else line)
  text, value = read(sentence)
  if not isinstance(value, Number) and _PROSE.search(text) and not WORDS.fullmatch(clean(sentence)):
    return last_expression(sentence) or sentence
  return sentence


class _Token(NamedTuple):
  kind: str
  text: str
  start: int
  space: str  # before it


def last_expression(text: str) -> str | None:
  """Returns the expression with the last number of a text; None if it has none, or hedges it."""
  text = to_ascii(spell_scales(_MARKUP[1][0].sub(": ", text)))
  end = max(map(text.rfind, "0123456789"))
  if not text.isascii():
    tail = range(len(text) - 1, max(end, len(text) - MAX_CHARS), -1)
    end = next((i for i in tail if unicodedata.category(text[i]) in ("No", "Nl")), end)
  if end < 0:
    return None
  # Nothing is joined across lines. A piece that is cut off cannot be told from a whole.
  line = text.rfind("\n", 0, max(0, end - BEFORE_CHARS)) + 1
  start = max(line, end - 2 * MAX_CHARS)
  is_cut = start > line
  text = text[start : end + AFTER_CHARS]
  for pattern, replacement in _MARKUP:
    text = pattern.sub(replacement, text)
  tokens = _tokens(text)
  last = max((i for i, token in enumerate(tokens) if _is_number(token)), default=-1)
  if last < 0:
    return None
  first = stop = last
  while first and _joins(tokens, first - 1) is not False:
    first -= 1
  joins = False
  for i in range(first, len(tokens) - 1):
    own = _joins(tokens, i)
    joins = joins if own is None else own
    if i < last:
      first = first if joins else i + 1
    elif joins:
      stop = i + 1
    else:
      break
  if (first == 0 and is_cut) or tokens[stop].start - tokens[first].start > MAX_CHARS:
    return None
  i = first
  while i and (tokens[i - 1].kind in (*_OPERANDS, "operator") or tokens[i - 1].text in ",;"):
    i -= 1
  if tokens[stop].kind == "close" and tokens[i - 1].kind == "open" and i not in (0, first):
    first = i - 1  # several values in brackets, as in (3, 5)
  first, stop = _balanced(tokens, first, stop)
  begin = tokens[first].start
  end = tokens[stop].start + len(tokens[stop].text)
  span = text[begin:end].strip("*_ ").rstrip("-/ ")
  # Half of an operation.
  if re.match(r"[/^\u00d7\u00b7\u22c5\u00f7]|[-+*] ", span) or span.endswith(("^", "+", "*")):
    return None
  return stated(text[:begin], span, text[end:])


def stated(before: str, span: str, after: str) -> str | None:
  """Returns the value that a text states by an expression, or None if it hedges it."""
  before = before.replace("$", "").replace("\\(", "").replace("*", "")
  if _HEDGED_BEFORE.search(before[-100:]) or _HEDGED_AFTER.match(after.replace("$", "")):
    return None
  either = _OR.match(before[-100:])
  if either:
    other = last_expression(either[1])
    if other is None or not same(*(read(x)[1] or x for x in (other, span))):
      return None
  if changed := _CHANGED.match(after):
    span = f"{span} {changed[1]}"
  return f"-{span}" if _NEGATED.search(before[-20:]) else span


def _tokens(text: str) -> list[_Token]:
  tokens = []
  space = ""
  for match in _TOKEN.finditer(text):
    kind = match.lastgroup
    piece = match[0]
    if kind == "space":
      space += piece
      continue
    if match["named"] or piece in _FUNCTIONS:
      kind = "stop" if piece in _NAMED_STOPS else "name"
      kind = "relation" if piece in _NAMED_RELATIONS else kind
    elif kind == "other" or (kind == "letter" and not piece.isalpha()):
      is_symbol = unicodedata.category(piece) in _SYMBOLS or piece in _MARKS
      kind = "symbol" if is_symbol else "stop"
    tokens.append(_Token(kind, piece, match.start(), space))
    space = ""
  return tokens


def _is_number(token: _Token) -> bool:
  return token.kind == "number" or (
    token.kind == "symbol" and unicodedata.category(token.text) in ("No", "Nl")
  )


def _joins(tokens: list[_Token], i: int) -> bool | None:
  """Returns whether a token and the next belong to one expression; None if as the two before."""
  a, b = tokens[i : i + 2]
  after = tokens[i + 2] if i + 2 < len(tokens) else _Token("stop", "", 0, "\n")
  space = b.space
  if "\n" in space or "stop" in (a.kind, b.kind):
    return False
  if "relation" in (a.kind, b.kind):
    return "word" not in (a.kind, b.kind)
  if "word" in (a.kind, b.kind):
    return _joins_word(a, b, tokens[i + 2 : i + 4])
  if "operator" in (a.kind, b.kind):
    return _joins_operator(a, b)
  if "letter" in (a.kind, b.kind) and space:
    return _joins_letter(a, b, after)
  if b.kind == "close" or a.kind == "open":
    return True
  return not space or a.kind == "name" or (a.kind != "close" and b.kind != "open")


def _joins_word(a: _Token, b: _Token, following: list[_Token]) -> bool | None:
  after, then = (*following, *2 * [_Token("stop", "", 0, "\n")])[:2]
  if a.kind == "word":
    if a.text in (*_BETWEEN, "and", "by"):
      return None
    # "covid-19" and "abc5" are names.
    dashed = b.text == "-" and after.kind == "number" and not after.space
    return not b.space and a.text.isascii() and (b.kind == "number" or dashed)
  if a.kind not in _OPERANDS:
    return False
  if b.text in _BETWEEN:
    return after.kind in _STARTS or after.text == "by"
  if b.text == "and":  # 5 and 3/4
    return a.kind == "number" and (then.text == "/" or after.text.endswith("frac"))
  return not b.space and b.text.isascii() and a.kind == "number"


def _joins_operator(a: _Token, b: _Token) -> bool | None:
  if b.kind == "operator":
    if b.text == "%":
      return a.kind in _OPERANDS
    is_sign = b.text in "-\u00b1|\u221a" and b.space and a.kind == "operator"
    is_mark = b.text in ("_", "|") and b.space  # of a table
    is_article = a.kind == "letter" and a.text in "aAI" and b.space
    return is_sign or (
      a.kind in (*_OPERANDS, "operator", "open") and not is_mark and not is_article
    )
  if b.kind == "close":
    return True
  if a.text == "%":
    return not b.space
  if b.kind not in _STARTS:
    return False
  return None if b.space and a.text in "-+*|_" else True


def _joins_letter(a: _Token, b: _Token, after: _Token) -> bool | None:
  """The letters stand apart: as a variable, a times sign, an article or a unit."""
  if a.kind == "letter":
    is_times = a.text in "xX" and b.kind in _STARTS
    return None if is_times else b.kind == "name" and a.text not in "aAI"
  is_times = b.text in "xX" and after.kind in _STARTS
  is_variable = b.text.islower() and b.text not in "amgshl" and after.kind != "word"
  return a.kind in _OPERANDS and (is_times or is_variable) and after.text != "'"


def _balanced(tokens: list[_Token], first: int, stop: int) -> tuple[int, int]:
  """Returns the span without brackets at its ends that have no partner in it, or surround it."""
  while first < stop:
    depth = lowest = 0
    inner = []
    for token in tokens[first : stop + 1]:
      depth += (token.kind == "open") - (token.kind == "close")
      inner.append(depth)
    lowest = min(inner)
    opens = tokens[first].kind == "open"
    closes = tokens[stop].kind == "close"
    surrounded = opens and closes and min(inner[:-1]) > 0 and tokens[first].text != "{"
    if surrounded or (opens and depth > 0 and not closes):
      first += 1
    if surrounded or (closes and lowest < 0):
      stop -= 1
    elif not surrounded and not (opens and depth > 0 and not closes):
      break
  return first, stop
