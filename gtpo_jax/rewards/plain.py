"""Exact verifiers of plain answers: a word, a phrase or a code (`exact`), or a letter (`choice`).

They accept any text and never raise.
"""

from __future__ import annotations

import re

from gtpo_jax.rewards.math.extraction import boxed_answer, marked_answer

_SURROUNDINGS = " \t\r\n*`\"'"
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|tt)?|mathrm|mbox)\{([^{}]*)\}")
_LETTER = re.compile(r"[\s*`\"']*\(?([A-Ja-j])\)?[.):]?[\s*`\"']*")
# A letter that a text commits to: (B), **B** or B at the end of a line, or B. or B) at its start.
# Each run of white space and asterisks is read once: it is entered only where it begins, and
# possessively, so that a text of nothing else takes linear time.
_CHOICE = re.compile(
  r"\(([A-Ja-j])\)"
  r"|(?:\A[\s*]*+|(?<![\s*])(?:[^\S\n]|\*)*+\n[\s*]*+)([A-J])[.):](?=[\s*]|$)"
  r"|(?:^|(?<=[\s*:]))([A-J])(?=(?:[^\S\n]|[.*])*+(?:\n|\Z))",
  re.MULTILINE,
)
# A letter at the start of a marked answer, as in "Answer: B) because".
_MARKED_CHOICE = re.compile(r"[\s*`\"']*\(?([A-Ja-j])(?:[.):,\s*`\"']|$)")


def exact_correct(completion: str, answer: str) -> bool:
  """Returns whether the completion's answer is `answer`, character by character.

  The completion's answer is the last `\\boxed{...}`, or what follows the last `Answer:` or `####`
  on its line; without these it is the last line, or the entire text. Case matters. Spaces, quotes
  and asterisks around an answer do not, nor does a full stop after it or the width of spaces in it.
  If `answer` has a box, its content is compared.
  """
  boxed = boxed_answer(answer)
  gold = plain_answer(answer if boxed is None else boxed)
  marked = marked_answer(completion)
  if marked is not None:
    return plain_answer(marked) == gold
  return gold in (plain_answer(completion), exact_vote(completion))


def exact_vote(completion: str) -> str | None:
  """Returns the completion's answer as `exact_correct` compares it, or None if it has none."""
  text = marked_answer(completion)
  if text is None:
    text = next((line for line in reversed(completion.splitlines()) if line.strip()), "")
  return plain_answer(text) or None


def plain_answer(text: str) -> str:
  """Returns the text without \\text{...} and the marks around an answer, with single spaces."""
  text = _TEXT_COMMAND.sub(r"\1", text)
  stripped = text.strip(_SURROUNDINGS).removesuffix(".").strip(_SURROUNDINGS)
  return " ".join((stripped or text).split())


def choice_correct(completion: str, answer: str) -> bool | None:
  """Returns whether the completion chooses the letter `answer`; None if that is none from A to J.

  The choice is the letter at the start of the last `\\boxed{...}`, or of what follows the last
  `Answer:` or `####`. Without these it is the last letter from A to J in parentheses, at the end
  of a line, or at the start of a line before a full stop, parenthesis or colon.
  """
  gold = _LETTER.fullmatch(_TEXT_COMMAND.sub(r"\1", answer))
  return None if gold is None else choice_vote(completion) == gold[1].upper()


def choice_vote(completion: str) -> str | None:
  """Returns the letter that a completion chooses, or None."""
  if whole := _LETTER.fullmatch(completion):
    return whole[1].upper()
  marked = marked_answer(completion)
  if marked is not None:
    chosen = _MARKED_CHOICE.match(_TEXT_COMMAND.sub(r"\1", marked))
    return chosen[1].upper() if chosen else None
  chosen = None
  for chosen in _CHOICE.finditer(completion):  # noqa: B007
    pass
  return next(filter(None, chosen.groups())).upper() if chosen else None
