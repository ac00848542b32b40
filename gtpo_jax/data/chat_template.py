"""A tokenizer's chat template: a program, often from elsewhere, that is run with limits."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtpo_jax.data.records import user
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.limits import limited_memory, within
from gtpo_jax.storage.files import read_json

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase

TOKENIZER_DIR = Path(__file__).parent / "tokenizer"
MAX_REASON_CHARS = 200
RENDER_LIMIT_S = 10.0  # for one conversation; a template can contain loops
RENDER_MEMORY = 2**30  # bytes for the first conversation

Messages = Sequence[Mapping[str, Any]]
Schemas = Sequence[Mapping[str, Any]]  # of tools


class ChatTemplate:
  """The chat template of a tokenizer of transformers, which may have none."""

  def __init__(self, tokenizer: PreTrainedTokenizerBase):
    self._tokenizer = tokenizer

  def render(self, messages: Messages, tools: Schemas = (), turn_follows: bool = True) -> str:
    """Returns a conversation as text, up to the start of the assistant's turn.

    Args:
      messages: the conversation.
      tools: schemas of the tools that the assistant may call.
      turn_follows: False ends the text with the last message instead.

    Raises:
      UserError: there is no template, it does not accept the conversation, or it takes longer than
        `RENDER_LIMIT_S`.
    """
    if not self._tokenizer.chat_template:
      raise UserError(
        f"{self.name} is missing; add one to its tokenizer_config.json or "
        "chat_template.jinja, or set data.chat=False"
      )
    copies = [dict(message) for message in messages]  # a template may change what it gets
    render = lambda: self._tokenizer.apply_chat_template(
      copies, tools=list(tools) or None, tokenize=False, add_generation_prompt=turn_follows
    )
    try:
      return render() if self._is_own() else within(RENDER_LIMIT_S, render)
    except TimeoutError:
      raise UserError(
        f"{self.name} takes longer than {RENDER_LIMIT_S:g} s; set data.chat=False"
      ) from None
    except Exception as error:  # from jinja2, its sandbox, or the template
      reason = first_line(error)[:MAX_REASON_CHARS]
      raise UserError(f"{self.name} rejects this conversation: {reason}") from error

  def parts(self, messages: Messages, tools: Schemas = ()) -> list[str]:
    """Returns the parts of the rendered template around the messages' texts, one more than these.

    Arguments are those of `render`.

    Raises:
      UserError: the template does not contain each message once.
    """
    marks = [f"\x00{i}\x00" for i in range(len(messages))]
    rest = self.render(
      [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)], tools
    )
    parts = []
    for mark in marks:
      part, separator, rest = rest.partition(mark)
      parts.append(part)
      if not separator or mark in rest:
        raise UserError(
          f"{self.name} does not contain each message exactly once; set data.chat=False"
        )
    return [*parts, rest]

  def check(self) -> None:
    """Renders a short conversation with limited memory, before anything large is loaded.

    A template that does not accept it may accept others, and a tokenizer may have no template.

    Raises:
      UserError: the template needs more than `RENDER_LIMIT_S` or `RENDER_MEMORY`.
    """
    if not self._tokenizer.chat_template or self._is_own():
      return
    with limited_memory(RENDER_MEMORY):
      try:
        self.render(user("x"))
      except UserError as error:
        if isinstance(error.__cause__, MemoryError):
          raise UserError(
            f"{self.name} needs more than {RENDER_MEMORY >> 20} MiB; "
            "set data.chat=False, or use another tokenizer"
          ) from error
        if error.__cause__ is None:  # the time limit
          raise

  def _is_own(self) -> bool:
    """Whether the template is this package's, which ends. One from elsewhere is a program."""
    return self._tokenizer.chat_template == _own_template()

  @property
  def name(self) -> str:
    """What messages call it."""
    return f"the chat template of {self._tokenizer.name_or_path!r}"


@functools.cache
def _own_template() -> str:
  """Returns the chat template of this package's tokenizer."""
  return read_json(TOKENIZER_DIR, "tokenizer_config.json")["chat_template"]
