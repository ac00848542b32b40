"""Constraints: write about a topic and follow one to three instructions that code can check."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from gtpo_jax.data.records import Problem, user
from gtpo_jax.data.tasks.sentences import TOPICS, WORDS
from gtpo_jax.data.tasks.task import split
from gtpo_jax.runtime.errors import UserError

CONSTRAINT_SLIP = 0.7  # the teacher overlooks one of the instructions, at `slips` = 1
MAX_CONSTRAINTS = 3
ENDINGS = ("That is all I know.", "What do you think?", "Good night!")
_TOPICS = TOPICS.split()
_WORDS = WORDS.split()
_WORD = re.compile(r"\w+")  # as the instruction counts them
FILLER_SENTENCE = "Many people have seen one of them before. "  # 8 words, without a comma


@dataclasses.dataclass
class Draft:
  """A teacher's text, in parts."""

  body: str
  first: str = ""
  lists: str = ""
  last: str = ""
  least_words: int = 0
  quoted: bool = False

  def text(self) -> str:
    """Returns the parts as one text."""
    make = lambda body: "\n".join(filter(None, (self.first, body, self.lists, self.last)))
    body = self.body
    while len(_WORD.findall(make(body))) < self.least_words:
      body += FILLER_SENTENCE
    return f'"{make(body)}"' if self.quoted else make(body)


@dataclasses.dataclass(frozen=True)
class Constraint:
  """One instruction of a problem."""

  name: str  # its kind, a key of `rewards.constraints.instructions.INSTRUCTIONS`
  arguments: dict[str, Any]  # of the kind
  sentence: str  # the instruction as the prompt states it
  follow: Callable[[Draft], None]  # changes a draft so that it follows the instruction


def _setting(**values: Any) -> Callable[[Draft], None]:
  def follow(draft: Draft) -> None:
    for name, value in values.items():
      setattr(draft, name, value)

  return follow


def _adding(part: str, text: str) -> Callable[[Draft], None]:
  return lambda draft: setattr(draft, part, getattr(draft, part) + text)


def _at_least_words(rng: np.random.Generator) -> Constraint:
  n = (25, 40, 60)[rng.integers(3)]
  arguments = {"num_words": n, "relation": "at least"}
  sentence = f"Write at least {n} words."
  return Constraint("length_constraints:number_words", arguments, sentence, _setting(least_words=n))


def _bullets(rng: np.random.Generator) -> Constraint:
  n = int(rng.integers(2, 6))
  sentence = f"Include exactly {n} bullet points, on lines that begin with a hyphen."
  lines = "\n".join(f"- fact {i + 1}" for i in range(n))
  follow = _setting(lists=lines)
  return Constraint("detectable_format:number_bullet_lists", {"num_bullets": n}, sentence, follow)


def _sections(rng: np.random.Generator) -> Constraint:
  n = int(rng.integers(2, 4))
  arguments = {"section_spliter": "Section", "num_sections": n}
  sentence = f"Write {n} sections, which begin with Section 1, Section 2 and so on."
  follow = _setting(lists="\n".join(f"Section {i + 1}\nMore." for i in range(n)))
  return Constraint("detectable_format:multiple_sections", arguments, sentence, follow)


def _highlights(rng: np.random.Generator) -> Constraint:
  n = int(rng.integers(1, 4))
  sentence = f"Highlight at least {n} part{'s' * (n > 1)} of the text in stars, as in *this part*."
  follow = _adding("body", "See " + " and ".join(["*this*"] * n) + ". ")
  return Constraint(
    "detectable_format:number_highlighted_sections", {"num_highlights": n}, sentence, follow
  )


def _words(rng: np.random.Generator) -> Constraint:
  chosen = rng.choice(len(_WORDS), int(rng.integers(1, 3)), replace=False)
  words = [_WORDS[i] for i in chosen]
  sentence = f"Use the word{'s' * (len(words) > 1)} {' and '.join(words)}."
  follow = _adding("body", f"There was also {' and '.join(words)}. ")
  return Constraint("keywords:existence", {"keywords": words}, sentence, follow)


def _repeated_word(rng: np.random.Generator) -> Constraint:
  word = _WORDS[rng.integers(len(_WORDS))]
  n = int(rng.integers(2, 4))
  arguments = {"keyword": word, "frequency": n, "relation": "at least"}
  sentence = f"Use the word {word} at least {n} times."
  follow = _adding("body", f"There was {' and '.join([word] * n)}. ")
  return Constraint("keywords:frequency", arguments, sentence, follow)


