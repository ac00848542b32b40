"""Exact verifiers of plain answers: a word, a phrase or a code (`exact`), or a letter (`choice`).

They accept any text and never raise.
"""

from __future__ import annotations

import re

from gtpo_jax.rewards.finding import after_thinking, boxed_answer, marked_answer, without_ending
from gtpo_jax.rewards.languages import nfc, to_ascii, words_of

_SURROUNDINGS = " \t\r\n*`\"'"
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|tt)?|mathrm|mbox)\{([^{}]*)\}")
_LETTER = re.compile(r"[\s*`\"']*\(?([A-Ja-j])\)?[.):!]?[\s*`\"']*")
# A letter that a text commits to: (B), **B** or B at the end of a line, or B. or B) at its start.
# Each run of white space and asterisks is read once: it is entered only where it begins, and
# possessively, so that a text of nothing else takes linear time.
_CHOICE = re.compile(
  r"\(([A-Ja-j])\)"
  r"|(?:\A[\s*]*+|(?<![\s*])(?:[^\S\n]|\*)*+\n[\s*]*+)([A-J])[.):](?=[\s*]|$)"
  r"|(?:^|(?<=[\s*:]))([A-J])(?=(?:[^\S\n]|[.*])*+(?:\n|\Z))",
  re.MULTILINE,
)
_BOLD = re.compile(r"\*\*(\(?[A-Ja-j]\)?)\*\*")
_MATH_MARKS = re.compile(r"\\[()\[\] ,;:!]|\$")
# The start of a marked answer: a word such as "Option", and a letter, as in "B) because".
_MARKED_CHOICE = re.compile(
  rf"(?i:(?:\w{{1,8}}\s{{1,3}}){{0,2}}?(?:{words_of('options')})\s{{0,3}}(?:is\s|:)?)?"
  r"[\s*`\"']*+\(?([A-Ja-j])(?:[.):,;!\s*`\"'。]|[\u3040-\u9fff\uac00-\ud7a3]|$)"
)
# "a man" and "I think": the letter is a word, unless a reason follows.
_ARTICLE = re.compile(
  r"(?:a\b|I\b|A\b)\s+(?!(?:because|since|as|for|is|or|and|due|with|given|rather"
  r"|instead|[&A-J(])\b)[a-z]"
)
_JOINED = (
  r"[\s*`\"').:(\[]*(?:(?:,|;|/|&|\+|-+>?|–|—|~|\||∨|∧|!?=+>?|[<>\u2190-\u21ff≠∪∩]"
  r"|\\(?:cup|cap|lor|land|vee|wedge|to|iff|implies|(?:long)?(?:left)?(?:right|Right)arrow)"
  r"|\b(?:and|or|to|through|then|also|as well as|plus|xor|vs\.?|versus|but also|or else|otherwise"
  r"|alternatively|with|along with|together with|und|oder|ou|et|o|y|e|или|и|nor)(?!\w)"
  r"|\bbut(?=\s+\(?[A-J]\)?\s+(?:\w+\s+)?(?:also|too|as well)\b)"
  r"|和|或|、|と|또는)[\s*`\"']*)+(?:(?:either|option|choice|letter|maybe|perhaps|possibly)\s)*\(?"
)
# With nothing between them, letters are joined unless a sentence begins with the next.
JOINED_AFTER = re.compile(
  rf"(?i:{_JOINED})[A-J](?![\w'])|[\s*`\"').:?]+[(\[]?[A-J](?=[\s)\].,:;?]*(?:$|[A-J(]))"
)
_JOINED_BEFORE = re.compile(rf"[A-J]\)?(?i:{_JOINED})$|\([A-J]\)[^\S\n]*\($")
_REFUSED_BEFORE = re.compile(
  r"(?i)(?:\b(?:not|never|neither|except|besides|unlike|than|cannot|(?:\w+thing|all)\s+but"
  r"|(?:none|instead|opposite)\s+of|(?:rul|cross)\w*\s+out|(?:eliminat|reject|discard|exclud|avoid"
  r"|ignor)\w*)|n't|\\l?n(?:eg|ot|e))\s+(?:be\s)?(?:option\s|choice\s)?\(?$"
)
_REFUSED_AFTER = re.compile(
  r"(?i)[).*\s]*(?:(?:,?\s*which\s)?\b(?:is|was|are|seems|looks|must be|would be|cannot|can't"
  r"|can be)\s*"
  r"(?:n't|(?:\w+\s(?:but\s)?)?(?:not|wrong|false|incorrect|impossible|ruled|rejected|excluded"
  r"|eliminated)|a\s(?:trap|decoy|distractor)|be)\b|[-–—,(\[]\s*(?:wrong|incorrect)\b|[✗✘❌])"
)
# Further choices in a sentence that has begun with one.
_LISTED = re.compile(r"\(([A-J])\)|\([^()]*\)|(?<=\s)([A-J])\)")


