"""Parsers of tool calls, on what models write and on damaged copies of it."""

import random

import pytest

from gtpo_jax.data.chat import load_chat
from gtpo_jax.environments.parsers import (
  PARSERS,
  hermes,
  llama3,
  mistral,
  none,
  olmo3,
  parser_for,
  qwen3_coder,
)
from gtpo_jax.environments.turns import ToolCall, Turn
from gtpo_jax.runtime.errors import UserError

WEATHER = ToolCall("get_current_temperature", {"location": "San Francisco, CA, USA"})
DATED = ToolCall(
  "get_temperature_date", {"location": "San Francisco, CA, USA", "date": "2024-10-01"}
)
# As the documentation of each family shows a call: parser, text, turn.
EXAMPLES = [
  (
    hermes,
    '<tool_call>\n{"name": "get_current_temperature", "arguments": '
    '{"location": "San Francisco, CA, USA"}}\n</tool_call>\n<tool_call>\n{"name": '
    '"get_temperature_date", "arguments": {"location": "San Francisco, CA, USA", "date": '
    '"2024-10-01"}}\n</tool_call><|im_end|>',
    Turn("", "", (WEATHER, DATED)),
  ),
  (
    hermes,
    "<think>\nThe user asks for a <tool_call>.\n</think>\n\nLet me look.\n<tool_call>\n"
    '{"name": "get_current_temperature", "arguments": {"location": "San Francisco, CA, USA"}}\n'
    "</tool_call>",
    Turn("Let me look.", "The user asks for a <tool_call>.", (WEATHER,)),
  ),
  (hermes, "thought in the prompt</think>\n\n42<|im_end|>\n", Turn("42", "thought in the prompt")),
  (hermes, "<think>\nstill thinking <tool_call>", Turn("", "still thinking <tool_call>")),
  (
    hermes,
    '<tool_call>\n{"name": "run", "arguments": {"code": "print(\'</tool_call>\')\n"}}\n'
    "</tool_call>",
    Turn("", "", (ToolCall("run", {"code": "print('</tool_call>')\n"}),)),
  ),
  (
    hermes,
    '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>',
    Turn("", "", (ToolCall("f", {"x": 1}),)),
  ),
  (hermes, '<tool_call>{"name": "f", "arguments": {}}', Turn("", "", (ToolCall("f", {}),))),
  (
    qwen3_coder,
    "<think>\nA file.\n</think>\n\nI read it.\n\n<tool_call>\n<function=read_file>\n"
    "<parameter=path>\n/etc/hosts\n</parameter>\n"
    "<parameter=text>\n\nif a < b:\n  <b>\n\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>",
    Turn(
      "I read it.",
      "A file.",
      (
        ToolCall("read_file", {"path": "/etc/hosts", "text": "\nif a < b:\n  <b>\n"}),
        ToolCall("now", {}),
      ),
    ),
  ),
  (
    qwen3_coder,
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>",
    Turn("", "", (ToolCall("add", {"a": "2"}),)),
  ),
  (
    llama3,
    '<|python_tag|>brave_search.call(query="current weather in Menlo Park, California")<|eom_id|>',
    Turn(
      "", "", (ToolCall("brave_search", {"query": "current weather in Menlo Park, California"}),)
    ),
  ),
  (
    llama3,
    '<|python_tag|>wolfram_alpha.call(query="solve x^3 - 4x^2 + 6x - 24 = 0")<|eom_id|>',
    Turn("", "", (ToolCall("wolfram_alpha", {"query": "solve x^3 - 4x^2 + 6x - 24 = 0"}),)),
  ),
  (
    llama3,
    "<|python_tag|>def is_prime(n):\n    return n > 1\n\nprint(is_prime(7))<|eom_id|>",
    Turn(
      "",
      "",
      (
        ToolCall(
          "code_interpreter", {"code": "def is_prime(n):\n    return n > 1\n\nprint(is_prime(7))"}
        ),
      ),
    ),
  ),
  (
    llama3,
    '{"type": "function", "name": "trending_songs", "parameters": {"n": "10", "genre": "all"}}'
    "<|eom_id|>",
    Turn("", "", (ToolCall("trending_songs", {"n": "10", "genre": "all"}),)),
  ),
  (
    llama3,
    '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    "<|eot_id|>",
    Turn("", "", (ToolCall("f", {"a": 1}), ToolCall("g", {}))),
  ),
  (llama3, "The answer is {42}.<|eot_id|>", Turn("The answer is {42}.")),
  (llama3, '{"name": "Bob", "age": 3}', Turn('{"name": "Bob", "age": 3}')),
  (
    mistral,
    '[TOOL_CALLS] [{"name": "get_current_weather", "arguments": {"location": "Paris, France", '
    '"format": "celsius"}, "id": "VvvODy9mT"}]</s>',
    Turn(
      "",
      "",
      (
        ToolCall(
          "get_current_weather", {"location": "Paris, France", "format": "celsius"}, "VvvODy9mT"
        ),
      ),
    ),
  ),
  (
    mistral,
    'I look.[TOOL_CALLS]add[ARGS]{"a": 3.5, "b": 4}[TOOL_CALLS]zero[ARGS]{}</s>',
    Turn("I look.", "", (ToolCall("add", {"a": 3.5, "b": 4}), ToolCall("zero", {}))),
  ),
  (
    mistral,
    '[THINK]Which?[/THINK]It.[TOOL_CALLS]add[CALL_ID]VvvODy9mT[ARGS]{"a": "[TOOL_CALLS]"}</s>',
    Turn("It.", "Which?", (ToolCall("add", {"a": "[TOOL_CALLS]"}, "VvvODy9mT"),)),
  ),
  (
    olmo3,
    "<think>Which?</think>I look.<function_calls>get_current_temperature("
    'location="San Francisco, CA, USA")\nf(x=[1, {"a": null}], y=True, z="a)(,")</function_calls>',
    Turn(
      "I look.", "Which?", (WEATHER, ToolCall("f", {"x": [1, {"a": None}], "y": True, "z": "a)(,"}))
    ),
  ),
  (olmo3, "No call (x=1).<|im_end|>", Turn("No call (x=1).")),
  (none, "<think>\nhm\n</think>\n\nguess 16<|im_end|>", Turn("guess 16", "hm")),
]


