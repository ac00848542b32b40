"""Saved adapters and merged models: PEFT and transformers compute our logits from them."""

import json
import subprocess

import jax
import numpy as np
import pytest
from adapters import SOME, adapted, base, on_mesh_of, with_lora
from hf_folders import hf_folder, our_logits, padded_batch, raw_tensors, torch_logits
from meshes import mesh_of

from gtpo_jax.models import load, save, save_adapter
from gtpo_jax.models.config import LORA_TARGETS
from gtpo_jax.models.hf.folder import find
from gtpo_jax.models.lora import merge_lora
from gtpo_jax.runtime.errors import UserError


@pytest.mark.filterwarnings(
  "ignore::FutureWarning"
)  # PEFT uses names that are deprecated in transformers
@pytest.mark.parametrize("targets", [LORA_TARGETS, SOME])
@pytest.mark.some(1)
def test_peft_loads_the_adapters_and_computes_our_logits(targets, tmp_path):
  peft = pytest.importorskip("peft")
  transformers = pytest.importorskip("transformers")
  model, params = adapted(targets)
  save_adapter(model, params, tmp_path / "out", str(hf_folder()[0]), {"README.md": "# card"})
  assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
    "README.md",
    "SHA256SUMS",
    "adapter_config.json",
    "adapter_model.safetensors",
  ]
  reference = transformers.Qwen2ForCausalLM.from_pretrained(
    hf_folder()[0], attn_implementation="eager", local_files_only=True
  )
  loaded = peft.PeftModel.from_pretrained(reference, tmp_path / "out").eval()
  tokens, mask = padded_batch()
  want = our_logits(model, params, tokens, mask)[mask]
  np.testing.assert_allclose(torch_logits(loaded, tokens, mask)[mask], want, rtol=0, atol=2e-4)
  named = {name for name, _ in loaded.named_parameters() if "lora_" in name}
  # PEFT silently creates adapters that the folder lacks, so the numbers must agree.
  assert len(named) == 2 * 2 * len(targets) == len(raw_tensors(tmp_path / "out"))
  config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
  assert config["base_model_name_or_path"] == str(hf_folder()[0]) and len(
    config["target_modules"]
  ) == len(targets)
  np.testing.assert_allclose(
    torch_logits(loaded.merge_and_unload(), tokens, mask)[mask], want, rtol=0, atol=2e-4
  )


def test_the_merged_folder_computes_our_logits(tmp_path):
  transformers = pytest.importorskip("transformers")
  model, params = adapted()
  save(model, params, None, tmp_path / "out")
  again, read = load(tmp_path / "out", "float32")
  assert again.config == base()[0].config
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.device_get(read),
    jax.device_get(jax.jit(lambda p: merge_lora(model, p))(params)),
  )
  reference = transformers.Qwen2ForCausalLM.from_pretrained(
    tmp_path / "out", attn_implementation="eager", local_files_only=True
  ).eval()
  tokens, mask = padded_batch()
  np.testing.assert_allclose(
    torch_logits(reference, tokens, mask)[mask],
    our_logits(model, params, tokens, mask)[mask],
    rtol=0,
    atol=2e-4,
  )


@pytest.mark.devices
@pytest.mark.slow
def test_a_sharded_adapter_is_saved_as_on_one_device(tmp_path):
  model, params = adapted()
  wide = with_lora(base()[0], mesh_of(2, 2, 1, 2))
  save_adapter(model, params, tmp_path / "one", "base")
  save_adapter(wide, on_mesh_of(params, wide), tmp_path / "eight", "base")
  assert (tmp_path / "one" / "SHA256SUMS").read_text() == (
    tmp_path / "eight" / "SHA256SUMS"
  ).read_text()
  assert (
    subprocess.run(
      ["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "one", capture_output=True
    ).returncode
    == 0
  )


def test_no_adapters_or_a_folder_that_is_not_empty(tmp_path):
  with pytest.raises(UserError, match=r"has no adapters \(model.lora_rank = 0\)"):
    save_adapter(*base(), tmp_path / "out", "base")
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "x").touch()
  with pytest.raises(UserError, match="is not empty"):
    save_adapter(*adapted(), tmp_path / "full", "base")
  assert [file.name for file in tmp_path.iterdir()] == ["full"]


def test_an_adapter_is_not_a_model(tmp_path):
  (tmp_path / "adapter_config.json").write_text("{}")
  with pytest.raises(UserError, match="is an adapter of PEFT, not a model; merge it"):
    find(str(tmp_path))
