r"""Qwen2.5-32B with DAPO as its authors ran it (arXiv 2503.14476).

    gtpo train --config=configs/dapo_32b_reference.py --workdir=WORKDIR \
               --config.model.path=Qwen/Qwen2.5-32B

Each step samples 16 completions of up to 20,480 tokens for each of 512 prompts, and makes 16
gradient updates. 1,024 completions are sampled at once; their keys and values take 41 GiB per chip.
Hardware: TPU v5p, topology v5p:4x4x8 (128 chips).
Expected time (roofline estimate, never measured): at least 44 minutes per step if every completion
reaches its maximum length; dynamic sampling takes longer.
Expected score: not run here. The authors report 50 on AIME 2024.
"""

from gtpo_jax.config.published import dapo_reference


def get_config():
  return dapo_reference()
