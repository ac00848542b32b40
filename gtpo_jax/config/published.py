"""Published experiments as configs to start from; `configs/` names them.

They set an architecture but no weights. For a run, set `--config.model.path` to a folder or hub id
of the same size; `gtpo plan` does not need it. Settings that 2508.04349 does not print (weight
decay, the format of prompts and answers) are DAPO's, whose code and data that paper uses.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from gtpo_jax.config.config_files import default_config

# By size: (preset, shards of the tensor axis, micro-batches), for the hardware that the configs
# name. Each shard computes the gradient of one prompt at a time.
SIZES = {
  "0_5b": ("qwen2.5-0.5b", 1, 8),
  "1_5b": ("qwen2.5-1.5b", 1, 4),
  "7b": ("qwen2.5-7b", 1, 4),
  "32b": ("qwen2.5-32b", 4, 8),
}


def paper(size: str, algorithm: str, dynamic_sampling: bool | None = None) -> ConfigDict:
  """Returns the comparison of 2508.04349 (final version).

  128 prompts x 16 completions of at most 4,096 tokens, 210 steps, clipping 0.2 / 0.28.

  Args:
    size: a key of `SIZES`.
    algorithm: the name of the algorithm.
    dynamic_sampling: whether groups without contrast are replaced; None for the algorithm's own
      default.
  """
  preset, tensor, micro_batches = SIZES[size]
  config = default_config()
  config.steps = 210
  config.model.preset = preset
  config.mesh.data = 1
  config.mesh.fsdp = -1
  config.mesh.tensor = tensor
  config.data.train = "hf:BytedTsinghua-SIA/DAPO-Math-17k"
  config.data.eval = "hf:BytedTsinghua-SIA/AIME-2024"
  config.data.max_prompt_tokens = 2048
  config.sampling.max_tokens = 4096
  config.batch.prompts = 128
  config.batch.group = 16
  config.batch.micro_batches = micro_batches
  config.algorithm.name = algorithm
  config.algorithm.dynamic_sampling = dynamic_sampling
  config.reward.math_rule = "dapo"
  config.optimizer.learning_rate = 1e-6
  config.optimizer.weight_decay = 0.1
  config.eval.problems = 30
  config.eval.samples = 32
  config.eval.top_p = 0.7
  return config


def dapo_reference() -> ConfigDict:
  """Returns DAPO's own run (2503.14476, section 4.1).

  512 prompts x 16 completions of at most 20,480 tokens, 16 gradient updates per step.
  """
  config = paper("32b", "dapo")
  config.mesh.tensor = 8
  config.sampling.max_tokens = 20480
  config.sampling.slots = 1024  # 41 GiB of keys and values on each of 128 chips
  config.algorithm.overlong_buffer = 4096
  config.batch.prompts = 512
  config.batch.minibatches = 16
  config.batch.micro_batches = 2
  config.optimizer.warmup_steps = 20
  return config
