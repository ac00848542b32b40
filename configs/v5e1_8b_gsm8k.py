r"""Qwen3-8B on GSM8K with GTPO and LoRA on an int4 base, on one TPU v5e chip.

    gtpo train --config=configs/v5e1_8b_gsm8k.py --workdir=WORKDIR \
               --config.model.path=Qwen/Qwen3-8B

Hardware: one chip with 16 GB, such as Colab's TPU v5e-1 (topology v5e:1x1, 1 chip). Update and
sampler read the same arrays of the base. It has not been run on one.
"""

from gtpo_jax.config import default_config


def get_config():
  config = default_config()
  config.steps = 200
  config.model.preset = "qwen3-8b"
  config.model.param_dtype = "bfloat16"
  config.model.quantize = "int4"
  config.model.lora_rank = 16
  config.data.train = "hf:openai/gsm8k:main:train"
  config.data.eval = "hf:openai/gsm8k:main:test"
  config.data.template = (
    "{prompt} Let's think step by step and put the final answer within \\boxed{}."
  )
  config.data.max_prompt_tokens = 256
  config.sampling.max_tokens = 512
  config.batch.prompts = 8
  config.batch.group = 8
  config.batch.micro_batches = 4
  config.algorithm.name = "gtpo"
  config.optimizer.learning_rate = 2e-5
  config.eval.every = 50
  config.eval.problems = 200
  config.eval.samples = 1
  return config