def exact_correct(completion: str, answer: str) -> bool:
  """Returns whether the completion's answer is `answer`, character by character.

  The completion's answer is the first of `finding.marked_answers`; without a mark it is the last
  line, or the entire text after the thinking. Case matters. Spaces, quotes and asterisks around an
  answer do not, nor do what ends its sentence, the width of spaces in it, or whether a letter and
  its accent are one character. If `answer` has a box, its content is compared.
  """
  boxed = boxed_answer(answer)
  gold = plain_answer(answer if boxed is None else boxed)
  marked = marked_answer(completion)
  if marked is not None:
    return gold in (plain_answer(marked), plain_answer(without_ending(marked)))
  return gold in (plain_answer(after_thinking(completion)), exact_vote(completion))


def exact_vote(completion: str) -> str | None:
  """Returns the completion's answer as `exact_correct` compares it, or None if it has none."""
  text = marked_answer(completion)
  if text is None:
    lines = after_thinking(completion).splitlines()
    text = next((line for line in reversed(lines) if line.strip()), "")
  return plain_answer(text) or None


def plain_answer(text: str) -> str:
  """Returns the text without \\text{...} and the marks around an answer, with single spaces."""
  text = _TEXT_COMMAND.sub(r"\1", nfc(text))
  stripped = text.strip(_SURROUNDINGS).removesuffix(".").strip(_SURROUNDINGS)
  return " ".join((stripped or text).split())


def choice_correct(completion: str, answer: str) -> bool | None:
  """Returns whether the completion chooses the letter `answer`; None if that is none from A to J.

  The choice is the letter at the start of the first of `finding.marked_answers`, also after a word
  such as "Option". Without one there, or without a mark, it is the last letter from A to J in
  parentheses, at the end of a line, or at the start of a line before a full stop, parenthesis or
  colon. Letters that are joined, as in "A or B" and "(A)-(D)", are no choice, and a letter is none
  that the text calls wrong.
  """
  gold = _LETTER.fullmatch(_letters(answer))
  return None if gold is None else choice_vote(completion) == gold[1].upper()


def choice_vote(completion: str) -> str | None:
  """Returns the letter that a completion chooses, or None."""
  text = _letters(after_thinking(completion))
  if whole := _LETTER.fullmatch(text):
    return whole[1].upper()
  marked = marked_answer(text)
  if marked is not None:
    text = _letters(marked).strip()
    chosen = _MARKED_CHOICE.match(text)
    if chosen and not _ARTICLE.match(text) and not _is_refused(text, *chosen.span(1)):
      further = _LISTED.finditer(text, chosen.end(1))
      joined = _is_joined(text, *chosen.span(1)) or any(
        match.lastindex and not _is_refused(text, *match.span(match.lastindex)) for match in further
      )
      return None if joined else chosen[1].upper()
  found = None
  for match in _CHOICE.finditer(text):
    span = match.span(match.lastindex)
    if not _is_refused(text, *span):
      found = None if _is_joined(text, *span) else match[match.lastindex].upper()
  return found


def _is_refused(text: str, start: int, end: int) -> bool:
  """Returns whether a text calls the letter from `start` to `end` wrong."""
  before = _REFUSED_BEFORE.search(text[max(0, start - 40) : start])
  return bool(before or _REFUSED_AFTER.match(text, end))


def _is_joined(text: str, start: int, end: int) -> bool:
  """Returns whether a letter is one of several, as in "A or B"; one of "A; B is wrong" is not."""
  after = JOINED_AFTER.match(text, end)
  if (
    after
    and re.fullmatch(r"\)?[,;.]\s*\(?\w", after[0])
    and _REFUSED_AFTER.match(text, after.end())
  ):
    after = None
  return bool(after or _JOINED_BEFORE.search(text[max(0, start - 40) : start]))


def _letters(text: str) -> str:
  """Returns a text without mathematical marks, and with the letters of ASCII."""
  text = to_ascii(text)
  return _MATH_MARKS.sub("", _BOLD.sub(r"\1", _TEXT_COMMAND.sub(r"\1", text)))
