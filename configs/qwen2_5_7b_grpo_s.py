"""Qwen2.5-7B on DAPO-Math-17k by GRPO-S, at the settings of the paper's comparison (arXiv 2508.04349).

    gtpo train --config=configs/qwen2_5_7b_grpo_s.py --workdir=WORKDIR --config.model.path=Qwen/Qwen2.5-7B

Hardware: TPU v5p, topology v5p:2x4x4 (32 chips). Expected time, an estimate by the roofline and never measured: at least
69.2 s a step, if every completion is as long as it may be.
"""

from gtpo_jax.config.published import paper


def get_config():
  return paper("7b", "grpo_s")
