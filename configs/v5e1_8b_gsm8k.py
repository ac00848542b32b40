r"""Qwen3-8B on GSM8K with GTPO and LoRA on an int4 base, on one TPU v5e chip.

    gtpo train --config=configs/v5e1_8b_gsm8k.py --workdir=WORKDIR \
               --config.model.path=Qwen/Qwen3-8B

Hardware: one chip with 16 GB, such as Colab's TPU v5e-1 (topology v5e:1x1, 1 chip). Update and
sampler read the same arrays of the base. It was planned (11.58 GiB), not run.
"""

from gtpo_jax.config import load_config


def get_config():
  config = load_config("colab_0_5b_gsm8k")
  config.model.preset = "qwen3-8b"
  config.model.param_dtype = "bfloat16"
  config.model.quantize = "int4"
  return config
