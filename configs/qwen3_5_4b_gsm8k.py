r"""Qwen3.5-4B on GSM8K with GTPO and LoRA, without thinking, on one TPU host.

    gtpo train --config=configs/qwen3_5_4b_gsm8k.py --workdir=WORKDIR \
               --config.model.path=Qwen/Qwen3.5-4B

Hardware: TPU v5e-8, 8 chips with 16 GB each in one host (topology v5e:2x4, 8 chips). It has not
been run.
"""

from gtpo_jax.config import default_config


def get_config():
  config = default_config()
  config.steps = 200
  config.model.preset = "qwen3.5-4b"
  config.model.param_dtype = "bfloat16"
  config.model.lora_rank = 16
  config.mesh.data = 1
  config.mesh.fsdp = -1
  config.data.train = "hf:openai/gsm8k:main:train"
  config.data.eval = "hf:openai/gsm8k:main:test"
  config.data.template = (
    "{prompt} Let's think step by step and put the final answer within \\boxed{}."
  )
  config.data.chat_template_kwargs = '{"enable_thinking": false}'
  config.data.max_prompt_tokens = 256
  config.sampling.max_tokens = 512
  config.batch.prompts = 32
  config.batch.group = 8
  config.batch.micro_batches = 4
  config.algorithm.name = "gtpo"
  config.optimizer.learning_rate = 2e-5
  config.eval.every = 50
  config.eval.problems = 200
  config.eval.samples = 1
  return config
