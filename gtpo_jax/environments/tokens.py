"""Tokens of turns: what is appended to an episode after the model's tokens, and never changed.

History is not rendered or encoded again: other tokens than those that were drawn would be trained
on. What follows a turn is found by rendering a short conversation: everything that the chat
template writes after the end token of the assistant's turn. That is the rest of its end (the line
break after `<|im_end|>`, for example), the messages, and the start of the next turn. Thinking of
earlier turns stays, although some templates drop it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gtpo_jax.data.chat import WRITTEN, Chat
from gtpo_jax.data.records import NO_ROLE, ROLES
from gtpo_jax.data.text_stream import REPLACEMENT
from gtpo_jax.environments.turns import Message
from gtpo_jax.runtime.errors import UserError

TURN = "qzturnqz"  # stands for the text of a turn
CONTENT = "qzcontentqz"  # stands for the text of a message
# Characters for private use. One of them that no text contains splits control tokens in texts.
SPLITS = tuple(map(chr, range(0xF0000, 0xF0100)))
CALL_ID = re.compile(r"[A-Za-z0-9]{9}")  # templates of Mistral refuse others
NO_CALL_ID = "call00000"
# The share of a text that stays at its start, if it is cut.
KEPT_AT_START = {"middle": 0.5, "end": 1.0, "start": 0.0}
# Of a long text, so many characters for each token that stays are encoded to find these tokens.
CHARS_PER_TOKEN = 64


class TurnTokens:
  """The tokens that follow a turn, for a tokenizer with a chat template."""

  def __init__(self, chat: Chat, roles: Sequence[str]):
    """Args:
    chat: the tokenizer and its template.
    roles: the roles that messages will have.

    Raises:
      UserError: the template rejects messages of a role after a turn, does not show them, or does
        not end a turn with an end token; or a message changes what precedes it, so that its tokens
        cannot be appended.
    """
    self._chat = chat
    self._ends: dict[str, int] = {
      str(chat.tokenizer.convert_ids_to_tokens(token)): token for token in chat.stop
    }
    by_length = sorted((x for x in chat.control if len(x) > 1), key=len, reverse=True)
    self._control = _any_of(by_length)
    self._unwritten = _any_of([token for token in by_length if token not in WRITTEN])
    # By the role of the first message: a conversation, and the end of its text.
    self._before: dict[str, tuple[list[Any], str]] = {}
    self._controls: dict[tuple[tuple[str, bool], ...], list[int]] = {}
    for role in roles:
      after = self._after_turn([_complete({"role": role, "content": CONTENT})])[1]
      if after.count(CONTENT) != 1:
        raise UserError(
          f"{chat.template.name} does not show messages of the role {role!r} after a turn"
          + ("; set env.role='user'" if role == "tool" else "")
        )

  def check_shown(self, before: Sequence[Message], messages: Sequence[Message]) -> None:
    """Raises UserError if the template does not show all of the messages after those before."""
    marked = [{**message, "content": CONTENT} for message in messages]
    if self._chat.template.render([*before, *marked]).count(CONTENT) != len(messages):
      raise UserError(self._not_shown(messages))

  def _not_shown(self, messages: Sequence[Message]) -> str:
    roles = " and ".join(repr(role) for role in dict.fromkeys(x["role"] for x in messages))
    return f"{self._chat.template.name} does not show messages of the role {roles} there"

  def observation(self, messages: Sequence[Message], ended: bool) -> list[int]:
    """Returns the ids of messages after a turn, up to the start of the next turn.

    Texts of messages never become control tokens.

    Args:
      messages: at least one, with "role" and "content"; the result of a call also has "name" and
        "tool_call_id".
      ended: whether the turn ended at an end token; if not, the result begins with one.

    Raises:
      UserError: a message has an unknown role, or the template rejects it or does not show it.
    """
    complete = [_complete(message) for message in messages]
    key = tuple((message["role"], bool(message["content"].strip())) for message in complete)
    if key not in self._controls:
      harmless = [{**x, "name": "x", "content": x["content"] and CONTENT} for x in complete]
      rendered = self._after_turn(harmless)[1]
      if rendered.count(CONTENT) != sum(bool(x["content"]) for x in complete):
        raise UserError(self._not_shown(complete))
      self._controls[key] = self._chat.controls(self._chat.encode(rendered))
    texts = "".join(message[field] for message in complete for field in ("content", "name"))
    split = next(mark for mark in SPLITS if mark not in texts)
    for everywhere in (False, True):  # the second time for tokenizers that change texts first
      guarded = [
        {
          **message,
          "content": self._guarded(message["content"], split, everywhere),
          "name": self._guarded(message["name"], split, everywhere),
        }
        for message in complete
      ]
      end, text = self._after_turn(guarded)
      parts = text.split(split)
      ids = [
        token
        for part in parts
        for token in self._chat.encode(part, plain=everywhere and len(part) == 1)
      ]
      if self._chat.controls(ids) == self._controls[key]:
        return ids if ended else [end, *ids]
    raise UserError(
      f"{self._chat.template.name} makes control tokens of the text {texts[:100]!r}; use another "
      "tokenizer"
    )

  def turn(self, message: Mapping[str, Any]) -> list[int]:
    """Returns the ids of a turn that is to be imitated, as a model writes it, with its end token.

    Calls have the form of the template. Texts become no other control tokens than those that models
    write around thinking and calls.

    Args:
      message: of the assistant, with "content", "tool_calls" or both. A call has a "function" with
        "name" and "arguments", which are an object, and may have an "id".

    Raises:
      UserError: the template rejects the message.
    """
    template = self._chat.template
    question = {"role": "user", "content": "x"}
    before = template.render([question])
    spelt = json.dumps(message, ensure_ascii=False)
    split = next(mark for mark in SPLITS if mark not in spelt)
    guarded = _mapped(_complete_turn(message), lambda text: _broken(text, self._unwritten, split))
    text = template.render([question, guarded], turn_follows=False)
    ends = [(text.rfind(end), end) for end in self._ends]
    at, end = max(ends)
    if at < 0 or not text.startswith(before):
      raise UserError(
        f"{template.name} does not write a turn of the assistant after the start of a turn, and "
        "before an end token; use another tokenizer"
      )
    ids = [self._chat.encode(part) for part in text[len(before) : at].split(split)]
    return [*itertools.chain(*ids), self._ends[end]]

  def shorten(self, text: str, limit: int, cut: str = "middle") -> str:
    """Returns a text of at most `limit` tokens, with a note in the place of what is left out.

    Args:
      text: any text.
      limit: the most tokens, the note included.
      cut: the part that is left out, "start", "middle" or "end".
    """
    if len(text.encode("utf-8", "replace")) <= limit:  # a token has at least a byte
      return text
    chat = self._chat
    most = CHARS_PER_TOKEN * limit
    if len(text) <= 2 * most:
      start = end = chat.encode_plain(text)
      if len(start) <= limit:
        return text
    else:
      start, end = chat.encode_plain(text[:most]), chat.encode_plain(text[-most:])
    room = limit
    while room > 0:
      first = round(KEPT_AT_START[cut] * room)
      head = chat.texts.text_of(start[:first], True).rstrip(REPLACEMENT) if first else ""
      tail = (
        chat.texts.text_of(end[first - room :], True).lstrip(REPLACEMENT) if first < room else ""
      )
      note = f"[{len(text) - len(head) - len(tail)} characters left out]"
      short = "\n".join(filter(None, (head, note, tail)))
      over = len(chat.encode_plain(short)) - limit
      if over <= 0:
        return short
      room -= over
    return chat.texts.text_of(start[:limit], True).rstrip(REPLACEMENT)

  def _after_turn(self, messages: Sequence[Message]) -> tuple[int, str]:
    """Returns the end token of a turn, and the text after it with these messages."""
    template = self._chat.template
    before, closed = self._conversation_before(messages[0])
    text = template.render([*before, *messages]).partition(TURN)[2]
    found = [(closed.find(end), end) for end in self._ends if end in closed]
    if not found:
      raise UserError(
        f"{template.name} does not end the assistant's turn with one of the end tokens "
        f"{', '.join(self._ends)}; use another tokenizer"
      )
    at, end = min(found)
    closing = closed[: at + len(end)]
    if not text.startswith(closing):
      raise UserError(
        f"{template.name} changes the end of a turn when messages follow it, so that their tokens "
        "cannot be appended; use another tokenizer"
      )
    return self._ends[end], text.removeprefix(closing)

  def _conversation_before(self, message: Message) -> tuple[list[Any], str]:
    """Returns a conversation with one turn, of a kind that this message may follow.

    It comes with what the template writes after the text of the turn.

    Some templates only have results after calls, and some do not show the text of a turn that has
    calls, for which its argument stands then.
    """
    role = message["role"]
    if role not in self._before:
      question = {"role": "user", "content": "x"}
      function = {"name": "x", "arguments": {"x": TURN}}
      call = {"type": "function", "id": NO_CALL_ID, "function": function}
      plain = {"role": "assistant", "content": TURN}
      calling = {"role": "assistant", "content": "", "tool_calls": [call]}
      try:
        self._chat.template.render([question, plain, message])
        turn = plain
      except UserError:
        self._chat.template.render([question, calling, message])
        turn = calling
      closed = self._chat.template.render([question, turn], turn_follows=False)
      self._before[role] = [question, turn], closed.partition(TURN)[2]
    return self._before[role]

  def _guarded(self, text: str, split: str, everywhere: bool) -> str:
    """Returns a text with `split` within each control token, or around every character."""
    if everywhere:
      return split + split.join(text) + split
    return _broken(text, self._control, split)


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
  return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _broken(text: str, tokens: re.Pattern[str], split: str) -> str:
  """Returns a text with `split` within each of these tokens."""
  while tokens.search(text):  # what is left of one may be part of another
    text = tokens.sub(lambda match: match[0][0] + split + match[0][1:], text)
  return text


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
  """Returns a JSON value with all its texts changed, except the keys of objects."""
  if isinstance(value, str):
    return change(value)
  if isinstance(value, Mapping):
    return {key: _mapped(x, change) for key, x in value.items()}
  return [_mapped(x, change) for x in value] if isinstance(value, list | tuple) else value


def _complete_turn(message: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a message of the assistant with the fields of its calls that templates may read."""
  complete = {"role": "assistant", "content": message.get("content") or ""}
  calls = [
    {
      "type": "function",
      "id": call["id"] if CALL_ID.fullmatch(call.get("id", "")) else NO_CALL_ID,
      "function": call["function"],
    }
    for call in message.get("tool_calls") or ()
  ]
  return complete | ({"tool_calls": calls} if calls else {})


def _complete(message: Message) -> dict[str, str]:
  """Returns a message with all fields that templates may read.

  Raises:
    UserError: the role is unknown, or no environment can take it.
  """
  role = message["role"]
  if role not in ROLES:
    raise UserError(f"a message of the environment has the role {role!r}, {NO_ROLE}")
  if role == "assistant":
    raise UserError("a message of the environment has the role 'assistant'; use 'user' or 'tool'")
  call_id = message.get("tool_call_id", "")
  complete = {"role": role, "content": message["content"], "name": message.get("name", "")}
  if role == "tool":
    complete["tool_call_id"] = call_id if CALL_ID.fullmatch(call_id) else NO_CALL_ID
  return complete
