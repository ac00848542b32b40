"""What the server reads of a request, and how it refuses the rest."""

import copy
import functools
import json

import pytest

from gtpo_jax.cli.serve import model_name
from gtpo_jax.data.chat import Chat, load_chat
from gtpo_jax.serving.conversation import Conversations
from gtpo_jax.serving.requests import (
  ApiError,
  ChatRequest,
  CompletionRequest,
  checked,
  parse_object,
)

read_chat = functools.partial(checked, ChatRequest)
read_completion = functools.partial(checked, CompletionRequest)
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def fields(**values):
  return parse_object(json.dumps(values).encode())


def test_defaults_are_those_of_the_protocol():
  chat = read_chat(fields(**CHAT))
  assert chat.messages == CHAT["messages"] and chat.tools == ()
  assert (chat.temperature, chat.top_p, chat.n) == (1, 1, 1)
  assert chat.limit is None and chat.seed is None
  completion = read_completion(fields(prompt="Hi"))
  assert completion.prompt == ["Hi"] and completion.limit == 16


def test_values_are_taken():
  values = {"max_completion_tokens": 5, "max_tokens": 9, "seed": -1, "stop": "x", "top_k": -1}
  sampling = read_chat(fields(**CHAT, **values, user="me", logit_bias=None))
  assert (sampling.limit, sampling.seed, sampling.stop, sampling.top_k) == (5, 2**32 - 1, ("x",), 0)
  assert read_chat(fields(**CHAT, temperature=1e-9)).temperature == 0
  assert read_chat(fields(**CHAT, tools=[TOOL])).tools == (TOOL,)
  assert read_chat(fields(**CHAT, tools=[TOOL], tool_choice="none")).tools == ()
  parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
  (message,) = read_chat(fields(messages=[{"role": "user", "content": parts}])).messages
  assert message["content"] == "ab"
  assert read_completion(fields(prompt=[1, 2])).prompt == [[1, 2]]
  assert read_completion(fields(prompt=[[1], "a"])).prompt == [[1], "a"]
  assert read_completion(fields(prompt="a", echo=True, max_tokens=0)).limit == 0


def test_a_history_is_read_as_programs_write_it():
  """A call without arguments may have "" for them; thinking is given to the template."""
  call = {"id": "c", "function": {"name": "now", "arguments": ""}}
  said = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]}
  chat = read_chat(fields(messages=[said], chat_template_kwargs={"enable_thinking": False}))
  (message,) = chat.messages
  assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}
  assert message["reasoning_content"] == "Hm."
  assert chat.chat_template_kwargs == {"enable_thinking": False}


def test_variables_and_thinking_reach_the_template():
  tokenizer = copy.deepcopy(load_chat().tokenizer)
  tokenizer.chat_template = (
    "{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}{{ mode }}"
  )
  conversations = Conversations(Chat(tokenizer))
  asked = {"role": "user", "content": "a"}
  said = {"role": "assistant", "content": "b", "reasoning_content": "c"}
  ids = conversations.encode([asked, said], (), {"mode": "d"})
  assert tokenizer.decode(ids) == "acbd"
  assert tokenizer.decode(conversations.encode([asked], (), {"mode": "d"})) == "ad"


