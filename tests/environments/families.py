"""Small tokenizers with the control tokens of model families.

Their chat templates are written for these tests. They have the structure of the published ones:
what precedes and follows each message, where tools stand, and what the templates refuse. Their
vocabularies are trained on a few lines, with the splitting of the real tokenizers.
"""

import functools
import json
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from gtpo_jax.data.chat import load_chat

# Qwen2.5 has a system message of its own. Qwen3 drops the thinking of turns before the last user
# message, and writes it in the last turn even if it is empty.
QWEN = """
{%- set tools = tools if tools is defined and tools else [] %}
{%- set system = messages[0].content if messages[0].role == 'system' else DEFAULT %}
{%- if tools or system %}
{{- '<|im_start|>system\n' + system }}
{%- for tool in tools %}{{- '\n<tools>' + tool | tojson + '</tools>' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set text = m.content.split('</think>')[-1].lstrip('\n') if THINKS else m.content %}
{{- '<|im_start|>assistant\n' }}
{%- if THINKS and loop.last and loop.index0 > ns.last %}
{%- set thinking = m.content.split('</think>')[0].split('<think>')[-1] %}
{{- '<think>\n' + (thinking if '</think>' in m.content else '').strip('\n') + '\n</think>\n\n' }}
{%- endif %}
{{- text }}
{%- for call in m.tool_calls or [] %}
{%- if text or not loop.first %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
# Qwen3.5 begins to think in the prompt, keeps the thinking of all turns since the last question,
# and writes calls as XML.
QWEN3_5 = """
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
{{- '<tool_call>\n<function=NAME>\n<parameter=NAME>\nVALUE\n</parameter>' }}
{{- '\n</function>\n</tool_call><|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set text = m.content.split('</think>')[-1].strip() %}
{%- set thinking = m.content.split('</think>')[0].split('<think>')[-1].strip() %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last %}
{{- '<think>\n' + (thinking if '</think>' in m.content else '') + '\n</think>\n\n' }}{%- endif %}
{{- text }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first %}{{- '\n' }}{%- elif text %}{{- '\n\n' }}{%- endif %}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) }}
{{- '\n</parameter>\n' }}{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
# Llama 3.1 writes results as JSON, allows one call in a turn, and has tools in the first question.
LLAMA3 = """
{%- macro head(role) %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{%- endmacro %}
{{- bos_token + head('system') }}
{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}
{%- set messages = messages[1:] %}{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role in ('tool', 'ipython') %}
{{- head('ipython') + m.content | tojson + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson
  + '}<|eot_id|>' }}
{%- else %}
{{- head(m.role) }}
{%- if tools and loop.first %}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}{%- endif %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{%- endif %}"""
# Mistral refuses two questions in a row and results without the name of a call, and has tools in
# the last question.
MISTRAL = """
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if m.role != 'tool' and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('alternate') }}{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- if m.role == 'user' %}
{%- if tools and m == questions[-1] %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('nine characters') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}
{%- if not m.tool_call_id or m.tool_call_id | length != 9 %}
{{- raise_exception('nine characters') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id
  + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('roles') }}
{%- endif %}
{%- endfor %}"""

_QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"]
_QWEN_PLAIN = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|repo_name|>"]
_QWEN3_PLAIN = [*_QWEN_PLAIN, "<tool_response>", "</tool_response>", "<think>", "</think>"]
# Special tokens, plain added tokens, end tokens, settings.
FAMILIES = {
  "qwen2.5": (
    _QWEN_SPECIAL,
    _QWEN_PLAIN,
    ["<|im_end|>", "<|endoftext|>"],
    {
      "eos_token": "<|im_end|>",
      "pad_token": "<|endoftext|>",
      "chat_template": QWEN.replace("DEFAULT", "'You are Qwen.'").replace("THINKS", "false"),
    },
  ),
  "qwen3": (
    _QWEN_SPECIAL,
    _QWEN3_PLAIN,
    ["<|im_end|>", "<|endoftext|>"],
    {
      "eos_token": "<|im_end|>",
      "pad_token": "<|endoftext|>",
      "chat_template": QWEN.replace("DEFAULT", "''").replace("THINKS", "true"),
    },
  ),
  "qwen3.5": (
    _QWEN_SPECIAL,
    _QWEN3_PLAIN,
    ["<|im_end|>", "<|endoftext|>"],
    {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": QWEN3_5},
  ),
  "llama3": (
    [
      f"<|{name}|>"
      for name in ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id")
    ]
    + ["<|eot_id|>", "<|python_tag|>", "<|reserved_special_token_0|>"],
    [],
    ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA3},
  ),
  "mistral": (
    [
      *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
      *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ],
    [],
    ["</s>"],
    {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": MISTRAL},
  ),
}
LINES = [
  'user\nassistant\nsystem\n<tool_response>\n{"name": "search", "arguments": {"query": "jax"}}\n',
  '</tool_response>\n[{"content": "The answer is 42.", "call_id": "abcdefghi"}]\n\n',
  "def f(x):\n  return x + 1\n\n\nprint(f(3))\n}\n}\n\n",
] * 4
SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
  r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def family(name):
  """Returns the tokenizer of a family, as a `Chat`."""
  special, plain, stop, settings = FAMILIES[name]
  tokenizer = _sentence_piece() if name == "mistral" else _byte_level()
  for tokens, is_special in ((special, True), (plain, False)):
    added = [AddedToken(token, special=is_special, normalized=False) for token in tokens]
    tokenizer.add_tokens(added)
  with tempfile.TemporaryDirectory() as folder:
    return load(Path(folder), tokenizer, settings, stop)


def load(folder, tokenizer, settings, stop):
  """Returns a tokenizer with settings and end tokens, as a `Chat`."""
  tokenizer.save(str(folder / "tokenizer.json"))
  defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
  (folder / "tokenizer_config.json").write_text(json.dumps(defaults | settings))
  ids = [tokenizer.token_to_id(token) for token in stop]
  (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
  return load_chat(folder)


def _byte_level():
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(Regex(SPLIT), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
  tokenizer.train_from_iterator(LINES, trainer)
  return tokenizer


def _sentence_piece():
  """Returns a BPE with byte fallback that marks spaces, as tokenizers of Llama 2 and Mistral do."""
  tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  trainer = trainers.BpeTrainer(
    vocab_size=500,
    special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
    show_progress=False,
  )
  tokenizer.train_from_iterator(LINES, trainer)
  values = json.loads(tokenizer.to_str())
  values["added_tokens"] = []  # byte tokens are part of the vocabulary only
  return Tokenizer.from_str(json.dumps(values))
