"""The exports of `benchmarks/clients.py`, and the results that each client must compute from them.

The weights are random and small. The tokenizers have the sizes, ids and settings of published ones,
because some programs behave differently with a small vocabulary. They have 151,643 entries, most of
them fillers that no text contains, and then the control tokens.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import AddedToken, Tokenizer, processors
from train_tokenizer import train

from gtpo_jax.data.chat import Chat, load_chat
from gtpo_jax.models import ModelConfig, Transformer, init_params, load, save
from gtpo_jax.models.attention.rope import Llama3Scaling, Yarn
from gtpo_jax.models.params import Params
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.programs import ProgramSettings
from gtpo_jax.sampling.settings import SamplingParams

ROOT = Path(__file__).parents[1]
ENTRIES = 151_643  # ids below this are not control tokens
TOKENS = 32  # the longest completion
MARGIN = 2e-3  # the least difference between the two largest logits of a greedy step
SIZES = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 160}
ORIGINAL = 256  # a shorter original context is too short for ONNX Runtime GenAI
YARN = {"context": 1024, "rope_scaling": Yarn(4.0, ORIGINAL)}
TEXTS = (
  "12+7:",
  "What is the sum of these numbers? 46+4+8+9+7",
  "naïve café, 日本語, 🙂",
  "Reach the target with the given numbers, each used once.\n\n  3 5 7",
  "a\tb  c 1234567890",
)
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [
  f"<|{name}|>"
  for name in (
    *("object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end"),
    *("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"),
  )
]
QWEN_PLAIN = ["<tool_call>", "</tool_call>"] + [
  f"<|{name}|>"
  for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")
]
QWEN_TEMPLATE = (
  "{%- if messages[0]['role'] == 'system' %}"
  "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
  "{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
  "{%- for message in messages %}{%- if message['role'] != 'system' %}"
  "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
  "{%- endif %}{%- endfor %}"
  "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN = {
  "special": QWEN_SPECIAL,
  "plain": QWEN_PLAIN,
  "config": {
    "tokenizer_class": "Qwen2Tokenizer",
    "add_bos_token": False,
    "add_prefix_space": False,
    "additional_special_tokens": QWEN_SPECIAL[1:],
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": None,
    "errors": "replace",
    "split_special_tokens": False,
    "model_max_length": 131072,
    "clean_up_tokenization_spaces": False,
    "chat_template": QWEN_TEMPLATE,
  },
  "model": {"bos_token_id": 151643, "eos_token_id": 151645},
  "generation": {
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "eos_token_id": [151645, 151643],
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
  },
}
R1_SPECIAL = ["<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>"]
R1 = {
  "special": [R1_SPECIAL[0], R1_SPECIAL[3]],
  "plain": [R1_SPECIAL[1], R1_SPECIAL[2], "<|EOT|>", "<think>", "</think>"],
  "bos": R1_SPECIAL[3],
  "config": {
    "tokenizer_class": "LlamaTokenizerFast",
    "legacy": True,
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": {"__type": "AddedToken", "content": R1_SPECIAL[3], "normalized": True}
    | dict.fromkeys(("lstrip", "rstrip", "single_word"), False),
    "eos_token": {"__type": "AddedToken", "content": R1_SPECIAL[0], "normalized": True}
    | dict.fromkeys(("lstrip", "rstrip", "single_word"), False),
    "pad_token": {"__type": "AddedToken", "content": R1_SPECIAL[0], "normalized": True}
    | dict.fromkeys(("lstrip", "rstrip", "single_word"), False),
    "unk_token": None,
    "sp_model_kwargs": {},
    "model_max_length": 16384,
    "clean_up_tokenization_spaces": False,
    "chat_template": (
      "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
      "{{ '<｜User｜>' + message['content'] }}{% else %}"
      "{{ '<｜Assistant｜>' + message['content'] + eos_token }}{% endif %}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
    ),
  },
  "model": {"bos_token_id": 151643, "eos_token_id": 151643, "use_mrope": False},
  "generation": {
    "_from_model_config": True,
    "bos_token_id": 151646,
    "eos_token_id": 151643,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
  },
}
QWEN3 = QWEN | {
  "plain": [*QWEN_PLAIN, "<tool_response>", "</tool_response>", "<think>", "</think>"],
  "config": QWEN["config"]
  | {
    "chat_template": (
      "{%- for message in messages %}"
      "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
      "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
      "{%- if enable_thinking is defined and enable_thinking is false %}"
      "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
    )
  },
}
LLAMA_SPECIAL = [
  f"<|{name}|>"
  for name in ("end_of_text", "begin_of_text", "start_header_id", "end_header_id", "eom_id")
] + ["<|eot_id|>"]
LLAMA = {
  "special": LLAMA_SPECIAL,
  "plain": [],
  "bos": "<|begin_of_text|>",
  "config": {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|eot_id|>",
    "model_input_names": ["input_ids", "attention_mask"],
    "model_max_length": 131072,
    "clean_up_tokenization_spaces": False,
    "chat_template": (
      "{{- bos_token }}{%- for message in messages %}"
      "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
      "+ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
      "{%- if add_generation_prompt %}"
      "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
    ),
  },
  "model": {"bos_token_id": 151644, "eos_token_id": [151643, 151647, 151648]},
  "generation": {
    "bos_token_id": 151644,
    "eos_token_id": [151643, 151647, 151648],
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
  },
}
MISTRAL = LLAMA | {
  "special": [*LLAMA_SPECIAL, "<unk>"],
  "config": LLAMA["config"] | {"unk_token": "<unk>"},  # CTranslate2's converter needs one
}
NO_BIASES = {"biases": ()}
CASES = {
  "tied": (QWEN, {}),
  "untied": (QWEN, {"tied": False}),
  "yarn": (QWEN, YARN),
  "r1": (R1, {"tied": False}),
  "yarn fields": (QWEN, {"context": 1024, "rope_scaling": Yarn(4.0, ORIGINAL, 16.0, 0.5, 1.25)}),
  "head_dim": (QWEN, {"head_dim": 32}),
  "qwen3": (QWEN3, {"model_type": "qwen3", "head_dim": 32, **NO_BIASES}),
  "llama": (
    LLAMA,
    {
      "model_type": "llama",
      "context": 2048,
      "rope_theta": 500.0,  # so that the scaling matters for the short prompts
      "rope_scaling": Llama3Scaling(8.0, ORIGINAL, 1.0, 4.0),
      **NO_BIASES,
    },
  ),
  "mistral": (MISTRAL, {"model_type": "mistral", "tied": False, "norm_eps": 1e-5, **NO_BIASES}),
}


def make(folder: Path) -> dict[str, dict[str, Any]]:
  """Writes all exports below `folder`, and returns what a client needs for each case."""
  cases = {}
  for seed, (name, (style, changes)) in enumerate(CASES.items()):
    cases[name] = _case(folder / name.replace(" ", "_"), style, changes, seed)
  return _tiny_and_adapter(folder) | cases


def _case(home: Path, style: dict[str, Any], changes: dict[str, Any], seed: int) -> dict[str, Any]:
  chat, model, params, texts = _source(home / "source", style, changes, seed)
  save(model, params, chat.tokenizer, home / "out", stop=chat.stop, source=home / "source")
  return expected(home, home / "out", chat, model, params, texts)


def expected(
  home: Path,
  out: Path,
  chat: Chat,
  model: Transformer,
  params: Params,
  texts: Sequence[str] = TEXTS,
) -> dict[str, Any]:
  """Returns an export's prompts and greedy completions, and the file with its logits.

  The logits f32[prompt, 2, vocab] are those after the prompt and those after the context, which is
  the prompt and the completion without its stop token.
  """
  prompts = [chat.encode_prompt([{"role": "user", "content": text}]) for text in texts]
  completions = _greedy(model, params, prompts, chat.stop)
  contexts = [
    prompt + [token for token in completion if token not in chat.stop]
    for prompt, completion in zip(prompts, completions, strict=True)
  ]
  logits = [
    _logits(model, params, context)[[len(prompt) - 1, -1]]
    for prompt, context in zip(prompts, contexts, strict=True)
  ]
  np.save(home / "logits.npy", np.stack(logits))
  return {
    "folder": str(out),
    "texts": list(texts),
    "prompts": prompts,
    "completions": completions,
    "contexts": contexts,
    "logits": str(home / "logits.npy"),
    "stop": list(chat.stop),
  }


def _source(
  folder: Path, style: dict[str, Any], changes: dict[str, Any], seed: int
) -> tuple[Chat, Transformer, Params, list[str]]:
  """Writes a folder like the published ones, and returns its model and texts to complete.

  The weights are chosen so that the completion of the first text ends early. With a RoPE scaling,
  the texts are longer than the original context.
  """
  config = ModelConfig(**{"vocab_size": 151_936, **SIZES, **changes})
  model = Transformer(config, single_device_mesh())
  _write_tokenizer(folder, style)
  chat = load_chat(folder)
  longest = ORIGINAL if config.rope_scaling else 0
  texts = [" ".join([text] * (longest // len(chat.encode_text(text)) + 1)) for text in TEXTS]
  prompt = chat.encode_prompt([{"role": "user", "content": texts[0]}])
  while True:
    params = _random_params(model, seed)
    (completion,) = _greedy(model, params, [prompt], ())
    rows = _logits(model, params, prompt + completion)[len(prompt) - 1 :]
    gaps = np.diff(np.partition(rows, -2)[:, -2:])
    fresh = [i for i, token in enumerate(completion) if token not in completion[:i] + prompt]
    if gaps.min() > MARGIN and any(6 <= i < 20 for i in fresh):
      break
    seed += 100
  # Exchanging the rows of two tokens makes one of them appear instead of the other.
  token = completion[next(i for i in fresh if i >= 6)]
  params = _exchange(params, token, 151_643)
  save(model, params, None, folder / "model")
  for file in (folder / "model").glob("model*"):
    file.rename(folder / file.name)
  values = json.loads((folder / "model" / "config.json").read_text())
  values = {key: x for key, x in values.items() if key != "transformers_version"}
  (folder / "config.json").write_text(json.dumps(values | style["model"]))
  (folder / "generation_config.json").write_text(json.dumps(style["generation"]))
  return load_chat(folder), *load(folder, "float32"), texts


def _write_tokenizer(folder: Path, style: dict[str, Any]) -> None:
  folder.mkdir(parents=True)
  values = json.loads(train().to_str())
  values["added_tokens"] = []
  vocab = {token: i for token, i in values["model"]["vocab"].items() if not token.startswith("<|")}
  values["model"]["vocab"] = vocab | {f"filler{i}": i for i in range(len(vocab), ENTRIES)}
  tokenizer = Tokenizer.from_str(json.dumps(values))
  order = R1_SPECIAL if style is R1 else style["special"]
  for token in dict.fromkeys([*order, *style["plain"]]):
    special = token in style["special"]
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
  if bos := style.get("bos"):
    tokenizer.post_processor = processors.TemplateProcessing(
      single=f"{bos}:0 $A:0",
      pair=f"{bos}:0 $A:0 $B:1",
      special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
  tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
  (folder / "tokenizer_config.json").write_text(json.dumps(style["config"]))


def _random_params(model: Transformer, seed: int) -> Params:
  """Returns parameters in which biases and norms are random too."""
  leaves, structure = jax.tree.flatten(init_params(model, jax.random.key(seed)))
  rng = np.random.default_rng(seed)
  return structure.unflatten([x + 0.25 * rng.standard_normal(x.shape, np.float32) for x in leaves])


def _exchange(params: Params, a: int, b: int) -> Params:
  """Exchanges the rows of two tokens in the embedding and the head."""
  tables = {name: np.array(params[name]) for name in ("embedding", "head") if name in params}
  for table in tables.values():
    table[[a, b]] = table[[b, a]]
  return dict(params) | jax.tree.map(jax.numpy.asarray, tables)


def _greedy(
  model: Transformer, params: Params, prompts: list[list[int]], stop: tuple[int, ...]
) -> list[list[int]]:
  """Returns the greedy completions, each up to its first stop token, which it includes."""
  engine = Engine(ProgramSettings(model, stop, 0, max(map(len, prompts)), TOKENS))
  rollouts = engine.sample(
    engine.layout(params),
    prompts,
    jax.random.key(0),
    group=1,
    sampling_params=SamplingParams(temperature=0.0),
  )
  tokens, mask = np.asarray(rollouts.tokens)[:, 0], np.asarray(rollouts.mask)[:, 0]
  return [row[valid].tolist() for row, valid in zip(tokens, mask, strict=True)]


def _logits(model: Transformer, params: Params, tokens: list[int]) -> np.ndarray:
  """Returns f32[t, v]."""
  return np.asarray(model.apply({"params": params}, np.array([tokens], np.int32)))[0]


def gtpo(*arguments: str, cwd: Path) -> None:
  command = [sys.executable, "-m", "gtpo_jax", *arguments]
  environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
  subprocess.run(command, cwd=cwd, env=environment, check=True, stdout=subprocess.DEVNULL)


def _tiny_and_adapter(folder: Path) -> dict[str, dict[str, Any]]:
  """Exports a short run of the tiny job, and adapters that were trained on that export."""
  common = ["--config.eval.problems=8", "--config.eval.samples=2", "--config.eval.batch=8"]
  common += ["--config.data.terms=2", "--config.batch.prompts=8", "--config.batch.group=4"]
  train_tiny = ["train", f"--config={ROOT / 'configs' / 'tiny.py'}", *common]
  gtpo(
    *train_tiny,
    "--workdir=runs/tiny",
    "--config.steps=2",
    "--config.warm_start.steps=300",
    cwd=folder,
  )
  gtpo("export", "--workdir=runs/tiny", "--out=tiny/out", cwd=folder)
  gtpo(
    *train_tiny,
    "--workdir=runs/adapter",
    "--config.model.path=tiny/out",
    "--config.model.lora_rank=4",
    "--config.warm_start.steps=0",
    "--config.steps=3",
    "--config.optimizer.learning_rate=1e-2",
    cwd=folder,
  )
  gtpo("export", "--workdir=runs/adapter", "--out=adapter/out", "--adapter", cwd=folder)
  gtpo("export", "--workdir=runs/adapter", "--out=adapter/merged", cwd=folder)
  cases = {}
  for name, merged in (("tiny", "out"), ("adapter", "merged")):
    home = folder / name
    model, params = load(home / merged, "float32")
    model = Transformer(dataclasses.replace(model.config, matmul_precision="highest"), model.mesh)
    cases[name] = expected(home, home / "out", load_chat(home / merged), model, params)
  cases["adapter"]["base"] = str(folder / "tiny" / "out")
  return cases
