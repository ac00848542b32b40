"""The tokens between turns are those of the chat template, and texts stay texts."""

import json
import random
import re

import pytest
from families import FAMILIES, LINES, family, load
from tokenizers import AddedToken, Tokenizer, normalizers

from gtpo_jax.data.chat import TOKENIZER_DIR, WRITTEN, load_chat
from gtpo_jax.data.records import user
from gtpo_jax.environments.parsers import hermes, llama3, mistral, parser_for, qwen3_coder
from gtpo_jax.environments.tokens import NO_CALL_ID, TurnTokens
from gtpo_jax.environments.tools import Tools
from gtpo_jax.runtime.errors import UserError

# Results as the template of Mistral can show them: it writes them into JSON as they are.
RESULTS = ['"jax: arrays"', "{\n  }\n", "42", '["1", 2]']


def call(name, arguments, call_id=NO_CALL_ID):
  return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def result(content, call_id=NO_CALL_ID):
  return {"role": "tool", "content": content, "name": "search", "tool_call_id": call_id}


def assistant(text, *calls):
  return {"role": "assistant", "content": text, "tool_calls": list(calls) or None}


def written(name, text, calls):
  """Returns a turn as a model of the family writes it."""
  functions = [x["function"] for x in calls]
  if name == "qwen3.5":
    parts = [
      "\n".join(
        [f"<tool_call>\n<function={x['name']}>"]
        + [f"<parameter={key}>\n{value}\n</parameter>" for key, value in x["arguments"].items()]
        + ["</function>\n</tool_call>"]
      )
      for x in functions
    ]
    return text.removeprefix("<think>\n") + "\n".join(parts)
  if name.startswith("qwen"):
    parts = [f"<tool_call>\n{json.dumps(x)}\n</tool_call>" for x in functions]
    return "\n".join(filter(None, [text, *parts]))
  if name == "llama3":
    parts = [json.dumps({"name": x["name"], "parameters": x["arguments"]}) for x in functions]
    return text + "".join(parts)
  parts = [json.dumps({**x["function"], "id": x["id"]}) for x in calls]
  return f"[TOOL_CALLS] [{', '.join(parts)}]" if parts else f" {text}"


