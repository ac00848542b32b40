"""Converts messages to token ids with the tokenizer's chat template, and token ids to text."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.files import read_json, safe_join

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase

TOKENIZER_DIR = Path(__file__).parent / "tokenizer"

# Files that a tokenizer may be read from.
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

REPLACEMENT = "\ufffd"  # stands for bytes that are not a complete character
MAX_CHARACTER_BYTES = 4
MAX_REASON_CHARS = 200

Messages = Sequence[dict[str, str]]


class Chat:
  """A tokenizer with its chat template and stop tokens.

  Args:
    tokenizer: a tokenizer of transformers.
    stop: ids that end a completion, in addition to the EOS and padding tokens.

  Attributes:
    control: the texts of all added tokens.
    pad: id of the padding token.
    stop: ids that end a completion, ascending.
    vocab_size: one more than the largest id.
  """

  def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Collection[int] = ()):
    self.tokenizer = tokenizer
    added = tokenizer.added_tokens_decoder.values()
    self.control = tuple(token.content for token in added)
    # The library can encode special tokens in a text as plain characters. It cannot do so for added
    # tokens that are not special, such as <|fim_prefix|>; these are split after their first
    # character.
    plain = [token.content for token in added if not token.special]
    splits = (f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in plain)
    self._splits = re.compile("|".join(splits) or "(?!)")
    self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    self.stop = tuple(sorted({tokenizer.eos_token_id, self.pad, *stop}))
    self.vocab_size = 1 + max(*tokenizer.get_vocab().values(), *self.stop)
    # A fast tokenizer raises if one call changes its settings while another call runs.
    self._lock = threading.Lock()

  def encode_prompt(self, messages: Messages) -> list[int]:
    """Returns the ids of a conversation up to the start of the assistant's turn.

    Text from data never becomes a control token.

    Raises:
      UserError: a message has no text, or the template does not accept the conversation.
    """
    for message in messages:
      if not message["content"].strip():
        raise UserError(f"the {message['role']} message is empty; give it some text")
    if not any(token in message["content"] for message in messages for token in self.control):
      return self._encode(self._render(messages))
    # A text spells a control token. Render the template with placeholders, and encode the texts
    # separately, as plain characters.
    marks = [f"\x00{i}\x00" for i in range(len(messages))]
    placeholders = [
      {**message, "content": mark} for message, mark in zip(messages, marks, strict=True)
    ]
    rest = self._render(placeholders)
    ids = []
    for mark, message in zip(marks, messages, strict=True):
      before, separator, rest = rest.partition(mark)
      if not separator or mark in rest:
        raise UserError(
          f"{self._template_name()} does not contain each message exactly once; set data.chat=False"
        )
      ids += self._encode(before) + self._encode(message["content"], plain=True)
    return ids + self._encode(rest)

  def encode_text(self, text: str) -> list[int]:
    """Returns the ids of plain text without the chat template, as base models need it.

    The text never becomes a control token.
    """
    return self._encode(text, plain=True)

  def encode_completion(self, text: str) -> list[int]:
    """Returns the ids of an assistant's turn, including its end token."""
    return [*self._encode(text, plain=True), self.tokenizer.eos_token_id]

  def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
    """Converts rows of token ids to texts without stop tokens."""
    kept = [[int(token) for token in row if token not in self.stop] for row in rows]
    with self._lock:
      return self.tokenizer.batch_decode(kept)

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Returns the text that each token adds to a completion; stop tokens appear by name.

    If a character consists of several tokens, the last of them adds it; the earlier ones add
    nothing.
    """
    ids = [int(token) for token in ids]
    with self._lock:
      single = {token: self.tokenizer.decode([token]) for token in set(ids)}
      pieces = []
      run = []  # tokens since the last complete character
      emitted = ""  # the part of their text that is already in `pieces`
      for i, token in enumerate(ids):
        run.append(token)
        text = single[token] if len(run) == 1 else self.tokenizer.decode(run)
        may_continue = len(run) < MAX_CHARACTER_BYTES and i < len(ids) - 1
        incomplete = text.endswith(REPLACEMENT) and may_continue
        text = text.rstrip(REPLACEMENT) if incomplete else text
        pieces.append(text[len(emitted) :])
        run, emitted = (run, text) if incomplete else ([], "")
    return pieces

  def _template_name(self) -> str:
    return f"the chat template of {self.tokenizer.name_or_path!r}"

  def _render(self, messages: Messages) -> str:
    if not self.tokenizer.chat_template:
      raise UserError(
        f"{self._template_name()} is missing; add one to its tokenizer_config.json or "
        "chat_template.jinja, or set data.chat=False"
      )
    try:
      return self.tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
      )
    except Exception as error:  # from jinja2, its sandbox, or the template
      reason = first_line(error)[:MAX_REASON_CHARS]
      raise UserError(f"{self._template_name()} rejects this conversation: {reason}") from error

  def _encode(self, text: str, plain: bool = False) -> list[int]:
    """Encodes a text. If `plain`, control tokens in it are encoded as plain characters."""
    parts = self._splits.split(text) if plain else [text]
    ids = []
    with self._lock:
      for part in parts:
        ids += self.tokenizer.encode(part, add_special_tokens=False, split_special_tokens=plain)
    return ids


def load_chat(path: str | Path = TOKENIZER_DIR) -> Chat:
  """Loads a tokenizer folder, by default the small tokenizer of this package.

  All EOS ids of its generation_config.json end a completion.

  Raises:
    UserError: there is no tokenizer, it cannot be read, it has no EOS token, or it needs custom
      code.
  """
  import os

  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  import transformers

  transformers.logging.set_verbosity_error()
  path = Path(path)
  _check_files(path)
  stop = _stop_ids(path)
  try:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
  except Exception as error:  # transformers, tokenizers and JSON raise many types
    raise UserError(
      f"the tokenizer in {str(path)!r} cannot be read: {first_line(error)}"
    ) from error
  if tokenizer.eos_token_id is None:
    raise UserError(
      f"the tokenizer in {str(path)!r} has no eos_token, so no completion would ever end"
    )
  return Chat(tokenizer, stop)


def _check_files(path: Path) -> None:
  """Raises UserError if a folder has no tokenizer, links to other folders, or custom code."""
  if not (path / "tokenizer_config.json").exists():
    raise UserError(f"no tokenizer in {str(path)!r}: it has no tokenizer_config.json")
  present = [name for name in FILES if (path / name).exists()]
  for name in present:
    safe_join(path, name)
  for name in ("tokenizer_config.json", "config.json"):
    if name in present and "auto_map" in read_json(path, name):
      raise UserError(
        f"{name} in {str(path)!r} refers to custom code (auto_map); "
        "code from a model folder is never executed"
      )


def _stop_ids(path: Path) -> list[int]:
  """Returns the EOS ids of generation_config.json, or [] if there is no such file."""
  if not (path / "generation_config.json").exists():
    return []
  value = read_json(path, "generation_config.json").get("eos_token_id")
  ids = [] if value is None else value if isinstance(value, list) else [value]
  if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
    raise UserError(
      f"generation_config.json in {str(path)!r} has eos_token_id = {ids!r}; "
      "it must be a token id or a list of them"
    )
  return ids