BAD_CHATS = [
  (CHAT | {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
  (CHAT | {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
  ({"messages": []}, "messages"),
  ({"messages": "Hi"}, "messages"),
  ({"messages": [3]}, "messages[0]"),
  ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
  ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
  ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
  (CHAT | {"temperature": -1}, "temperature"),
  (CHAT | {"temperature": "hot"}, "temperature"),
  (CHAT | {"temperature": True}, "temperature"),
  (CHAT | {"top_p": 1.5}, "top_p"),
  (CHAT | {"n": 0}, "n"),
  (CHAT | {"n": 1.5}, "n"),
  (CHAT | {"n": 10**30}, "n"),
  (CHAT | {"seed": "x"}, "seed"),
  (CHAT | {"max_tokens": 0}, "max_tokens"),
  (CHAT | {"stop": [""]}, "stop"),
  (CHAT | {"stop": ["x"] * 17}, "stop"),
  (CHAT | {"stop": 3}, "stop"),
  (CHAT | {"stream": "yes"}, "stream"),
  (CHAT | {"top_logprobs": 3}, "top_logprobs"),
  (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
  (CHAT | {"frequency_penalty": 0.5}, "frequency_penalty"),
  (CHAT | {"logit_bias": {"3": 1}}, "logit_bias"),
  (CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
  (CHAT | {"tools": [{}]}, "tools"),
  (CHAT | {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
  (CHAT | {"tempratur": 1}, "tempratur"),
]
BAD_COMPLETIONS = [
  ({}, "prompt"),
  ({"prompt": []}, "prompt"),
  ({"prompt": [[]]}, "prompt"),
  ({"prompt": [True]}, "prompt"),
  ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
  ({"prompt": "a", "best_of": 2}, "best_of"),
  ({"prompt": "a", "logprobs": 21}, "logprobs"),
  ({"prompt": "a", "echo": True, "stream": True}, "echo"),
  ({"prompt": "a", "suffix": "b"}, "suffix"),
]


@pytest.mark.parametrize(
  ("read", "values", "param"),
  [(read_chat, *case) for case in BAD_CHATS]
  + [(read_completion, *case) for case in BAD_COMPLETIONS],
)
def test_a_wrong_field_is_named(read, values, param):
  with pytest.raises(ApiError) as caught:
    read(fields(**values))
  error = caught.value
  assert (error.status, error.param) == (400, param)
  assert "\n" not in error.message and len(error.message) < 300


@pytest.mark.parametrize(
  "body",
  [
    *(b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b"nul"),
    *(b'{"a": "\\ud800"}', b'{"\\udfff": 1}', b'{"a": "\xed\xa0\x80"}', b'{"a": ' * 700),
  ],
)
def test_a_body_that_is_no_object(body):
  with pytest.raises(ApiError, match="body") as caught:
    parse_object(body)
  assert caught.value.status == 400


def test_long_parts_of_a_chat_are_refused_where_bodies_are_read():
  said = {"role": "assistant", "content": "x" * (1 << 21)}
  tool = {"type": "function", "function": {"name": "x", "description": "y" * (1 << 19)}}
  call = {"function": {"name": "x", "arguments": {"a": "z" * (1 << 21)}}}
  for values, name in (
    ({"messages": [said]}, "messages"),
    ({"messages": [{**said, "content": "x", "reasoning_content": said["content"]}]}, "messages"),
    ({"messages": [{**said, "content": "x", "tool_calls": [call]}]}, "messages"),
    (CHAT | {"tools": [tool]}, "tools"),
    (CHAT | {"chat_template_kwargs": {"a": "x" * (1 << 19)}}, "chat_template_kwargs"),
  ):
    with pytest.raises(ApiError, match=rf"{name}.* have [0-9]+ characters, at most") as caught:
      read_chat(fields(**values))
    assert caught.value.param == name
  read_chat(fields(messages=[{**said, "content": "x" * (1 << 20)}]))


def test_the_nearest_field_is_named():
  with pytest.raises(ApiError, match="did you mean 'temperature'"):
    read_chat(fields(**CHAT, tempratur=1))


def test_the_name_of_a_served_model(tmp_path, monkeypatch):
  """A link to a folder is served by its own name, as it was given on the command line."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine").mkdir()
  (tmp_path / "latest").symlink_to("mine")
  for model in ("mine", "mine/", str(tmp_path / "mine"), "latest/../mine"):
    assert model_name(model) == "mine"
  assert model_name("latest") == "latest"
  assert model_name("gs://bucket/runs/mine/") == "mine"
  assert model_name("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
