"""The shipped configs agree with their docstrings, the papers and each other."""

import math
import re
from pathlib import Path

import pytest

from gtpo_jax.config import difference, load, resolve_model

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = [
  f"qwen2_5_{size}_{algorithm}"
  for size in ("0_5b", "1_5b", "7b", "32b")
  for algorithm in ("gtpo", "grpo_s", "dapo")
]
# Configs that differ only in the algorithm, with and without dynamic sampling.
PAIRED = [
  (True, ["qwen2_5_7b_gtpo_dynamic", "qwen2_5_7b_grpo_s_dynamic", "qwen2_5_7b_dapo"]),
  (False, ["qwen2_5_7b_gtpo", "qwen2_5_7b_grpo_s", "qwen2_5_7b_dapo_static"]),
  (False, ["qwen2_5_0_5b_gtpo", "qwen2_5_0_5b_grpo_s"]),
]
LARGE = [
  *PAPER,
  "qwen2_5_7b_gtpo_dynamic",
  "qwen2_5_7b_grpo_s_dynamic",
  "qwen2_5_7b_dapo_static",
  "dapo_32b_reference",
  "colab_0_5b_gsm8k",
  "kaggle_1_5b_gsm8k",
]


def read(name):
  return load(str(CONFIGS / f"{name}.py"))


@pytest.mark.parametrize("name", LARGE)
def test_the_docstring_names_command_hardware_and_time(name):
  text = re.sub(r"\\\n +", "", (CONFIGS / f"{name}.py").read_text().split('"""')[1])
  assert (
    f"gtpo train --config=configs/{name}.py --workdir=WORKDIR --config.model.path=Qwen/Qwen2.5-"
    in text
  )
  assert "Hardware: " in text
  assert re.search(
    r"Expected time \(roofline estimate, never measured\): at least [\d.]+ (s|minutes|hours)", text
  )
  size = read(name).model.preset.removeprefix("qwen2.5-").upper()
  assert f"Qwen2.5-{size}" in text.split("model.path=")[1]


@pytest.mark.parametrize("name", LARGE)
def test_each_config_divides_evenly_over_its_hardware(name):
  config = read(name)
  text = (CONFIGS / f"{name}.py").read_text()
  shape, chips = re.search(r"topology v\d[ep]:([\dx]+)[,)]? \(?(\d+) chip", text).groups()
  chips = int(chips)
  model = resolve_model(config).config
  mesh = [config.mesh.data, config.mesh.fsdp, config.mesh.tensor]
  assert math.prod(map(int, shape.split("x"))) == chips and mesh.count(-1) == 1
  mesh[mesh.index(-1)] = chips // -math.prod(mesh)
  assert math.prod(mesh) == chips
  assert config.batch.prompts % (config.batch.parts * mesh[0] * mesh[1]) == 0
  assert (
    all(size % mesh[2] == 0 for size in (model.heads, model.kv_heads, model.mlp, model.vocab_size))
    and model.width % mesh[1] == 0
  )


@pytest.mark.parametrize(("dynamic", "names"), PAIRED)
def test_the_paired_configs_differ_only_in_the_algorithm(dynamic, names):
  first, *others = map(read, names)
  for config in (first, *others):
    assert config.resolved_algorithm.settings.dynamic_sampling is dynamic
  for other in others:
    assert difference(first, other).keys() == {"algorithm.name"}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_settings(name):
  config = read(name)
  (size, algorithm) = name.removeprefix("qwen2_5_").split("b_")
  assert (config.algorithm.name, config.model.preset) == (
    algorithm,
    f"qwen2.5-{size.replace('_', '.')}b",
  )
  assert (config.batch.prompts, config.batch.group, config.batch.updates, config.steps) == (
    128,
    16,
    1,
    210,
  )
  assert (config.data.max_prompt_tokens, config.sampling.max_tokens) == (2048, 4096)
  assert (config.sampling.temperature, config.sampling.top_p, config.optimizer.learning_rate) == (
    1.0,
    1.0,
    1e-6,
  )
  settings = config.resolved_algorithm.settings
  assert (settings.eps_low, settings.eps_high) == (0.2, 0.28)
  assert (
    config.eval.sampling_params.temperature,
    config.eval.sampling_params.top_p,
    config.eval.samples,
  ) == (1.0, 0.7, 32)


def test_the_reference_run_of_dapo():
  config = read("dapo_32b_reference")
  assert (
    config.batch.prompts,
    config.batch.group,
    config.batch.updates,
    config.sampling.max_tokens,
  ) == (512, 16, 16, 20480)
  assert (
    config.batch.prompts // config.batch.minibatches * config.batch.group == 512
  )  # completions per gradient update
  settings = config.resolved_algorithm.settings
  optimizer = config.optimizer
  assert (settings.overlong_buffer, settings.dynamic_sampling, settings.loss_aggregation) == (
    4096,
    True,
    "token",
  )
  assert (
    optimizer.learning_rate,
    optimizer.weight_decay,
    optimizer.clip_norm,
    optimizer.warmup_steps,
  ) == (1e-6, 0.1, 1.0, 20)
