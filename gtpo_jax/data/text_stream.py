"""The texts of single tokens, and of a completion that grows."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # stands for bytes that are not a complete character
MAX_CHARACTER_BYTES = 4


class TokenTexts:
  """The texts of a tokenizer's tokens. Calls from several threads are safe.

  Args:
    tokenizer: a tokenizer of transformers.
    lock: is held while the tokenizer is called.
  """

  def __init__(self, tokenizer: PreTrainedTokenizerBase, lock: threading.Lock):
    self._tokenizer = tokenizer
    self._lock = lock
    self._single: dict[int, str] = {}  # the texts of single tokens after others
    self._letter = tokenizer.encode("a", add_special_tokens=False)

  def text_of(self, ids: list[int], at_start: bool) -> str:
    """Returns the text of tokens at the start of a completion, or after others."""
    with self._lock:
      return self._tokenizer.decode(ids) if at_start else self._text_after_others(ids)

  def single_texts(self, ids: Collection[int]) -> dict[int, str]:
    """Returns the texts of at least these tokens, each by itself after others."""
    if missing := set(ids).difference(self._single):
      with self._lock:
        for token in missing:
          self._single[token] = self._text_after_others([token])
    return self._single

  def _text_after_others(self, ids: list[int]) -> str:
    """Returns the text of tokens after others; SentencePiece strips a first space."""
    text = self._tokenizer.decode([*self._letter, *ids])
    return text.removeprefix(self._tokenizer.decode(self._letter))


class TextStream:
  """The text of a completion that grows, as the piece that each token adds.

  A piece never ends in bytes that later tokens may complete to a character.
  """

  def __init__(self, texts: TokenTexts):
    self._texts = texts
    self._at_start = True
    self._run: list[int] = []  # the latest tokens, whose last character is incomplete
    self._emitted = ""  # the part of their text that is already in a piece

  def add(self, ids: Sequence[int]) -> list[str]:
    """Adds tokens, and returns the piece of each of them."""
    single = self._texts.single_texts(ids)
    if not self._run and not self._at_start:
      pieces = [single[token] for token in ids]
      if not any(REPLACEMENT in piece for piece in pieces):
        return pieces
    return [self._add_one(token, single) for token in ids]

  def incomplete(self) -> str:
    """Returns the text that is not in a piece because its last character is incomplete."""
    text = self._texts.text_of(self._run, self._at_start) if self._run else ""
    return text[len(self._emitted) :]

  def _add_one(self, token: int, single: Mapping[int, str]) -> str:
    run = [*self._run, token]
    is_single = len(run) == 1 and not self._at_start
    text = single[token] if is_single else self._texts.text_of(run, self._at_start)
    rest = text  # the text of the tokens that stay in the run
    if not text.endswith(REPLACEMENT):
      run = []
      rest = ""
    elif len(run) == MAX_CHARACTER_BYTES:
      run, rest = self._without_first(run, text)
    before = len(self._emitted)
    self._at_start &= len(run) == len(self._run) + 1
    self._run = run
    self._emitted = rest.rstrip(REPLACEMENT)
    return text[before : len(text) - len(rest) + len(self._emitted)]

  def _without_first(self, run: list[int], text: str) -> tuple[list[int], str]:
    """Drops the bytes that begin a run but no character; returns the other tokens and their text.

    The text of a part is the same by itself only if the run is split between characters.
    """
    for count in range(1, len(run)):
      rest = self._texts.text_of(run[count:], at_start=False)
      if self._texts.text_of(run[:count], self._at_start) + rest == text:
        return run[count:], rest
    return [], ""