@pytest.mark.parametrize(
  ("parser", "text", "turn"), EXAMPLES, ids=lambda x: getattr(x, "__name__", "")
)
def test_examples(parser, text, turn):
  assert parser(text) == turn


@pytest.mark.parametrize(
  ("parser", "text", "error"),
  [
    (hermes, '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>', "not valid JSON"),
    (hermes, '<tool_call>{"name": "f"}</tool_call>', "the call of 'f' has no \"arguments\""),
    (hermes, '<tool_call>{"arguments": {}}</tool_call>', 'a call has no "name"'),
    (hermes, "<tool_call>[]</tool_call>", "a call is a JSON object, not a list"),
    (hermes, '<tool_call>{"name": "f", "arguments": 3}</tool_call>', "is an object, not a number"),
    (hermes, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is not a JSON"),
    (hermes, '<tool_call>{"name": "f", "arguments": {}} x', "not followed by </tool_call>"),
    (hermes, "<tool_call>" + '{"name":' * 100_000, "nested too deeply"),
    (hermes, '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "digits"),
    (llama3, '{"name": "f", "parameters": {"x": }}', "not valid JSON"),
    (llama3, '<|python_tag|>f.call(query="a" "b")', "followed by '\"b\"'"),
    (llama3, "<|python_tag|>f.call(3)", "not NAME=VALUE"),
    (olmo3, "<function_calls></function_calls>", "is not followed by a call"),
    (olmo3, "<function_calls>f(x=1", "the call of 'f' is not closed"),
    (olmo3, "<function_calls>f(1)</function_calls>", "not NAME=VALUE"),
    (olmo3, "<function_calls>f(x='a')</function_calls>", "not valid JSON"),
    (mistral, "[TOOL_CALLS] f(x)", "not valid JSON"),
    (mistral, "[TOOL_CALLS] [{}]", 'a call has no "name"'),
    (mistral, "[TOOL_CALLS]f[ARGS]{} and so on", "followed by 'and so on'"),
  ],
)
def test_a_call_that_cannot_be_read_has_a_reason(parser, text, error):
  turn = parser(text)
  assert error in turn.error
  assert len(turn.error) <= 200
  assert "\n" not in turn.error


PIECES = (
  *"{}[]\"'\\:;,()=<>|/ \n\x00é🙂\ud800",
  "<tool_call>",
  "</tool_call>",
  "<think>",
  "</think>",
  "<|python_tag|>",
  "<|eom_id|>",
  "[TOOL_CALLS]",
  "<function_calls>",
  "</function_calls>",
  "[ARGS]",
  "[CALL_ID]",
  "[/THINK]",
  '"name"',
  '"arguments"',
  '"parameters"',
  "null",
  "NaN",
  "1e999",
  ".call(",
)


def mutated(rng, text):
  """Returns a text with a few parts removed, doubled, moved or replaced."""
  for _ in range(rng.randint(1, 4)):
    i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    part = rng.choice(("", text[i:j] * 2, rng.choice(PIECES), text[i:j][::-1]))
    text = text[:i] + part + text[j if rng.random() < 0.5 else i :]
  return text


@pytest.mark.parametrize("name", PARSERS)
def test_damaged_turns_never_raise(name):
  rng = random.Random(0)
  texts = [text for parser, text, _ in EXAMPLES if parser is PARSERS[name]] * 2
  texts += [text for _, text, _ in EXAMPLES]
  for _ in range(10_000):
    turn = PARSERS[name](mutated(rng, rng.choice(texts)))
    assert isinstance(turn.text, str) and isinstance(turn.thinking, str)
    assert "\n" not in turn.error
    for call in turn.calls:
      assert isinstance(call.name, str) and call.name
      assert isinstance(call.arguments, dict) and isinstance(call.id, str)


def test_a_long_hostile_turn_is_read_in_linear_time():
  for text in (
    "<tool_call>" * 100_000,
    "[TOOL_CALLS]" * 100_000,
    "<|python_tag|>f.call(" + ")" * 10**6,
    "</s>" * 30_000,
    "<tool_call><function=f>" + "<parameter=x>" * 100_000 + "</function>",
    "<tool_call>" + "<function=f>" * 100_000,
  ):
    for parser in PARSERS.values():
      parser(text)


def test_the_parser_is_chosen_by_the_tokenizer(monkeypatch):
  chat = load_chat()
  assert parser_for("auto", chat) is hermes
  with_functions = "<tool_call> {{ '<function=' }}"
  monkeypatch.setattr(chat.tokenizer, "chat_template", with_functions)
  assert parser_for("auto", chat) is qwen3_coder
  plain = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
  monkeypatch.setattr(chat.tokenizer, "chat_template", plain)
  with pytest.raises(UserError, match=r"env\.parser .* got 'hermess', did you mean 'hermes'\?"):
    parser_for("hermess", chat)
  with pytest.raises(UserError, match="does not show how its model writes tool calls"):
    parser_for("auto", chat)
  assert parser_for("mistral", chat) is mistral
