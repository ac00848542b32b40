"""A tokenizer's chat template: a program, often from elsewhere, that is run with limits."""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtpo_jax.data.records import user
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.files import read_json
from gtpo_jax.runtime.resource_limits import limited_memory, within

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase

TOKENIZER_DIR = Path(__file__).parent / "tokenizer"
MAX_REASON_CHARS = 200
RENDER_LIMIT_S = 10.0  # for one conversation; a template can contain loops
RENDER_MEMORY = 2**30  # bytes for the first conversation

Messages = Sequence[Mapping[str, Any]]
Schemas = Sequence[Mapping[str, Any]]  # of tools
Variables = Mapping[str, Any]  # what a template reads besides a conversation, as JSON
NO_VARIABLES: Variables = {}
CLOCK = "strftime_now"  # the function with which templates, such as Llama 3's, write today's date
_CLOCK_CALL = re.compile(rf"""\b{CLOCK}\(\s*(["'])(.*?)\1\s*\)""")
# Arguments of the function that renders, which a variable must not replace.
RESERVED = (
  *("conversation", "conversations", "messages", "tools", "documents", "chat_template", "tokenize"),
  *("add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"),
  *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self"),
  CLOCK,
)


class ChatTemplate:
  """The chat template of a tokenizer of transformers, which may have none.

  Args:
    tokenizer: has the template.
    variables: what the template reads besides a conversation, accepted by `check_variables`; and
      under `CLOCK` the day that it calls today, such as "2026-11-29", if it is not this day.
  """

  def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Variables = NO_VARIABLES):
    self._tokenizer = tokenizer
    self._variables = {name: value for name, value in variables.items() if name != CLOCK}
    self._date = datetime.date.fromisoformat(variables[CLOCK]) if CLOCK in variables else None

  def render(
    self,
    messages: Messages,
    tools: Schemas = (),
    turn_follows: bool = True,
    variables: Variables = NO_VARIABLES,
  ) -> str:
    """Returns a conversation as text, up to the start of the assistant's turn.

    `turn_follows=False` ends the text with the last message instead. Variables replace the
    template's own of the same names.

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
    settings = {"tokenize": False, "add_generation_prompt": turn_follows}
    settings |= {**self._variables, **variables}
    if self._date and self.reads_date:  # Transformers passes no function to a template
      template = self._tokenizer.get_chat_template(tools=list(tools) or None)
      written = lambda call: repr(self._date.strftime(call[2]))
      settings["chat_template"] = _CLOCK_CALL.sub(written, template)
    render = lambda: self._tokenizer.apply_chat_template(
      copies, tools=list(tools) or None, **settings
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

  def after_turn(self) -> str:
    """Returns what the template writes after a turn of the assistant; "" if it rejects one."""
    mark = "\x00turn\x00"
    try:
      text = self.render([*user("x"), {"role": "assistant", "content": mark}], turn_follows=False)
    except UserError:
      return ""
    return text.partition(mark)[2]

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
  def reads_date(self) -> bool:
    """Whether the template may write today's date."""
    return bool(_CLOCK_CALL.search(str(self._tokenizer.chat_template)))

  @property
  def name(self) -> str:
    """What messages call it."""
    return f"the chat template of {self._tokenizer.name_or_path!r}"


@functools.cache
def _own_template() -> str:
  """Returns the chat template of this package's tokenizer."""
  return read_json(TOKENIZER_DIR, "tokenizer_config.json")["chat_template"]


def check_variables(values: Any) -> Variables:
  """Returns the variables of a template, such as {"enable_thinking": false}.

  Raises:
    ValueError: they are no object, or one has the name of something else. The message begins with
      "must".
  """
  if not isinstance(values, Mapping) or not all(str(name).isidentifier() for name in values):
    raise ValueError(f'must be an object such as {{"enable_thinking": false}}, got {values!r:.80}')
  if taken := next((name for name in values if name in RESERVED), None):
    raise ValueError(f"must not contain {taken!r}, which is no variable of the template")
  return dict(values)
