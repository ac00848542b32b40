"""Opens exports with one client; `benchmarks/clients.py` runs this in the client's environment.

    python client_runner.py CLIENT JOB.json RESULT.json

It imports nothing of gtpo_jax. For every case of the job it writes the completions, the largest
difference from the expected logits, the ids of the chat template, warnings and unmatched keys.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import traceback
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np

TOKENS = 32
# What a client of Transformers saves, with the beginning of the name of the model's class.
SAVED = {"saved qwen2": "Qwen2", "saved qwen3": "Qwen3", "saved llama": "Llama"}
Case = dict[str, Any]
Result = dict[str, Any]


class Seen(logging.Handler):
  """Collects warnings of the logging module."""

  def __init__(self):
    super().__init__(logging.WARNING)
    self.messages: list[str] = []

  def emit(self, record: logging.LogRecord) -> None:
    self.messages.append(record.getMessage())


@contextlib.contextmanager
def collect_warnings() -> Iterator[list[str]]:
  """Yields a list that contains all warnings once the context has exited."""
  seen = Seen()
  loggers = [logging.getLogger(name) for name in ("", "transformers", "peft", "optimum")]
  for logger in loggers:
    logger.addHandler(seen)
  messages: list[str] = []
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    yield messages
  for logger in loggers:
    logger.removeHandler(seen)
  # Deprecations and traces concern the code of the client, not the folder that it reads.
  ignored = ("DeprecationWarning", "FutureWarning", "TracerWarning")
  messages += [str(w.message) for w in caught if w.category.__name__ not in ignored]
  messages += seen.messages


def error_of(case: Case, logits: list[np.ndarray]) -> float:
  """Returns the largest difference of [2, vocab] logits per prompt from the expected ones."""
  wanted = np.load(case["logits"])
  return float(max(np.abs(x - y).max() for x, y in zip(logits, wanted, strict=True)))


def hf_tokenizer(folder: str) -> Any:
  from transformers import AutoTokenizer

  return AutoTokenizer.from_pretrained(folder)


def template_ids(tokenizer: Any, case: Case) -> list[list[int]]:
  """Returns the ids of each text as a user's message, by the library's own template call."""
  rows = []
  for text in case["texts"]:
    messages = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    rows.append(list(ids["input_ids"] if hasattr(ids, "keys") else ids))
  return rows


def torch_results(model: Any, case: Case) -> Result:
  """Completions and logits of a torch model or of one with the same interface."""
  import torch

  completions, logits = [], []
  greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
  for prompt, context in zip(case["prompts"], case["contexts"], strict=True):
    tokens = torch.tensor([prompt])
    out = model.generate(
      tokens,
      attention_mask=torch.ones_like(tokens),
      max_new_tokens=TOKENS,
      repetition_penalty=1.0,
      **greedy,
    )
    completions.append(out[0, len(prompt) :].tolist())
    with torch.no_grad():
      full = torch.tensor([context])
      rows = model(input_ids=full, attention_mask=torch.ones_like(full)).logits[0].float().numpy()
    logits.append(rows[[len(prompt) - 1, -1]])
  return {"completions": completions, "error": error_of(case, logits)}


def run_transformers(case: Case, _: Path) -> Result:
  from transformers import AutoModelForCausalLM

  model, report = AutoModelForCausalLM.from_pretrained(
    case["folder"], output_loading_info=True, attn_implementation="eager"
  )
  keys = [str(key) for kind in report.values() for key in kind]
  tokenizer = hf_tokenizer(case["folder"])
  template = template_ids(tokenizer, case)
  return torch_results(model.eval(), case) | {"template": template, "keys": keys}


def save_model(family: str, scratch: Path) -> Result:
  """Saves a model with the client; `gtpo_jax` must compute the same logits from the folder."""
  import torch
  import transformers

  torch.manual_seed(0)
  sizes = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 512, "num_hidden_layers": 2}
  heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
  config = getattr(transformers, f"{family}Config")(**sizes, **heads)
  model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
  tokens = torch.randint(0, 512, (2, 40))
  with torch.no_grad():
    for weights in model.parameters():
      weights.add_(0.1 * torch.randn(weights.shape))
    np.save(scratch / f"{family}.npy", model(tokens).logits.numpy())
  model.save_pretrained(scratch / family)
  return {
    "folder": str(scratch / family),
    "tokens": tokens.tolist(),
    "logits": str(scratch / f"{family}.npy"),
  }


def run_peft(case: Case, _: Path) -> Result:
  from peft import AutoPeftModelForCausalLM
  from safetensors import safe_open

  model = AutoPeftModelForCausalLM.from_pretrained(case["folder"]).eval()
  with safe_open(Path(case["folder"]) / "adapter_model.safetensors", framework="numpy") as file:
    stored = set(file.keys())
  named = {name.replace(".default", "") for name, _ in model.named_parameters() if "lora_" in name}
  template = template_ids(hf_tokenizer(case["base"]), case)
  return torch_results(model, case) | {"template": template, "keys": sorted(named ^ stored)}


def run_mlx(case: Case, _: Path) -> Result:
  import mlx.core as mx
  from mlx_lm import load
  from mlx_lm.generate import generate_step

  mx.set_default_device(mx.cpu)
  model, tokenizer = load(case["folder"])
  completions, logits = [], []
  for prompt, context in zip(case["prompts"], case["contexts"], strict=True):
    tokens = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=TOKENS):
      tokens.append(int(token))
      if tokens[-1] in tokenizer.eos_token_ids:
        break
    completions.append(tokens)
    rows = np.array(model(mx.array([context]))[0].astype(mx.float32))
    logits.append(rows[[len(prompt) - 1, -1]])
  template = template_ids(tokenizer, case)
  return {"completions": completions, "error": error_of(case, logits), "template": template}


def run_ctranslate2(case: Case, scratch: Path) -> Result:
  import ctranslate2
  from ctranslate2.converters import TransformersConverter

  folder = scratch / "ctranslate2"
  TransformersConverter(case["folder"]).convert(str(folder))
  generator = ctranslate2.Generator(str(folder), compute_type="float32")
  tokenizer = hf_tokenizer(case["folder"])
  completions, logits = [], []
  for prompt, context in zip(case["prompts"], case["contexts"], strict=True):
    (out,) = generator.generate_batch(
      [tokenizer.convert_ids_to_tokens(prompt)],
      max_length=TOKENS,
      sampling_topk=1,
      include_prompt_in_result=False,
      end_token=case["stop"],  # the converter keeps only one
      return_end_token=True,
    )
    completions.append(list(out.sequences_ids[0]))
    rows = np.array(generator.forward_batch([context]).to(ctranslate2.DataType.float32))[0]
    logits.append(rows[[len(prompt) - 1, -1]])
  template = template_ids(tokenizer, case)
  return {"completions": completions, "error": error_of(case, logits), "template": template}


def run_openvino(case: Case, scratch: Path) -> Result:
  from optimum.intel import OVModelForCausalLM

  exact = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}
  model = OVModelForCausalLM.from_pretrained(
    case["folder"], export=True, ov_config=exact, load_in_8bit=False
  )
  template = template_ids(hf_tokenizer(case["folder"]), case)
  return torch_results(model, case) | {"template": template}


def run_onnx_genai(case: Case, scratch: Path) -> Result:
  import onnxruntime_genai as og

  command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", case["folder"]]
  command += ["-o", str(scratch / "onnx"), "-p", "fp32", "-e", "cpu", "-c", str(scratch / "cache")]
  notes = run_converter(command)
  model = og.Model(str(scratch / "onnx"))
  completions, logits = [], []
  for prompt, context in zip(case["prompts"], case["contexts"], strict=True):
    params = og.GeneratorParams(model)
    length = len(prompt) + TOKENS
    params.set_search_options(do_sample=False, max_length=length, repetition_penalty=1.0)
    generator = og.Generator(model, params)
    generator.append_tokens(prompt)
    first = np.array(generator.get_logits()).reshape(-1)
    while not generator.is_done():
      generator.generate_next_token()
    completions.append([int(x) for x in generator.get_sequence(0)[len(prompt) :]])
    params = og.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=length + 1)
    generator = og.Generator(model, params)
    generator.append_tokens(context)
    logits.append(np.stack([first, np.array(generator.get_logits()).reshape(-1)]))
  tokenizer = og.Tokenizer(model)
  template = []
  for text in case["texts"]:
    messages = json.dumps([{"role": "user", "content": text}])
    rendered = tokenizer.apply_chat_template(messages=messages, add_generation_prompt=True)
    template.append([int(x) for x in tokenizer.encode(rendered)])
  return {
    "completions": completions,
    "error": error_of(case, logits),
    "template": template,
    "warnings_of_converter": notes,
  }


def run_converter(command: list[str], cwd: str | None = None) -> list[str]:
  """Runs a converter and returns its warnings.

  Raises:
    RuntimeError: it failed.
  """
  done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
  lines = (done.stdout + done.stderr).splitlines()
  if done.returncode:
    raise RuntimeError("; ".join(line for line in lines[-3:] if line.strip()))
  return [line for line in lines if re.search("warning", line, re.IGNORECASE)]


def run_llama_cpp(case: Case, scratch: Path) -> Result:
  """Converts with the script that accompanies llama-cpp-python, and runs the server of xllamacpp.

  The server only reports log-probs, so these are compared instead of the logits.
  """
  import xllamacpp

  checkout = os.environ["LLAMA_CPP"]
  notes = run_converter(gguf_command(case.get("base", case["folder"]), scratch / "model"), checkout)
  params = xllamacpp.CommonParams()
  params.model.path = str(scratch / "model.gguf")
  params.n_ctx = 1024
  params.n_parallel = 1
  params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
  params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
  if "base" in case:
    # Without --base, the script takes an absolute path for a malformed hub id.
    command = [sys.executable, "convert_lora_to_gguf.py", "--base", case["base"], case["folder"]]
    notes += run_converter([*command, "--outfile", str(scratch / "adapter.gguf")], checkout)
    adapter = xllamacpp.CommonAdapterLoraInfo(str(scratch / "adapter.gguf"), 1.0)
    params.lora_adapters = [adapter]
  server = xllamacpp.Server(params)
  greedy = {"temperature": 0.0, "repeat_penalty": 1.0, "n_predict": TOKENS, "return_tokens": True}
  greedy["cache_prompt"] = False
  completions, differences, template = [], [], []
  logits = np.load(case["logits"])
  for i, text in enumerate(case["texts"]):
    completions.append(post(server, "/completion", {"prompt": case["prompts"][i], **greedy}))
    for prompt, row in zip((case["prompts"][i], case["contexts"][i]), logits[i], strict=True):
      next_tokens = {**greedy, "prompt": prompt, "n_predict": 8, "n_probs": 10}
      reply = post(server, "/completion", next_tokens)
      step, *_ = reply["completion_probabilities"]
      if step["id"] != reply["tokens"][0]:
        continue  # the server leaves out the log-probs of a token that is only part of a character
      log_probs = row - row.max() - np.log(np.exp(row - row.max()).sum())
      differences += [abs(top["logprob"] - log_probs[top["id"]]) for top in step["top_logprobs"]]
    messages = {
      "messages": [{"role": "user", "content": text}],
      "chat_template_kwargs": {"enable_thinking": True},  # the server's default is false here
    }
    rendered = post(server, "/apply-template", messages)["prompt"]
    # The server leaves out the beginning-of-text token if the tokenizer adds it.
    text_of_prompt = {"content": rendered, "parse_special": True, "add_special": True}
    template.append(post(server, "/tokenize", text_of_prompt))
  return {
    "completions": [completion["tokens"] for completion in completions],
    "error": float(max(differences)),
    "template": [reply["tokens"] for reply in template],
    "warnings_of_converter": notes,
  }


def gguf_command(folder: str, out: Path) -> list[str]:
  """Returns the model card's command: the converter, told that the tokenizer is Qwen2's."""
  code = (
    "import conversion, convert_hf_to_gguf as convert\n"
    "conversion.TextModel.get_vocab_base_pre = lambda *_: 'qwen2'\n"
    "convert.main()"
  )
  return [sys.executable, "-c", code, folder, "--outtype=f32", f"--outfile={out}.gguf"]


def post(server: Any, path: str, values: dict[str, Any]) -> dict[str, Any]:
  """Sends JSON to the server on this machine and returns its reply."""
  request = urllib.request.Request(
    server.listening_address + path,
    json.dumps(values).encode(),
    {"Content-Type": "application/json"},
  )
  with urllib.request.urlopen(request, timeout=120) as reply:
    return json.load(reply)


CLIENTS: dict[str, Callable[[Case, Path], Result]] = {
  "transformers": run_transformers,
  "peft": run_peft,
  "mlx": run_mlx,
  "ctranslate2": run_ctranslate2,
  "openvino": run_openvino,
  "onnxruntime-genai": run_onnx_genai,
  "llama.cpp": run_llama_cpp,
}


def main(client: str, job: Path, result: Path) -> None:
  cases = json.loads(job.read_text())
  results = {}
  for name, case in cases.items():
    scratch = result.parent / f"{client}-{name.replace(' ', '_')}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    with collect_warnings() as messages:
      try:
        found = CLIENTS[client](case, scratch)
      except Exception as error:  # a client may fail in any way, and the others must still run
        traceback.print_exc()
        found = {"failure": f"{type(error).__name__}: {error}"[:400]}
    results[name] = {"warnings": sorted(set(messages))} | found
    result.write_text(json.dumps(results))
  if client == "transformers":
    for name, family in SAVED.items():
      results[name] = save_model(family, result.parent)
      result.write_text(json.dumps(results))


if __name__ == "__main__":
  main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
