"""Stop strings: a completion or its turn ends as soon as its text contains one of them.

The devices know only stop tokens. After each chunk, the host therefore searches the text of the new
tokens. A completion whose text contains a stop string ends with the token that completed the first
match, as if nothing had been drawn after it: the tokens that the chunk has drawn beyond it are
dropped. So the result does not depend on how many tokens a chunk has. If a completion has several
turns, each is searched by itself, and what it has read between them is not.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

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
    """Returns a search in completions that are being sampled."""
    return StopSearch(self, self._new_text)

  def ends_in(self, text: str, begin: int) -> bool:
    """Whether a match ends in a text after its first `begin` characters."""
    return any(text.find(string, max(begin - len(string) + 1, 0)) >= 0 for string in self.strings)

  def occurs_in(self, tokens: Sequence[int]) -> bool:
    """Whether the decoded text of a completion contains a stop string."""
    (text,) = self._decode([tokens])
    return any(string in text for string in self.strings)


@dataclasses.dataclass
class _Progress:
  """How far the latest turn of a completion has been searched."""

  add_tokens: AddTokens
  begin: int  # the completion's tokens before the turn
  count: int  # its tokens up to where the turn has been searched
  tail: str = ""  # the end of their text, in which a match may have begun


class StopSearch:
  """Finds where completions or their turns end. Each token is decoded once."""

  def __init__(self, stop: StopStrings, new_text: Callable[[], AddTokens]):
    self._stop = stop
    self._new_text = new_text
    self._longest = max(map(len, stop.strings))
    self._progress: dict[tuple[int, int], _Progress] = {}

  def end(self, completion: tuple[int, int], tokens: np.ndarray, turn: int = 0) -> int | None:
    """Searches the tokens that a completion has got since the last call, or since its turn began.

    A match in the pieces of the tokens counts only if the text of all tokens, decoded at once,
    contains a stop string too. The two differ at a stop token, which has a piece but no text, and
    for some tokenizers after bytes that are no characters.

    Args:
      completion: (prompt, index in its group).
      tokens: i32[length], all its tokens so far.
      turn: the number of those before its latest turn, which are not searched.

    Returns:
      The number of tokens up to and including the one that completed the first match; None if there
      is none.
    """
    progress = self._progress.get(completion)
    if progress is None or progress.begin != turn:
      progress = self._progress[completion] = _Progress(self._new_text(), turn, turn)
    first = progress.count
    pieces = progress.add_tokens(tokens[first:].tolist())
    text = progress.tail + "".join(pieces)
    if self._stop.ends_in(text, len(progress.tail)):
      end = len(progress.tail)
      for count, piece in enumerate(pieces, first + 1):
        begin = end
        end += len(piece)
        if self._stop.ends_in(text[:end], begin) and self._stop.occurs_in(tokens[turn:count]):
          del self._progress[completion]
          return count
    progress.count = len(tokens)
    progress.tail = text[max(len(text) - self._longest + 1, 0) :]
    return None
