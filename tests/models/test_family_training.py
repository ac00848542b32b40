"""A tiny random model of each newer family is trained by GTPO, sampled and exported."""

import dataclasses
import json
import math

import jax
import pytest
from family_cases import FAMILY_CASES, MIXTURES, NEWER
from hf_folders import hf_folder, per_expert, raw_tensors
from toys import ADDITIONS, even

import gtpo_jax
from gtpo_jax.cli.export import export_policy
from gtpo_jax.data.chat import load_chat
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.models import Transformer, init_params, save
from gtpo_jax.models.hf.config_json import read_config
from gtpo_jax.runtime.mesh import single_device_mesh

CHANGES = {
  "smollm3": {},
  "olmo2": {},
  "olmo3": {"model": {"lora_rank": 4, "quantize": "int8"}},
  "gemma3": {"sampling": {"staleness": 1}},
  "qwen3_5": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "sampling": {"staleness": 1}},
  "qwen3_moe": {"model": {"router_balance": 0.01}},
  "qwen3_moe-dense": {"sampling": {"staleness": 1}},
  "qwen2_moe": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
  "olmoe": {"model": {"lora_rank": 4, "lora_targets": "q,v,experts", "quantize": "int8"}},
}
BY_HAND = ("smollm3", "olmo2", "gemma3", *MIXTURES[:3])  # which add little to the other rows
INT8 = {"model": {"lora_rank": 4, "quantize": "int8"}}


def marked(name, changes, manual=False):
  """A row: a family and settings."""
  marks = [pytest.mark.devices] if "mesh" in changes else []
  marks += [pytest.mark.manual] if manual else []
  return pytest.param(name, changes, marks=marks, id="-".join((name, *changes.get("model", ()))))


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    *(marked(name, CHANGES[name], name in BY_HAND) for name in NEWER + MIXTURES),
    *(marked(name, INT8, manual=True) for name in ("smollm3", "olmo2", "gemma3", "qwen3_5")),
  ],
)
@pytest.mark.slow
def test_a_tiny_model_is_trained_and_its_export_opens(name, changes, tmp_path):
  transformers = pytest.importorskip("transformers")
  chat = load_chat()
  sizes = {"vocab_size": 384, "context": 256, "rope_scaling": None}
  architecture = read_config(hf_folder(**FAMILY_CASES[name])[0], "float32")
  model = Transformer(dataclasses.replace(architecture, **sizes), single_device_mesh())
  save(model, init_params(model, jax.random.key(0)), chat.tokenizer, tmp_path / "hf")
  config = {
    "steps": 3,
    "model": {"path": str(tmp_path / "hf"), "compute_dtype": "float32", **changes.get("model", {})},
    "data": {"max_prompt_tokens": 20},
    "batch": {"prompts": 8, "group": 8},
    "sampling": {"max_tokens": 24, **changes.get("sampling", {})},
    "mesh": changes.get("mesh", {}),
    "eval": {"every": 0},
    "algorithm": {"name": "gtpo"},
  }
  workdir = tmp_path / "run"
  gtpo_jax.train(config, workdir, Display(enabled=False), reward=even, data=ADDITIONS)
  rows = [row for row in read_jsonl(workdir / "metrics.jsonl") if row.get("loss") is not None]
  assert rows  # a step without contrast has no loss
  for row in rows:
    assert math.isfinite(row["loss"]) and 0 < row["grad_norm"] < math.inf
  # None in a step whose tokens were all drawn by earlier parameters
  gaps = [gap for row in rows if (gap := row["mismatch/max_abs_logp"]) is not None]
  assert gaps and max(gaps) < 1e-4
  export_policy(workdir, tmp_path / "out", "gtpo export")
  again, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "out", output_loading_info=True
  )
  assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
  stored = raw_tensors(tmp_path / "out")
  assert stored.keys() == raw_tensors(tmp_path / "hf").keys()
  for key, x in per_expert({name: x.numpy() for name, x in again.state_dict().items()}).items():
    if key in stored:
      assert x.tobytes() == stored[key][2], key
  kind = json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
  assert kind == architecture.model_type
