"""Messages to token ids through the tokenizer's own chat template, and back."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gtpo_jax.errors import UserError

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase

TOKENIZER_DIR = Path(__file__).parent / "tokenizer"

Messages = Sequence[dict[str, str]]


class Chat:
  """A tokenizer with its chat template and its stop tokens."""

  def __init__(self, tokenizer: PreTrainedTokenizerBase):
    self.tokenizer = tokenizer
    self.control = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    self.pad = tokenizer.pad_token_id
    self.stop = tuple(sorted({tokenizer.eos_token_id, tokenizer.pad_token_id}))  # ids that end a completion
    self.vocab_size = len(tokenizer)

  def encode_prompt(self, messages: Messages) -> list[int]:
    """The ids of a conversation, ready for the assistant's turn. Text from data never becomes a control token.

    Raises:
      UserError: a message has no text.
    """
    for message in messages:
      if not message["content"].strip():
        raise UserError(f"the {message['role']} message is empty; give it some text")
    if not any(token in message["content"] for message in messages for token in self.control):
      return self._encode(self._render(messages))
    # Some text spells a control token: encode it apart from the template, as plain characters.
    marks = [f"\x00{i}\x00" for i in range(len(messages))]
    rest, ids = self._render([{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]), []
    for mark, message in zip(marks, messages, strict=True):
      before, rest = rest.split(mark)
      ids += self._encode(before) + self._encode(message["content"], plain=True)
    return ids + self._encode(rest)

  def encode_completion(self, text: str) -> list[int]:
    """The ids of an assistant's turn, its end token included."""
    return [*self._encode(text, plain=True), self.tokenizer.eos_token_id]

  def decode(self, tokens: np.ndarray, mask: np.ndarray) -> list[str]:
    """Completions i32[b, t] to text, end tokens left out."""
    rows = [[token for token in row[keep].tolist() if token not in self.stop] for row, keep in zip(tokens, mask, strict=True)]
    return self.tokenizer.batch_decode(rows)

  def _render(self, messages: Messages) -> str:
    return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)

  def _encode(self, text: str, plain: bool = False) -> list[int]:
    return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain)


@functools.cache
def load_chat(path: str | Path = TOKENIZER_DIR) -> Chat:
  """The chat of a tokenizer folder; the shipped small one by default."""
  import os
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  import transformers
  transformers.logging.set_verbosity_error()
  if not Path(path).is_dir():
    raise UserError(f"no tokenizer folder at {str(path)!r}")
  return Chat(transformers.AutoTokenizer.from_pretrained(str(path)))
