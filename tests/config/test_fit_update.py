"""What "auto" stands for in the settings of an update."""

import dataclasses
import itertools
from pathlib import Path

import jax
import pytest
from toys import config_of

from gtpo_jax.config import Config, load
from gtpo_jax.config.updates import describe_update, fit_update, update_bytes
from gtpo_jax.models import PRESETS
from gtpo_jax.models.config import REMAT
from gtpo_jax.runtime.chips import CHIPS

COLAB = str(Path(__file__).parents[2] / "configs" / "colab_0_5b_gsm8k.py")
ONE_DEVICE = {"data": 1, "expert": 1, "fsdp": 1, "context": 1, "tensor": 1}


def run_of(preset, **values):
  """A run of 16 prompts of 512 tokens x 16 completions of up to 1,024 tokens."""
  common = {
    "model.preset": preset,
    "model.compute_dtype": "bfloat16",
    "model.random_weights": True,
    "data.max_prompt_tokens": 512,
    "sampling.max_tokens": 1024,
    "batch.prompts": 16,
    "batch.group": 16,
    "warm_start.steps": 0,
  }
  return config_of(**{**common, **values})


def chosen(chip, preset, **values):
  devices = jax.devices()[:1]
  usable = chip and chip.usable_memory
  config = fit_update(run_of(preset, **values), devices, chip, usable)
  return config.model.remat, config.batch.micro_batches


@pytest.mark.parametrize(
  ("chip", "preset", "values", "choice"),
  [
    ("h100", "qwen2.5-0.5b", {"steps": 200}, ("none", 8)),
    ("h100", "qwen2.5-0.5b", {"steps": 5}, ("full", 1)),  # too few for the longer compilation
    ("h100", "qwen2.5-0.5b", {"model.remat": "full"}, ("full", 1)),
    ("h100", "qwen2.5-0.5b", {"steps": 200, "batch.micro_batches": 16}, ("none", 16)),
    ("h100", "qwen2.5-1.5b", {"steps": 200}, ("full", 2)),
    ("l4", "qwen2.5-0.5b", {"steps": 200}, ("full", 4)),
    ("v5e", "qwen2.5-0.5b", {"steps": 200}, ("full", 8)),
    ("v5p", "qwen2.5-0.5b", {"steps": 200}, ("full", 1)),
    ("h100", "qwen3.5-4b", {"steps": 200, "batch.prompts": 4, "model.lora_rank": 16}, ("full", 2)),
    # A group of 8 is divided into 2: its tokens do not fit at once.
    (
      "h100",
      "llama-3.1-8b",
      {
        "model.lora_rank": 16,
        "model.quantize": "int4",
        "batch.prompts": 1,
        "batch.group": 8,
        "sampling.max_tokens": 20224,
      },
      ("full", 2),
    ),
  ],
)
def test_choices(chip, preset, values, choice):
  assert chosen(CHIPS[chip], preset, **values) == choice


def test_a_cpu_recomputes_layers_in_one_micro_batch():
  assert chosen(None, "tiny") == ("full", 1)
  assert describe_update(fit_update(Config(), jax.devices()[:1], None, 2**34)) == (
    "updating in 1 micro-batch; the backward pass recomputes each layer"
  )


def test_what_is_set_stays():
  config = run_of("tiny", **{"model.remat": "attention", "batch.micro_batches": 2})
  assert fit_update(config, jax.devices()[:1], CHIPS["h100"], 2**20) is config


def test_less_recomputation_and_fewer_micro_batches_need_more_memory():
  config = run_of("qwen2.5-0.5b")
  c = dataclasses.replace(PRESETS["qwen2.5-0.5b"], compute_dtype="bfloat16")
  needs = lambda remat, parts: update_bytes(config, c, ONE_DEVICE, remat, parts)
  for more, less in itertools.pairwise(REMAT):
    assert needs(more, 8) > needs(less, 8)
  for parts in (1, 2, 4):
    assert needs("full", parts) > needs("full", 2 * parts)
  # Compiled for an H100: 12.3 and 44.3 GiB, with parameters, moments and the batch.
  state = 12 * 494e6
  assert needs("full", 8) + state == pytest.approx(12.3 * 2**30, rel=0.1)
  assert needs("none", 8) + state == pytest.approx(44.3 * 2**30, rel=0.1)


def test_gated_delta_nets_keep_much_without_recomputation():
  """As compiled for an H100: 84.0 GiB beside the state, with 4 micro-batches of 8,704 tokens."""
  config = load(COLAB, ["--config.model.preset=qwen3.5-4b"])
  c = PRESETS["qwen3.5-4b"]
  c = dataclasses.replace(c, compute_dtype="bfloat16", lora=dataclasses.replace(c.lora, rank=16))
  assert update_bytes(config, c, ONE_DEVICE, "none", 4) == pytest.approx(84.0 * 2**30, rel=0.1)
