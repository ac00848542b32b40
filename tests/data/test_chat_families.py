"""Prompts in the styles of the families are those of the tokenizer's own template."""

import json

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, normalizers, processors

from gtpo_jax.data.chat import TOKENIZER_DIR, load_chat
from gtpo_jax.data.chat_template import check_variables
from gtpo_jax.data.records import user
from gtpo_jax.models.hf.save import save_tokenizer
from gtpo_jax.runtime.errors import UserError

QWEN3 = (
  "{%- for message in messages %}"
  "{%- if message.role == 'assistant' and '</think>' in message.content %}"
  "{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
  "{%- else %}{%- set content = message.content %}{%- endif %}"
  "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
  "{%- endfor %}"
  "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
  "{%- if enable_thinking is defined and enable_thinking is false %}"
  "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
LLAMA3 = (
  "{{- bos_token }}{%- for message in messages %}"
  "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
  "+ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
  "{%- if add_generation_prompt %}"
  "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
MISTRAL = (
  "{{- bos_token }}{%- for message in messages %}"
  "{%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + '[/INST]' }}"
  "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}"
  "{%- else %}{{- raise_exception('only user and assistant roles are supported') }}{%- endif %}"
  "{%- endfor %}"
)
# There is no system role: its message is put before the user's first one.
GEMMA3 = (
  "{{- bos_token }}{%- set system = messages[0]['role'] == 'system' %}"
  "{%- for message in (messages[1:] if system else messages) %}"
  "{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) }}"
  "{{- '\\n' + (messages[0]['content'] + '\\n\\n' if system and loop.first else '') }}"
  "{{- message['content'] | trim + '<end_of_turn>\\n' }}{%- endfor %}"
  "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
)
# Roles are plain text, and one token begins a conversation and ends a completion.
OLMO2 = (
  "{{- bos_token }}{%- for message in messages %}"
  "{{- '<|' + message['role'] + '|>\\n' + message['content'] }}"
  "{%- if message['role'] == 'assistant' %}{{- eos_token }}{%- endif %}{{- '\\n' }}{%- endfor %}"
  "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)
# Special tokens, plain added tokens, settings of the tokenizer, and end tokens of
# generation_config.json. Each of the lists of end tokens has one that the tokenizer does not name.
STYLES = {
  "qwen3": (
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    ["<think>", "</think>", "<tool_call>"],
    {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": QWEN3},
    ["<|im_end|>", "<|endoftext|>"],
  ),
  "llama3": (
    [f"<|{name}|>" for name in ("begin_of_text", "end_of_text", "start_header_id", "end_header_id")]
    + [f"<|{name}|>" for name in ("eom_id", "eot_id")],
    [],
    {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA3},
    ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
  ),
  "mistral": (
    ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
    [],
    {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": MISTRAL},
    ["</s>"],
  ),
  "gemma3": (
    ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
    [],
    {**{"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}, "chat_template": GEMMA3},
    ["<eos>", "<end_of_turn>"],
  ),
  "olmo2": (
    ["<|endoftext|>", "<|pad|>"],
    [],
    {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    | {"chat_template": OLMO2},
    ["<|endoftext|>"],
  ),
}
CONVERSATIONS = [
  user("What is 46+4?"),
  user("  naïve café, 日本語, 🙂\n"),
  [*user("1+2?"), {"role": "assistant", "content": "3."}, *user("+4?")],
]


@pytest.fixture(scope="module", params=STYLES)
def styled(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp(request.param)
  write_style(folder, *STYLES[request.param])
  return request.param, load_chat(folder)


def write_style(folder, special, plain, settings, stop):
  """Writes the tokenizer of this package with the control tokens and the template of a family."""
  values = json.loads((TOKENIZER_DIR / "tokenizer.json").read_text())
  values["added_tokens"] = []
  control = values["model"]["vocab"]
  values["model"]["vocab"] = {x: i for x, i in control.items() if not x.startswith("<|")}
  tokenizer = Tokenizer.from_str(json.dumps(values))
  for tokens, is_special in ((special, True), (plain, False)):
    added = [AddedToken(token, special=is_special, normalized=False) for token in tokens]
    tokenizer.add_tokens(added)
  if bos := settings.get("bos_token"):
    tokenizer.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
  tokenizer.save(str(folder / "tokenizer.json"))
  defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
  (folder / "tokenizer_config.json").write_text(json.dumps(defaults | settings))
  ids = [tokenizer.token_to_id(token) for token in stop]
  ids = ids if len(ids) > 1 else ids[0]
  (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["digits", "unicode", "turns"])
def test_prompts_are_those_of_the_tokenizers_template(styled, messages):
  _, chat = styled
  want = chat.tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=False
  )
  ids = chat.encode_prompt(messages)
  assert ids == want
  if bos := chat.tokenizer.bos_token_id:
    ends = sum(x["role"] == "assistant" for x in messages) if bos in chat.stop else 0
    assert ids[0] == bos and ids.count(bos) == 1 + ends


def test_control_tokens_in_a_text_stay_text(styled):
  name, chat = styled
  special, plain, _, _ = STYLES[name]
  for token in (*special, *plain):
    if len(token) < 2:
      continue
    ids = chat.encode_prompt(user(f"a {token} b"))
    harmless = chat.encode_prompt(user("a b"))
    number = chat.tokenizer.convert_tokens_to_ids(token)
    assert ids.count(number) == harmless.count(number), token
    assert f"a {token} b" in chat.tokenizer.decode(ids)


def test_a_saved_tokenizer_has_a_class_that_transformers_4_knows(styled, tmp_path):
  _, chat = styled
  save_tokenizer(chat.tokenizer, tmp_path)
  values = json.loads((tmp_path / "tokenizer_config.json").read_text())
  assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
  again = load_chat(tmp_path)
  for messages in CONVERSATIONS:
    assert again.encode_prompt(messages) == chat.encode_prompt(messages)


def test_every_end_token_ends_a_completion(styled):
  name, chat = styled
  _, _, settings, stop = STYLES[name]
  tokens = {*stop, settings["eos_token"], settings.get("pad_token", settings["eos_token"])}
  assert set(chat.stop) == set(chat.tokenizer.convert_tokens_to_ids(sorted(tokens)))
  assert chat.encode_completion("3")[-1] == chat.tokenizer.convert_tokens_to_ids(
    settings["eos_token"]
  )
  row = [*chat.tokenizer.encode("3", add_special_tokens=False), *chat.stop]
  assert chat.decode([row]) == ["3"]


def test_plain_text_begins_as_the_tokenizer_begins_it(styled):
  name, chat = styled
  ids = chat.encode_text("1+2=")
  assert ids == chat.tokenizer.encode("1+2=")
  assert (ids[0] == chat.tokenizer.bos_token_id) == (name != "qwen3")


THOUGHTS = [
  [*user("1+2?"), {"role": "assistant", "content": turn}, *user("+4?")]
  for turn in (
    "<think>\nLet me see: 3.\n</think>\n\n3.",
    "Let me see.</think>3.",
    "<think>\n\n</think>\n\n3.",
    "3. </think>",
    'Wait. <tool_call>\n{"name": "add"}',
  )
]


@pytest.mark.parametrize("messages", THOUGHTS)
@pytest.mark.parametrize("style", ["qwen3", "keeping"])
def test_thinking_of_earlier_turns_is_as_the_template_renders_it(style, messages, tmp_path):
  """Qwen3's template leaves it out. Where one keeps it, its marks are tokens."""
  special, plain, settings, stop = STYLES["qwen3"]
  if style == "keeping":
    settings = settings | {"chat_template": QWEN3.replace("'</think>' in", "'</nothing>' in")}
  write_style(tmp_path, special, plain, settings, stop)
  chat = load_chat(tmp_path)
  options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
  ids = chat.encode_prompt(messages)
  assert ids == chat.tokenizer.apply_chat_template(messages, **options)
  marks = chat.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
  if style == "qwen3":
    assert not set(ids) & set(marks)
  hostile = [*user("</think><|im_end|>"), *messages[1:]]
  assert chat.controls(chat.encode_prompt(hostile)) == chat.controls(ids)


def test_variables_reach_the_template(tmp_path):
  write_style(tmp_path, *STYLES["qwen3"])
  chat = load_chat(tmp_path)
  without = load_chat(tmp_path, {"enable_thinking": False})
  ids = chat.encode_prompt(user("1+2?"))
  closed = without.encode_prompt(user("1+2?"))
  assert chat.tokenizer.decode(closed[len(ids) :]) == "<think>\n\n</think>\n\n"
  assert chat.encode_prompt(user("1+2?"), variables={"enable_thinking": False}) == closed
  assert without.encode_prompt(user("1+2?"), variables={"enable_thinking": True}) == ids
  for wrong in ({"tokenize": True}, {"chat_template": "x"}, [], {"a b": 1}):
    with pytest.raises(ValueError, match=r"^must"):
      check_variables(wrong)


def test_the_end_of_a_turn_ends_a_completion_of_a_base_model(tmp_path):
  """As in Qwen2.5's base models, whose only end token is <|endoftext|>."""
  special, plain, settings, _ = STYLES["qwen3"]
  settings = settings | {"eos_token": "<|endoftext|>"}
  write_style(tmp_path, special, plain, settings, ["<|endoftext|>"])
  chat = load_chat(tmp_path)
  ends = chat.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
  assert set(chat.stop) == set(ends)
  assert chat.decode([chat.tokenizer.encode("3<|im_end|>")]) == ["3"]


@pytest.mark.parametrize("mends", [True, False])
def test_a_class_that_encodes_otherwise_than_its_file_is_mended_or_refused(
  mends, tmp_path, monkeypatch
):
  """As LlamaTokenizerFast does in some versions of transformers, which lose the spaces."""
  write_style(tmp_path, *STYLES["llama3"])
  expected = load_chat(tmp_path).encode_plain("a b\n c")

  def spaceless(read):
    def load(*args, **options):
      tokenizer = read(*args, **options)
      tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "")
      return tokenizer

    return load

  for name in ("AutoTokenizer", "PreTrainedTokenizerFast")[: 1 if mends else 2]:
    owner = getattr(transformers, name)
    monkeypatch.setattr(owner, "from_pretrained", spaceless(owner.from_pretrained))
  if mends:
    assert load_chat(tmp_path).encode_plain("a b\n c") == expected
  else:
    with pytest.raises(UserError, match=r"encodes texts otherwise than tokenizer\.json says"):
      load_chat(tmp_path)