def _title(rng: np.random.Generator) -> Constraint:
  sentence = "Begin with a title in double angular brackets, such as <<title>>."
  return Constraint("detectable_format:title", {}, sentence, _setting(first="<<My title>>"))


def _placeholders(rng: np.random.Generator) -> Constraint:
  n = int(rng.integers(1, 4))
  sentence = f"Include at least {n} placeholder{'s' * (n > 1)} in square brackets, such as [name]."
  follow = _adding("body", "Ask " + " and ".join(["[name]"] * n) + ". ")
  return Constraint(
    "detectable_content:number_placeholders", {"num_placeholders": n}, sentence, follow
  )


def _quotation(rng: np.random.Generator) -> Constraint:
  sentence = "Wrap the whole answer in double quotation marks."
  return Constraint("startend:quotation", {}, sentence, _setting(quoted=True))


def _ending(rng: np.random.Generator) -> Constraint:
  ending = ENDINGS[rng.integers(len(ENDINGS))]
  sentence = f"End with exactly this: {ending}"
  return Constraint("startend:end_checker", {"end_phrase": ending}, sentence, _setting(last=ending))


def _postscript(rng: np.random.Generator) -> Constraint:
  sentence = "Add a postscript at the end that begins with P.S."
  return Constraint(
    "detectable_content:postscript",
    {"postscript_marker": "P.S."},
    sentence,
    _setting(last="P.S. Good luck."),
  )


# A problem has at most one constraint of each group, so that all of them can be followed.
GROUPS: tuple[tuple[Callable[[np.random.Generator], Constraint], ...], ...] = (
  (_at_least_words,),
  (_bullets, _sections, _highlights),
  (_words, _repeated_word),
  (_title, _placeholders),
  (_quotation, _ending, _postscript),
)


class Constraints:
  """Constraints: "Write a short text about a whale. Use the word rope. End with exactly this: ...".

  The kinds are eleven of IFEval (2311.07911), which `rewards.constraints` checks without further
  packages. The teacher often overlooks one of the instructions.
  """

  name = "constraints"
  largest = 1
  size = 1 << 13

  def __init__(self, terms: int = 0):
    if not 0 <= terms <= MAX_CONSTRAINTS:
      raise UserError(
        f"the task 'constraints' needs data.terms in 0..{MAX_CONSTRAINTS}, got {terms}; 0 is one "
        "to three constraints"
      )
    self.terms = terms
    # Problems with the same text have the same code.
    prompts = [self.problem(index).messages[-1]["content"].encode() for index in range(self.size)]
    digests = b"".join(hashlib.blake2b(prompt, digest_size=8).digest() for prompt in prompts)
    self.train_ids, self.held_out_ids = split(self, np.frombuffer(digests, np.uint64))

  def constraints(self, index: int) -> tuple[str, list[Constraint]]:
    """Returns the topic and the constraints of a problem."""
    rng = np.random.default_rng((self.terms, index))
    topic = _TOPICS[rng.integers(len(_TOPICS))]
    count = self.terms or int(rng.integers(1, MAX_CONSTRAINTS + 1))
    groups = sorted(rng.choice(len(GROUPS), count, replace=False))
    return topic, [GROUPS[i][rng.integers(len(GROUPS[i]))](rng) for i in groups]

  def problem(self, index: int) -> Problem:
    """Returns the topic and the constraints as an instruction; the answer lists their kinds."""
    topic, constraints = self.constraints(index)
    article = "an" if topic[0] in "aeiou" else "a"
    sentences = " ".join(constraint.sentence for constraint in constraints)
    names = [constraint.name for constraint in constraints]
    extra = {
      "instruction_id_list": names,
      "kwargs": [constraint.arguments for constraint in constraints],
    }
    prompt = user(f"Write a short text about {article} {topic}. {sentences}")
    return Problem(f"constraints-{index}", prompt, ", ".join(names), "constraints", extra)

  def demonstration(self, index: int, rng: np.random.Generator, slips: float) -> str:
    """Returns a text that follows the constraints, of which one is often overlooked."""
    topic, constraints = self.constraints(index)
    overlooked = -1
    if rng.random() < slips * CONSTRAINT_SLIP:
      overlooked = int(rng.integers(len(constraints)))
    draft = Draft(f"This is about the {topic}. ")
    for i, constraint in enumerate(constraints):
      if i != overlooked:
        constraint.follow(draft)
    return draft.text()
