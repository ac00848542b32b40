r"""Qwen2.5-1.5B-Instruct on GSM8K with GTPO, all parameters trained, on Kaggle's TPU.

    gtpo train --config=configs/kaggle_1_5b_gsm8k.py --workdir=WORKDIR \
               --config.model.path=Qwen/Qwen2.5-1.5B-Instruct

Hardware: Kaggle's TPU v5e-8, 8 chips with 16 GB each in one host (topology v5e:2x4, 8 chips).
Expected time (roofline estimate, never measured): at least 3.2 s per step if every completion
reaches its maximum length.
"""

from gtpo_jax.config import default_config


def get_config():
  config = default_config()
  config.steps = 200
  config.model.preset = "qwen2.5-1.5b"
  config.mesh.data = 1
  config.mesh.fsdp = -1
  config.data.train = "hf:openai/gsm8k:main:train"
  config.data.eval = "hf:openai/gsm8k:main:test"
  config.data.template = (
    "{prompt} Let's think step by step and put the final answer within \\boxed{}."
  )
  config.data.max_prompt_tokens = 256
  config.sampling.max_tokens = 512
  config.batch.prompts = 32
  config.batch.group = 8
  config.batch.micro_batches = 4
  config.algorithm.name = "gtpo"
  config.optimizer.learning_rate = 1e-6
  config.eval.every = 50
  config.eval.problems = 200
  config.eval.samples = 1
  return config
