r"""Qwen2.5-32B on DAPO-Math-17k with GRPO-S: the paper's comparison (arXiv 2508.04349).

    gtpo train --config=configs/qwen2_5_32b_grpo_s.py --workdir=WORKDIR \
               --config.model.path=Qwen/Qwen2.5-32B

Hardware: TPU v5p, topology v5p:4x4x4 (64 chips).
Expected time (roofline estimate, never measured): at least 2 minutes per step if every
completion reaches its maximum length.
"""

from gtpo_jax.config.published import paper


def get_config():
  return paper("32b", "grpo_s")
