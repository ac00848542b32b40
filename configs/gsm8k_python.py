r"""Qwen2.5-0.5B-Instruct on GSM8K with a Python tool, with GTPO and LoRA, on one small accelerator.

    gtpo train --config=configs/gsm8k_python.py --workdir=WORKDIR \
               --config.model.path=Qwen/Qwen2.5-0.5B-Instruct

The model may run programs before it answers. They run in a sandbox (bubblewrap), each anew, with
the limits reward.code_timeout_s and reward.code_memory_mb.
Hardware: one accelerator with 16 GB. It has not been run on one.
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
  config.data.system = (
    "Solve the problem. You may run Python programs. Put the final answer within \\boxed{}."
  )
  config.data.max_prompt_tokens = 512
  config.sampling.max_tokens = 768
  config.env.tools = "python"
  config.env.max_turns = 4
  config.env.max_observation_tokens = 128
  config.batch.prompts = 8
  config.batch.group = 8
  config.batch.micro_batches = 4
  config.algorithm.name = "gtpo"
  config.algorithm.compare = "turn"
  config.optimizer.learning_rate = 2e-5
  config.eval.every = 50
  config.eval.problems = 200
  config.eval.samples = 1
  return config
