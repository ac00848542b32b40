"""YaRN against transformers beyond the original context, in both spellings of config.json."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hf_folders import hf_folder, our_greedy, our_logits, torch_greedy, torch_logits

from gtpo_jax.models import load
from gtpo_jax.models.attention.rope import Yarn
from gtpo_jax.models.hf.config_json import read_config
from gtpo_jax.runtime.errors import UserError

ORIGINAL = 64
LENGTH = 200
BASE = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
CASES = {
  "old": {"rope_theta": 100.0, "rope_scaling": {"type": "yarn", **BASE}},
  "old-without-original": {
    "rope_theta": 100.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
  },
  "old-attention-factor": {
    "rope_theta": 100.0,
    "rope_scaling": {"rope_type": "yarn", "attention_factor": 1.3, **BASE},
  },
  "old-theta-within": {
    "rope_scaling": {"type": "yarn", "rope_theta": 100.0, "truncate": True, "mscale": None, **BASE}
  },
  "new": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, **BASE}},
  "new-betas": {
    "rope_parameters": {
      "rope_type": "yarn",
      "rope_theta": 100.0,
      "beta_fast": 4,
      "beta_slow": 0.5,
      **BASE,
    }
  },
  "new-factor": {
    "rope_parameters": {
      "rope_type": "yarn",
      "rope_theta": 100.0,
      **BASE,
      "factor": 2.5,
      "attention_factor": 0.9,
    }
  },
}


@functools.cache
def folder_of(case):
  """A folder of a plain model's weights with YaRN in config.json, and its torch model."""
  transformers = pytest.importorskip("transformers")
  source, _ = hf_folder(head_dim=16)
  folder = Path(tempfile.mkdtemp(prefix="gtpo_yarn_"))
  (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
  config = json.loads((source / "config.json").read_text())
  config.pop("rope_parameters", None)
  (folder / "config.json").write_text(
    json.dumps(config | CASES[case] | {"max_position_embeddings": ORIGINAL})
  )
  return folder, transformers.Qwen2ForCausalLM.from_pretrained(
    folder, attn_implementation="eager"
  ).eval()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.some(1, slow=1)
def test_logits_equal_those_of_transformers_beyond_the_original_context(case):
  folder, reference = folder_of(case)
  tokens = np.random.default_rng(1).integers(0, 64, (2, LENGTH))
  want = torch_logits(reference, tokens)
  got = our_logits(*load(folder, "float32"), tokens)
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
  plain = torch_logits(hf_folder(head_dim=16)[1], tokens)
  assert np.abs(got - plain)[:, ORIGINAL:].max() > 0.1  # the scaling matters here


@pytest.mark.slow
def test_greedy_text_equals_generate_beyond_the_original_context():
  folder, reference = folder_of("new")
  prompts = [np.random.default_rng(2).integers(0, 64, length).tolist() for length in (60, 90)]
  np.testing.assert_array_equal(
    our_greedy(*load(folder, "float32"), prompts, 24), torch_greedy(reference, prompts, 24)
  )


def test_both_spellings_are_read():
  read = lambda case: read_config(folder_of(case)[0], "float32")
  assert (
    read("old").rope_scaling
    == read("old-without-original").rope_scaling
    == read("new").rope_scaling
    == Yarn(4.0, ORIGINAL)
  )
  assert (
    read("old").rope_theta == read("old-theta-within").rope_theta == read("new").rope_theta == 100.0
  )
  assert (
    read("new-betas").rope_scaling == Yarn(4.0, ORIGINAL, 4.0, 0.5)
    and read("old-attention-factor").rope_scaling.attention_factor == 1.3
  )
  assert read("new").max_length == 4 * ORIGINAL and read("new-factor").max_length == 160


@pytest.mark.parametrize(
  "bad",
  [
    {"factor": 0.5},
    {"original": 0},
    {"beta_fast": 1.0},
    {"beta_slow": 0.0},
    {"factor": float("nan")},
    {"attention_factor": 0.0},
  ],
)
def test_impossible_settings_are_rejected(bad):
  with pytest.raises(UserError, match="YaRN needs factor >= 1"):
    Yarn(**{"factor": 4.0, "original": 64, **bad})
