"""Messages to token ids through the tokenizer's own chat template, and back."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.files import inside, read_json

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase

TOKENIZER_DIR = Path(__file__).parent / "tokenizer"

# What a tokenizer may be read from.
FILES = (
  "tokenizer_config.json",
  "tokenizer.json",
  "config.json",
  "generation_config.json",
  "vocab.json",
  "merges.txt",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "tokenizer.model",
)

BROKEN, LONGEST = (
  "\ufffd",
  4,
)  # what stands for bytes that are no character, and how many bytes one may have

Messages = Sequence[dict[str, str]]


class Chat:
  """A tokenizer with its chat template and its stop tokens."""

  def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Collection[int] = ()):
    self.tokenizer = tokenizer
    added = tokenizer.added_tokens_decoder.values()
    self.control = tuple(token.content for token in added)
    # The library can leave special tokens unread in a text; the others, such as <|fim_prefix|>, must be broken behind their first sign.
    breaks = (
      f"(?<={re.escape(word[0])})(?={re.escape(word[1:])})"
      for word in (token.content for token in added if not token.special)
    )
    self._breaks = re.compile("|".join(breaks) or "(?!)")
    self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    self.stop = tuple(
      sorted({tokenizer.eos_token_id, self.pad, *stop})
    )  # ids that end a completion
    self.vocab_size = 1 + max(
      *tokenizer.get_vocab().values(), *self.stop
    )  # one more than the largest id
    self._lock = (
      threading.Lock()
    )  # a fast tokenizer refuses to be set up for one call while another is under way

  def encode_prompt(self, messages: Messages) -> list[int]:
    """The ids of a conversation, ready for the assistant's turn. Text from data never becomes a control token.

    Raises:
      UserError: a message has no text, or the template does not take the conversation.
    """
    for message in messages:
      if not message["content"].strip():
        raise UserError(f"the {message['role']} message is empty; give it some text")
    if not any(token in message["content"] for message in messages for token in self.control):
      return self._encode(self._render(messages))
    # Some text spells a control token: encode it apart from the template, as plain characters.
    marks = [f"\x00{i}\x00" for i in range(len(messages))]
    rest = self._render(
      [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
    )
    ids = []
    for mark, message in zip(marks, messages, strict=True):
      before, found, rest = rest.partition(mark)
      if not found or mark in rest:
        raise UserError(
          f"the chat template of {self.tokenizer.name_or_path!r} does not put each message once; set data.chat=False"
        )
      ids += self._encode(before) + self._encode(message["content"], plain=True)
    return ids + self._encode(rest)

  def encode_text(self, text: str) -> list[int]:
    """The ids of bare text, without the chat template: for base models. It never becomes a control token."""
    return self._encode(text, plain=True)

  def encode_completion(self, text: str) -> list[int]:
    """The ids of an assistant's turn, its end token included."""
    return [*self._encode(text, plain=True), self.tokenizer.eos_token_id]

  def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
    """Completions, token ids each, to text, end tokens left out."""
    with self._lock:
      return self.tokenizer.batch_decode(
        [[int(token) for token in row if token not in self.stop] for row in rows]
      )

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """What each token of a completion adds to its text; end tokens by their names.

    A character that several tokens spell together is added by the last of them, and the others add nothing.
    """
    ids = [int(token) for token in ids]
    with self._lock:
      alone = {token: self.tokenizer.decode([token]) for token in set(ids)}
      pieces = []
      run = []
      begun = ""
      for place, token in enumerate(ids):
        run.append(token)
        text = alone[token] if len(run) == 1 else self.tokenizer.decode(run)
        open_end = text.endswith(BROKEN) and len(run) < LONGEST and place < len(ids) - 1
        text = text.rstrip(BROKEN) if open_end else text
        pieces.append(text[len(begun) :])
        run, begun = (run, text) if open_end else ([], "")
    return pieces

  def _render(self, messages: Messages) -> str:
    whose = f"the chat template of {self.tokenizer.name_or_path!r}"
    if not self.tokenizer.chat_template:
      raise UserError(
        f"{whose} is missing; put one into its tokenizer_config.json or chat_template.jinja, or set data.chat=False"
      )
    try:
      return self.tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
      )
    except Exception as error:  # jinja2's, the sandbox's, or whatever somebody's template comes to
      raise UserError(
        f"{whose} does not take this conversation: {first_line(error)[:200]}"
      ) from error

  def _encode(self, text: str, plain: bool = False) -> list[int]:
    pieces = self._breaks.split(text) if plain else [text]
    with self._lock:
      return [
        id_
        for piece in pieces
        for id_ in self.tokenizer.encode(
          piece, add_special_tokens=False, split_special_tokens=plain
        )
      ]


def load_chat(path: str | Path = TOKENIZER_DIR) -> Chat:
  """The chat of a tokenizer folder; the shipped small one by default. All EOS ids of its generation_config.json end a completion.

  Raises:
    UserError: there is no tokenizer, or it has no end token, or asks for code.
  """
  import os

  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  import transformers

  transformers.logging.set_verbosity_error()
  path = Path(path)
  if not (path / "tokenizer_config.json").exists():
    raise UserError(f"no tokenizer in {str(path)!r}: it has no tokenizer_config.json")
  present = [name for name in FILES if (path / name).exists()]
  for name in present:
    inside(path, name)
  for name in ("tokenizer_config.json", "config.json"):
    if name in present and "auto_map" in read_json(path, name):
      raise UserError(
        f"{name} in {str(path)!r} asks for code of its own (auto_map); nothing of a model folder is executed here"
      )
  ends = (
    read_json(path, "generation_config.json").get("eos_token_id")
    if "generation_config.json" in present
    else None
  )
  ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
  if any(not isinstance(end, int) or isinstance(end, bool) or end < 0 for end in ends):
    raise UserError(
      f"generation_config.json in {str(path)!r} has eos_token_id = {ends!r}; it must be a token id or a list of them"
    )
  try:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
  except Exception as error:  # transformers, tokenizers and JSON each have their own
    raise UserError(
      f"the tokenizer in {str(path)!r} cannot be read: {first_line(error)}"
    ) from error
  if tokenizer.eos_token_id is None:
    raise UserError(
      f"the tokenizer in {str(path)!r} has no eos_token, so that no completion would end"
    )
  return Chat(tokenizer, ends)
