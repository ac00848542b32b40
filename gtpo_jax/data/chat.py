"""Converts messages to token ids with the tokenizer's chat template, and token ids to text."""

from __future__ import annotations

import collections
import itertools
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtpo_jax.data.chat_template import (
  MAX_REASON_CHARS,
  NO_VARIABLES,
  TOKENIZER_DIR,
  ChatTemplate,
  Messages,
  Schemas,
  Variables,
)
from gtpo_jax.data.records import NO_ROLE, ROLES
from gtpo_jax.data.text_stream import TextStream, TokenTexts
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.files import local_copy, read_json, safe_join
from gtpo_jax.runtime.paths import storage_path

if TYPE_CHECKING:
  from transformers import PreTrainedConfig, PreTrainedTokenizerBase

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
# Tokens that some models write around thinking and calls. They are not special in their tokenizers.
WRITTEN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_MARK = re.compile("\x00([0-9]+)\x00")  # stands for a text in a rendered conversation
# Texts that a tokenizer must encode as its tokenizer.json does.
PROBES = ("Hello world, 12+34 = 46.\n  So x_1 is\tit.", " é 日本語 🙂", "def f(x):\n    return x")
MAX_TEMPLATES = 1024  # the roles and tools of conversations whose control tokens are kept


class Chat:
  """A tokenizer with its chat template and stop tokens.

  Args:
    tokenizer: a tokenizer of transformers.
    stop: ids that end a completion, in addition to the EOS and padding tokens. If the template ends
      a turn with another control token, that ends a completion too.
    variables: what the template reads besides a conversation.

  Attributes:
    control: the texts of the tokens that text from data must never become: all added tokens except
      single characters that are not special.
    pad: id of the padding token.
    stop: ids that end a completion, ascending.
    template: the chat template.
    texts: the texts of tokens.
    vocab_size: one more than the largest id.
  """

  def __init__(
    self,
    tokenizer: PreTrainedTokenizerBase,
    stop: Collection[int] = (),
    variables: Variables = NO_VARIABLES,
  ):
    self.tokenizer = tokenizer
    self.template = ChatTemplate(tokenizer, variables)
    added = {
      token_id: token
      for token_id, token in tokenizer.added_tokens_decoder.items()
      if len(token.content) > 1 or (token.content and token.special)
    }
    self.control = tuple(token.content for token in added.values())
    # A text may contain characters that the tokenizer does not know.
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id)
    unknown = {tokenizer.unk_token_id}.difference(ends)
    self._control_ids = frozenset(added.keys() - unknown)
    # The library can encode special tokens in a text as plain characters. It cannot do so for added
    # tokens that are not special, such as <|fim_prefix|>; these are split after their first
    # character.
    plain = [token.content for token in added.values() if not token.special]
    splits = (f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in plain)
    self._splits = re.compile("|".join(splits) or "(?!)")
    written = [token for token in plain if token in WRITTEN]
    self._written = re.compile("|".join(f"({re.escape(token)})" for token in written) or "(?!)")
    # By the roles of a conversation, the tools and the variables.
    self._template_controls: dict[tuple[tuple[str, ...], str], list[int]] = {}
    self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    self.stop = tuple(sorted({tokenizer.eos_token_id, self.pad, *stop}))
    # What the tokenizer puts before plain text: the beginning-of-text token of Llama, for example.
    start = tokenizer.encode("")
    self._start = start[:1] if start[:1] == [tokenizer.bos_token_id] else []
    self.vocab_size = 1 + max(*tokenizer.get_vocab().values(), *self.stop)
    # A fast tokenizer raises if one call changes its settings while another call runs.
    self._lock = threading.Lock()
    self.texts = TokenTexts(tokenizer, self._lock)
    self.stop = tuple(sorted({*self.stop, *self._end_of_turn()}))

  def _end_of_turn(self) -> list[int]:
    """Returns the control token that ends a turn of the template, unless a stop token does.

    In a base model with a template, the EOS token may be another one.
    """
    controls = self.controls(self.encode(self.template.after_turn()))
    return [] if set(self.stop) & {*controls} else controls[:1]

  def template_tokens(self) -> list[str]:
    """Returns the control tokens around a message of the user; all, if there is no template."""
    if not self.tokenizer.chat_template:
      return list(self.control)
    try:
      text = self.template.render([{"role": "user", "content": "x"}])
    except UserError:  # it accepts other conversations
      return []
    return [token for token in self.control if token in text]

  def encode_prompt(
    self, messages: Messages, tools: Schemas = (), variables: Variables = NO_VARIABLES
  ) -> list[int]:
    """Returns the ids of a conversation up to the start of the assistant's turn.

    Text from data never becomes a control token, except what a model writes around thinking and
    calls (`WRITTEN`), in messages of the assistant: templates change these, and most leave earlier
    thinking out. The schemas of tools and the template's variables are not data.

    Raises:
      UserError: a message has no text or a role that is not in `ROLES`, or the template does not
        accept the conversation.
    """
    for message in messages:
      if not message["content"].strip():
        raise UserError(f"the {message['role']} message is empty; give it some text")
      # A template makes a control token of a role, such as <|user|>, and could make any other.
      if message["role"] not in ROLES:
        raise UserError(f"a message has the role {message['role']!r}, {NO_ROLE}")
    if not any(token in message["content"] for message in messages for token in self.control):
      ids = self.encode(self.template.render(messages, tools, variables=variables))
      if self.controls(ids) == self._controls_of_template(messages, tools, variables):
        return ids
    return self._encode_separately(messages, tools, variables)

  def _encode_separately(
    self, messages: Messages, tools: Schemas, variables: Variables
  ) -> list[int]:
    """Encodes each text by itself, as plain characters, between the parts of the template.

    This is safe for texts that spell a control token, also together with the template around them.
    """
    texts: list[str] = []
    guarded = [{**message, "content": self._guarded(message, texts)} for message in messages]
    rendered = self.template.render(guarded, tools, variables=variables)
    ids = []
    found = collections.Counter()
    for i, part in enumerate(_MARK.split(rendered)):
      ids += self.encode_plain(texts[int(part)]) if i % 2 else self.encode(part)
      found.update([int(part)] if i % 2 else [])
    whole = filter(None, (_MARK.fullmatch(message["content"]) for message in guarded))
    needed = {int(mark[1]) for mark in whole}
    if needed - found.keys() or any(count > 1 for count in found.values()):
      raise UserError(
        f"{self.template.name} does not contain each message exactly once; set data.chat=False"
      )
    return ids

  def _guarded(self, message: Mapping[str, Any], texts: list[str]) -> str:
    """Returns the content of a message with marks for its texts, which are added to `texts`."""

    def mark(text: str) -> str:
      texts.append(text)
      return f"\x00{len(texts) - 1}\x00"

    content = message["content"]
    if message["role"] != "assistant" or not self._written.search(content):
      return mark(content)
    parts = []
    for part in filter(None, self._written.split(content)):
      text = part.strip()
      is_text = text and not self._written.fullmatch(part)
      parts.append(part.replace(text, mark(text)) if is_text else part)
    return "".join(parts)

  def _controls_of_template(
    self, messages: Messages, tools: Schemas, variables: Variables
  ) -> list[int]:
    """Returns the control tokens of the template around messages, in order."""
    key = (tuple(message["role"] for message in messages), str((tools, variables)))
    if key not in self._template_controls:
      if len(self._template_controls) >= MAX_TEMPLATES:
        self._template_controls.clear()
      harmless = [{**message, "content": "x"} for message in messages]
      ids = self.encode(self.template.render(harmless, tools, variables=variables))
      self._template_controls[key] = self.controls(ids)
    return self._template_controls[key]

  def controls(self, ids: Sequence[int]) -> list[int]:
    """Returns the control tokens among ids, in order."""
    return [token for token in ids if token in self._control_ids]

  def encode_text(self, text: str) -> list[int]:
    """Returns the ids of plain text without the chat template, as base models need it.

    The text never becomes a control token. It follows the beginning-of-text token if the tokenizer
    adds one.
    """
    return self._start + self.encode_plain(text)

  def encode_plain(self, text: str) -> list[int]:
    """Returns the ids of a text that never becomes a control token, and nothing else."""
    return self.encode(text, plain=True)

  def encode_completion(self, text: str) -> list[int]:
    """Returns the ids of an assistant's turn that is to be imitated, including its end token.

    What a model writes around thinking and calls (`WRITTEN`) is a token if the tokenizer has it. No
    other text becomes a control token.
    """
    parts = [part for part in self._written.split(text) if part]
    ids = [
      self.tokenizer.convert_tokens_to_ids([part])
      if self._written.fullmatch(part)
      else self.encode_plain(part)
      for part in parts
    ]
    return [*itertools.chain(*ids), self.tokenizer.eos_token_id]

  def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
    """Converts rows of token ids to texts without stop tokens."""
    kept = [[int(token) for token in row if token not in self.stop] for row in rows]
    with self._lock:
      return self.tokenizer.batch_decode(kept)

  def text_stream(self) -> TextStream:
    """Returns the text of a completion that has no tokens yet."""
    return TextStream(self.texts)

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Returns the text that each token adds to a completion; stop tokens appear by name.

    If a character consists of several tokens, the last of them adds it; the earlier ones add
    nothing. The last token also adds what is left of an incomplete character.
    """
    stream = self.text_stream()
    pieces = stream.add([int(token) for token in ids])
    if pieces:
      pieces[-1] += stream.incomplete()
    return pieces

  def encode(self, text: str, plain: bool = False) -> list[int]:
    """Encodes a text. If `plain`, control tokens in it are encoded as plain characters.

    Raises:
      UserError: the tokenizer does not know a character, or it makes a control token of a plain
        text in some other way, for example because it normalises the text first.
    """
    parts = self._splits.split(text) if plain else [text]
    ids = []
    with self._lock:
      for part in parts:
        try:
          ids += self.tokenizer.encode(part, add_special_tokens=False, split_special_tokens=plain)
        except Exception as error:  # tokenizers raises many types
          raise UserError(
            f"the tokenizer of {self.tokenizer.name_or_path!r} cannot encode a text: "
            f"{first_line(error)[:MAX_REASON_CHARS]}"
          ) from error
    if plain and (control := self.controls(ids)):
      name = self.tokenizer.added_tokens_decoder[control[0]].content
      raise UserError(
        f"the tokenizer of {self.tokenizer.name_or_path!r} encodes a text as its control token "
        f"{name!r}: {text[:MAX_REASON_CHARS]!r}"
      )
    return ids


def load_chat(path: str | Path = TOKENIZER_DIR, variables: Variables = NO_VARIABLES) -> Chat:
  """Loads a tokenizer folder, by default the small tokenizer of this package.

  All EOS ids of its generation_config.json end a completion.

  Args:
    path: the folder.
    variables: what its chat template reads besides a conversation.

  Raises:
    UserError: there is no tokenizer, it cannot be read, it has no EOS token, it needs custom code,
      or the library encodes texts otherwise than its tokenizer.json says.
  """
  import transformers

  transformers.logging.set_verbosity_error()
  path = storage_path(path)
  _check_files(path)
  stop = _stop_ids(path)
  try:
    with local_copy(path, FILES) as folder:
      config = _tokenizer_config(folder)
      tokenizer = transformers.AutoTokenizer.from_pretrained(
        str(folder), config=config, local_files_only=True
      )
      tokenizer = _as_in_file(tokenizer, folder)
    tokenizer.name_or_path = str(path)
    if tokenizer.eos_token_id is None:
      raise UserError(
        f"the tokenizer in {str(path)!r} has no eos_token, so no completion would ever end"
      )
    ChatTemplate(tokenizer, variables).check()
    chat = Chat(tokenizer, stop, variables)
  except UserError:
    raise
  except Exception as error:  # transformers, tokenizers, JSON and object stores raise many types
    reason = first_line(error)[:MAX_REASON_CHARS]
    raise UserError(f"the tokenizer in {str(path)!r} cannot be read: {reason}") from error
  return chat


def _as_in_file(tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
  """Returns a tokenizer that encodes texts as tokenizer.json says, if there is one.

  For some classes, such as LlamaTokenizerFast, versions of transformers replace parts of that file.
  """
  import tokenizers
  import transformers

  file = folder / "tokenizer.json"
  if not file.exists():
    return tokenizer
  truth = tokenizers.Tokenizer.from_file(str(file))
  expected = [truth.encode(text, add_special_tokens=False).ids for text in PROBES]
  is_same = lambda t: expected == [t.encode(text, add_special_tokens=False) for text in PROBES]
  if is_same(tokenizer):
    return tokenizer
  general = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
  if is_same(general):
    return general
  raise UserError(
    f"transformers {transformers.__version__} encodes texts otherwise than tokenizer.json says for "
    f"the class {type(tokenizer).__name__}; in tokenizer_config.json, set tokenizer_class to "
    "PreTrainedTokenizerFast"
  )


def _tokenizer_config(folder: Path) -> PreTrainedConfig:
  """Returns what the choice of a tokenizer's class depends on in config.json, if there is one.

  Transformers would read, check and expand the model's sizes too.
  """
  import transformers

  values = read_json(folder, "config.json") if (folder / "config.json").exists() else {}
  kind = values.get("model_type")
  known = isinstance(kind, str) and kind in transformers.CONFIG_MAPPING
  config = transformers.CONFIG_MAPPING[kind]() if known else transformers.PreTrainedConfig()
  config.name_or_path = str(folder)
  if isinstance(name := values.get("tokenizer_class"), str):
    config.tokenizer_class = name
  return config


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