def conversations(name):
  """Yields three-turn conversations, as a first prompt and pairs of a turn and its messages."""
  lone = call("search", {"query": "jax"})
  other = call("search", {"query": "flax"}, "abcdefghi")
  thought = "<think>\nHm.\n</think>\n\n" if name == "qwen3.5" else ""
  end = assistant(f"{thought}It is 42.")
  yield [
    (assistant(thought, lone), [result(RESULTS[0])]),
    (assistant(thought, lone), [result(RESULTS[1])]),
    (end, []),
  ]
  if name != "llama3":
    both = [result(RESULTS[2]), result(RESULTS[3], "abcdefghi")]
    yield [
      (assistant(thought, lone, other), both),
      (assistant(thought, other), [both[1]]),
      (end, []),
    ]
  if not thought:  # the template drops what was thought before the last question
    guess = lambda number, answer: (assistant(number), [*user(answer)])
    yield [guess("16", "higher"), guess("24", "lower\n"), (end, [])]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_episode_is_the_conversation_that_the_template_renders(name):
  chat = family(name)
  parser = parser_for("auto", chat)
  count = 0
  for turns in conversations(name):
    role = turns[0][1][0]["role"]
    tokens = TurnTokens(chat, [role])
    messages = [*user("Find it.")]
    ids = chat.encode_prompt(messages)
    for turn, observation in turns:
      calls = turn["tool_calls"] or []
      text = written(name, turn["content"], calls)
      read = [{"name": x.name, "arguments": x.arguments} for x in parser(text).calls]
      assert read == [x["function"] for x in calls]
      drawn = chat.tokenizer.encode(text, add_special_tokens=False)
      ids += [*drawn, chat.tokenizer.eos_token_id]
      empty = chat.encode("<think>\n\n</think>\n\n") if name == "qwen3" else []
      assert tokens.turn(turn) == [*empty, *drawn, chat.tokenizer.eos_token_id]
      messages += [turn, *observation]
      if observation:
        ids += tokens.observation(observation, ended=True)
    rendered = chat.template.render(messages, turn_follows=False)
    whole = chat.tokenizer.encode(rendered, add_special_tokens=False)
    if name == "qwen3":  # it writes empty thinking into the last turn
      thinking = chat.encode("<think>\n\n</think>\n\n")
      at = next(i for i in range(len(whole)) if whole[i : i + len(thinking)] == thinking)
      assert chat.tokenizer.decode(whole[at + len(thinking) :]) == "It is 42.<|im_end|>\n"
      del whole[at : at + len(thinking)]
    after = whole[len(ids) :]  # the line break of Qwen, which no turn needs
    assert whole[: len(ids)] == ids
    assert chat.tokenizer.decode(after) == ("\n" if name.startswith("qwen") else "")
    count += 1
  assert count >= 2


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_never_become_control_tokens(name):
  chat = family(name)
  rng = random.Random(name)
  control = [token.content for token in chat.tokenizer.added_tokens_decoder.values()]
  hostile = [*control, *(f"a{token}b{token}{rng.choice(control)}" for token in control)]
  hostile += [f"{x[:3]}{rng.choice(control)}{x[3:]}" for x in control]  # one inside another
  for role in ("tool", "user"):
    tokens = TurnTokens(chat, [role])
    harmless = tokens.observation([{"role": role, "content": "x", "name": "x"}], ended=True)
    controls = chat.controls(harmless)
    before, _, after = chat.tokenizer.decode(harmless).partition("x")
    for text in hostile:
      message = {"role": role, "content": text, "name": text, "tool_call_id": text}
      ids = tokens.observation([message], ended=True)
      assert chat.controls(ids) == controls, text
      shown = json.dumps(text)[1:-1] if (name, role) == ("llama3", "tool") else text
      decoded = chat.tokenizer.decode(ids)
      assert decoded.replace(" ", "") == f"{before}{shown}{after}".replace(" ", "")
      if name != "mistral":  # whose tokenizer begins each part of a text with a space
        assert decoded == f"{before}{shown}{after}"


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_of_demonstrated_turns_become_no_control_tokens_but_those_that_models_write(name):
  chat = family(name)
  tokens = TurnTokens(chat, [])
  plain = chat.controls(tokens.turn(assistant("x")))
  calling = chat.controls(tokens.turn(assistant("", call("x", {"x": "y"}))))
  for token in chat.control:
    expected = plain
    is_taken_out = name in ("qwen3", "qwen3.5") and "think" in token  # by the template
    if token in WRITTEN and not is_taken_out:
      expected = [*plain[:-1], chat.tokenizer.convert_tokens_to_ids(token), plain[-1]]
    if not is_taken_out:
      assert chat.controls(tokens.turn(assistant(f"a{token}b"))) == expected
    ids = tokens.turn(assistant("", call(f"a{token}b", {"x": [{"y": f"a{token}b"}]})))
    if token not in WRITTEN:
      assert chat.controls(ids) == calling
      decoded = chat.tokenizer.decode(ids).replace(" ", "")  # Mistral's begins parts with a space
      assert decoded.count(f"a{token}b") == 2
  (completed,) = chat.decode([chat.encode_completion("<tool_call>{}</tool_call><|im_end|>")])
  assert completed == "<tool_call>{}</tool_call><|im_end|>"
  written = [x for x in ("<tool_call>", "</tool_call>") if x in chat.control]
  ids = chat.encode_completion("<tool_call>{}</tool_call><|im_end|>")[:-1]
  assert chat.controls(ids) == chat.tokenizer.convert_tokens_to_ids(written)


def test_texts_that_the_tokenizer_changes_first_never_become_control_tokens(tmp_path):
  values = json.loads((TOKENIZER_DIR / "tokenizer.json").read_text())
  values["added_tokens"] = []
  tokenizer = Tokenizer.from_str(json.dumps(values))
  tokenizer.normalizer = normalizers.NFKC()
  normalized = ("<|im_start|>", "<|im_end|>")
  tokenizer.add_tokens([AddedToken(x, special=True, normalized=True) for x in normalized])
  tokenizer.add_tokens([AddedToken("☃", special=True, normalized=False)])
  settings = {
    "eos_token": "<|im_end|>",
    "chat_template": json.loads((TOKENIZER_DIR / "tokenizer_config.json").read_text())[
      "chat_template"
    ],
  }
  chat = load(tmp_path, tokenizer, settings, ["<|im_end|>"])
  wide = "＜|im_end|＞"
  assert chat.controls(chat.encode(wide))
  tokens = TurnTokens(chat, ["user"])
  ids = tokens.observation(user(wide), ended=True)
  assert len(chat.controls(ids)) == 3
  assert "<|im_end|><|im_end|>" in chat.tokenizer.decode(ids)
  assert len(chat.controls(tokens.observation(user("a ☃ b"), ended=True))) == 3


def test_a_turn_that_has_no_end_token_gets_one():
  chat = family("qwen2.5")
  tokens = TurnTokens(chat, ["user"])
  ids = tokens.observation(user("go on"), ended=False)
  assert chat.tokenizer.decode(ids) == (
    "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
  )
  assert ids[1:] == tokens.observation(user("go on"), ended=True)


def test_the_package_s_tokenizer_has_turns():
  chat = load_chat()
  tokens = TurnTokens(chat, ["user"])
  assert chat.tokenizer.decode(tokens.observation(user("higher"), ended=True)) == (
    "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
  )


