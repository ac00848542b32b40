r"""Qwen2.5-1.5B on DAPO-Math-17k with GRPO-S: the paper's comparison (arXiv 2508.04349).

    gtpo train --config=configs/qwen2_5_1_5b_grpo_s.py --workdir=WORKDIR \
               --config.model.path=Qwen/Qwen2.5-1.5B

Hardware: TPU v5e, topology v5e:4x8 (32 chips).
Expected time (roofline estimate, never measured): at least 55.4 s per step if every
completion reaches its maximum length.
"""

from gtpo_jax.config.published import paper


def get_config():
  return paper("1_5b", "grpo_s")
