"""Qwen2.5-32B by DAPO as its authors ran it (arXiv 2503.14476): 512 prompts x 16 completions, 16 gradient updates a step, 20,480 tokens.

    gtpo train --config=configs/dapo_32b_reference.py --workdir=WORKDIR --config.model.path=Qwen/Qwen2.5-32B

Hardware: TPU v5p, topology v5p:4x4x8 (128 chips). Expected time, an estimate by the roofline and never measured: at least
44 minutes a step, if every completion is as long as it may be; dynamic sampling draws more. Their score: 50 on AIME 2024.
1,024 completions are sampled at once: their keys and values take 41 GiB a chip.
"""

from gtpo_jax.config.published import dapo_reference


def get_config():
  return dapo_reference()