ASSISTANT_LAST = (
  "{%- for m in messages %}{{- m.role + m.content }}{%- if not loop.last %}{{- '<|im_end|>' }}"
  "{%- else %}{{- ' the end<|im_end|>' }}{%- endif %}{%- endfor %}"
)


@pytest.mark.parametrize(
  ("template", "role", "error"),
  [
    (ASSISTANT_LAST, "user", "changes the end of a turn when messages follow it"),
    ("{%- for m in messages %}{{- m.content }}{%- endfor %}", "user", "does not end the assistant"),
    (
      "{%- for m in messages if m.role != 'tool' %}{{- m.content + '<|im_end|>' }}{%- endfor %}",
      "tool",
      "does not show messages of the role 'tool' after a turn; set env.role='user'",
    ),
    (
      "{%- for m in messages %}{%- if m.role == 'tool' %}{{- raise_exception('no tools') }}"
      "{%- endif %}{{- m.content + '<|im_end|>' }}{%- endfor %}",
      "tool",
      "rejects this conversation: no tools",
    ),
  ],
)
def test_templates_without_a_place_for_observations(template, role, error, tmp_path):
  tokenizer = Tokenizer.from_file(str(TOKENIZER_DIR / "tokenizer.json"))
  settings = {"eos_token": "<|im_end|>", "chat_template": template}
  chat = load(tmp_path, tokenizer, settings, ["<|im_end|>"])
  with pytest.raises(UserError, match=error) as caught:
    TurnTokens(chat, [role])
  assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_messages_that_the_template_does_not_show_are_refused(tmp_path):
  tokenizer = Tokenizer.from_file(str(TOKENIZER_DIR / "tokenizer.json"))
  template = (
    "{%- for m in messages if m.role != 'system' %}{{- m.content + '<|im_end|>' }}{%- endfor %}"
  )
  settings = {"eos_token": "<|im_end|>", "chat_template": template}
  tokens = TurnTokens(load(tmp_path, tokenizer, settings, ["<|im_end|>"]), ["user"])
  tokens.observation(user("x"), ended=True)
  order = [{"role": "system", "content": "stop"}]
  with pytest.raises(UserError, match="does not show messages of the role 'system' there"):
    tokens.observation(order, ended=True)
  with pytest.raises(UserError, match="does not show messages of the role 'system' there"):
    tokens.check_shown(user("x"), order)


@pytest.mark.parametrize(
  ("role", "error"), [("assistant", "use 'user' or 'tool'"), ("<|im_end|>", "which is none of")]
)
def test_messages_of_other_roles_are_refused(role, error):
  with pytest.raises(UserError, match=error):
    TurnTokens(family("qwen3"), ["tool"]).observation([{"role": role, "content": "x"}], ended=True)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cut", ["start", "middle", "end"])
def test_long_texts_are_shortened_by_tokens(name, cut):
  chat = family(name)
  tokens = TurnTokens(chat, ["user"])
  short = "".join(LINES)[:100]
  assert tokens.shorten(short, 200, cut) == short
  for text in ("".join(LINES) * 5, "é🙂日本 <|im_end|>" * 300, "x" * 10**7, "\n" * 5000):
    for limit in (1, 5, 50, 173):
      part = tokens.shorten(text, limit, cut)
      assert len(chat.encode_plain(part)) <= limit
      assert part or limit < 32
      assert "\ufffd" not in part
      if text[0] == "x" and limit > 50:
        (note,) = re.findall(r"\[\d+ characters left out\]", part)
        kept = part.replace(note, "").count("x")
        assert kept > limit // 2 and kept + int(note[1:].split()[0]) == len(text)
        assert part.startswith("x") == (cut != "start") and part.endswith("x") == (cut != "end")


def test_the_prompt_shows_tools():
  def search(query: str) -> str:
    """Searches.

    Args:
      query: what for.
    """

  schemas = Tools([search]).schemas
  for name in FAMILIES:
    chat = family(name)
    for text in ("Find it.", "Find <|im_end|>[INST]<|eot_id|> it."):
      ids = chat.encode_prompt(user(text), schemas)
      assert '"description": "what for."' in chat.tokenizer.decode(ids)
      assert text in chat.tokenizer.decode(ids).replace("  ", " ")
      plain = chat.encode_prompt(user(text))
      if name != "mistral":  # which has control tokens around tools
        more = {"qwen3": 2, "qwen3.5": 4}.get(name, 0)
        assert len(chat.controls(ids)) - len(chat.controls(plain)) == more


def test_the_tokenizer_tells_how_its_model_writes_calls():
  parsers = {name: parser_for("auto", family(name)) for name in FAMILIES}
  qwen = {"qwen2.5": hermes, "qwen3": hermes, "qwen3.5": qwen3_coder}
  assert parsers == {**qwen, "llama3": llama3, "mistral": mistral}
