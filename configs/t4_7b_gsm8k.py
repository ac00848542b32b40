r"""Qwen2.5-7B-Instruct on GSM8K with GTPO and LoRA on an int4 base, on one T4.

    gtpo train --config=configs/t4_7b_gsm8k.py --workdir=WORKDIR \
               --config.model.path=Qwen/Qwen2.5-7B-Instruct

Hardware: one GPU with 16 GB, such as Colab's T4 (topology t4:1, 1 GPU). Update and sampler read the
same arrays of the base. It was planned (11.22 GiB), not run.
"""

from gtpo_jax.config import load_config


def get_config():
  config = load_config("colab_0_5b_gsm8k")
  config.model.preset = "qwen2.5-7b"
  config.model.param_dtype = "float16"
  config.model.quantize = "int4"
  config.batch.micro_batches = 8
  return config
