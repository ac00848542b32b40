"""Stop strings: a completion or its turn ends as soon as its text contains one of them.

The devices know only stop tokens. After each chunk, the host therefore searches the text of the new
tokens. A completion whose text contains a stop string ends with the token that completed the first
match, as if nothing had been drawn after it: the tokens that the chunk has drawn beyond it are
dropped. So the result does not depend on how many tokens a chunk has. If a completion has several
turns, each is searched by itself, and what it has read between them is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

MAX_STOP_STRINGS = 16
NOT_A_CHARACTER = "\ufffd"  # what tokenizers write for bytes that are no character
_SURROGATE = re.compile("[\ud800-\udfff]")
# Takes the next tokens of a completion, and returns the text that each of them adds.
AddTokens = Callable[[Sequence[int]], list[str]]


def is_stop(value: Any) -> bool:
  """Returns whether a value is a tuple of at most 16 strings that a completion may contain."""
  return (
    isinstance(value, tuple)
    and len(value) <= MAX_STOP_STRINGS
    and all(isinstance(string, str) and _is_possible(string) for string in value)
  )


def _is_possible(string: str) -> bool:
  return bool(string) and NOT_A_CHARACTER not in string and not _SURROGATE.search(string)


class StopStrings:
  """Strings that end a completion, and a tokenizer's functions to find them.

  Attributes:
    strings: the strings, none of them empty.
  """

  def __init__(
    self,
    strings: Sequence[str],
    new_text: Callable[[], AddTokens],
    decode: Callable[[Sequence[Sequence[int]]], list[str]],
  ):
    """Args:
    strings: non-empty strings.
    new_text: begins the text of a completion. A character that consists of several tokens must be
      in the piece of the last of them.
    decode: turns rows of token ids into texts.
    """
    self.strings = tuple(strings)
    self._new_text = new_text
    self._decode = decode

  def cut(self, text: str) -> str:
    """Returns the part of a text before the earliest match; all of it if there is none."""
    starts = [start for string in self.strings if (start := text.find(string)) >= 0]
    return text[: min(starts, default=len(text))]

  def without_begun(self, text: str) -> str:
    """Returns a text without an end that further tokens may complete to a stop string."""
    longest = max(map(len, self.strings))
    for start in range(max(len(text) - longest + 1, 0), len(text)):
      if any(string.startswith(text[start:]) for string in self.strings):
        return text[:start]
    return text

  def search(self) -> StopSearch:
    """Returns a search in a turn that begins."""
    return StopSearch(self, self._new_text())

  def ends_in(self, text: str, begin: int) -> bool:
    """Whether a match ends in a text after its first `begin` characters."""
    return any(text.find(string, max(begin - len(string) + 1, 0)) >= 0 for string in self.strings)

  def occurs_in(self, tokens: Sequence[int]) -> bool:
    """Whether the decoded text of a completion contains a stop string."""
    (text,) = self._decode([tokens])
    return any(string in text for string in self.strings)


class StopSearch:
  """Finds where a turn ends. Each token is decoded once."""

  def __init__(self, stop: StopStrings, add_tokens: AddTokens):
    """Args:
    stop: the strings.
    add_tokens: adds to the text of the turn, which is empty.
    """
    self._stop = stop
    self._add_tokens = add_tokens
    self._longest = max(map(len, stop.strings))
    self._tokens: list[int] = []
    self._tail = ""  # the end of their text, in which a match may have begun

  def add(self, tokens: Sequence[int]) -> int | None:
    """Searches the next tokens of the turn.

    A match in the pieces of the tokens counts only if the text of all tokens, decoded at once,
    contains a stop string too. The two differ at a stop token, which has a piece but no text, and
    for some tokenizers after bytes that are no characters.

    Returns:
      How many of these tokens there are up to the one that completed the first match, which ends
      the search; None if there is no match.
    """
    before = len(self._tokens)
    self._tokens += tokens
    pieces = self._add_tokens(tokens)
    text = self._tail + "".join(pieces)
    if self._stop.ends_in(text, len(self._tail)):
      end = len(self._tail)
      for count, piece in enumerate(pieces, 1):
        begin = end
        end += len(piece)
        drawn = self._tokens[: before + count]
        if self._stop.ends_in(text[:end], begin) and self._stop.occurs_in(drawn):
          return count
    self._tail = text[max(len(text) - self._longest + 1, 0) :]
    return None
