r"""Qwen2.5-0.5B-Instruct on GSM8K with GTPO and LoRA, on one small accelerator.

    gtpo train --config=configs/colab_0_5b_gsm8k.py --workdir=WORKDIR \
               --config.model.path=Qwen/Qwen2.5-0.5B-Instruct

Hardware: one chip with 16 GB, such as Colab's TPU v5e-1 (topology v5e:1x1, 1 chip), a T4, an L4 or
an A100.
Expected time (roofline estimate, never measured): at least 1.5 s per step on a v5e if every
completion reaches its maximum length.
"""

from gtpo_jax.config import default_config


def get_config():
  config = default_config()
  config.steps = 200
  config.model.preset = "qwen2.5-0.5b"
  config.model.param_dtype = "bfloat16"
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
