"""Turns conversations into prompts, and completions into messages, with the model's template."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from gtpo_jax.data.chat import Chat
from gtpo_jax.data.chat_template import NO_VARIABLES
from gtpo_jax.data.records import ROLES, user
from gtpo_jax.environments.parsers import Parser, parser_for
from gtpo_jax.environments.turns import Turn
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.serving.requests import bad

# Parts of messages that only a template can place.
RENDERED_PARTS = ("tool_calls", "reasoning_content")
_PROBE = {
  "type": "function",
  "function": {
    "name": "qzprobeqz",
    "description": "x",
    "parameters": {"type": "object", "properties": {}},
  },
}


class Conversations:
  """The chat template of a model, and the parser of its calls of tools."""

  def __init__(self, chat: Chat, parser: Parser | None = None):
    """Args:
    chat: the tokenizer and its template.
    parser: reads calls; None for the model family's, if its template shows tools.
    """
    self.chat = chat
    self._parser = parser or _parser(chat)

  def encode(
    self,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    variables: Mapping[str, Any] = NO_VARIABLES,
  ) -> list[int]:
    """Returns the ids of a conversation up to the assistant's turn.

    `variables` are the template's (`chat_template_kwargs`).
    """
    if tools and self._parser is None:
      raise bad("this model's chat template has no tools; leave tools out", "tools")
    if not any(part in message for message in messages for part in RENDERED_PARTS):
      return self.chat.encode_prompt(messages, tools, variables)
    for i, message in enumerate(messages):
      if message["role"] not in ROLES:
        raise bad(f"messages[{i}].role must be one of {', '.join(ROLES)}", f"messages[{i}].role")
    texts = json.dumps(messages, ensure_ascii=False)
    if control := next((x for x in self.chat.control if x in texts), None):
      raise bad(f"a message contains the control token {control!r}", "messages")
    return self.chat.encode(self.chat.template.render(messages, tools, variables=variables))

  def turn(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Turn:
    """Returns what a text says; calls that cannot be read stay in the text."""
    if tools and self._parser and not (turn := self._parser(text)).error:
      return turn
    return Turn(text.strip())

  def message(self, text: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the assistant's message with a text, whose calls are found if there are tools.

    Calls that cannot be read stay in the text.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if not tools or self._parser is None:
      return message
    turn = self._parser(text)
    if turn.error:
      return message
    message["content"] = turn.text or (None if turn.calls else "")
    if turn.thinking:
      message["reasoning_content"] = turn.thinking
    if turn.calls:
      message["tool_calls"] = [
        {
          "id": call.id or f"call_{secrets.token_hex(12)}",
          "type": "function",
          "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in turn.calls
      ]
    return message


def _parser(chat: Chat) -> Parser | None:
  """Returns what reads the calls of a model; None if its template does not show tools."""
  try:
    if "qzprobeqz" not in chat.template.render(user("x"), [_PROBE]):
      return None
    return parser_for("auto", chat)
  except UserError:
    return None
