"""Hugging Face folders during a run: whole, the newest kept, and again after a resume."""

import hashlib
import shutil

import jax
import numpy as np
import pytest
from toys import ADDITIONS, config_of, even

import gtpo_jax
from gtpo_jax import models
from gtpo_jax.logs.display import Display

QUIET = Display(enabled=False)
CHANGES = {
  "steps": 6,
  "data.max_prompt_tokens": 20,
  "batch.group": 4,
  "eval.every": 0,
  "eval.samples": 1,
  "batch.prompts": 4,
  "sampling.max_tokens": 8,
  "checkpoint.every": 1,
  "checkpoint.keep": 2,
  "checkpoint.export_every": 2,
}


def digests(folder):
  return {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in folder.iterdir()}


@pytest.mark.slow
def test_the_newest_exports_are_kept_and_a_resumed_run_writes_them_again(tmp_path):
  train = lambda: gtpo_jax.train(
    config_of(**CHANGES), tmp_path / "run", QUIET, lambda: False, reward=even, data=ADDITIONS
  )
  result = train()
  exports = tmp_path / "run" / "exports"
  assert sorted(entry.name for entry in exports.iterdir()) == ["4", "6"]
  _, params = models.load(exports / "6", dtype="float32")
  jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(result.policy.params))
  names = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
  assert names < set(digests(exports / "6")) and (exports / "6" / "SHA256SUMS").exists()
  written = digests(exports / "6")
  shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")  # as if it was killed after step 5
  (exports / "6" / "config.json").write_text("torn")
  assert train().step == 6
  assert sorted(entry.name for entry in exports.iterdir()) == ["4", "6"]
  assert digests(exports / "6") == written
