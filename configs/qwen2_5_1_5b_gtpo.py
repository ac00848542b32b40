"""Qwen2.5-1.5B on DAPO-Math-17k by GTPO, at the settings of the paper's comparison (arXiv 2508.04349).

    gtpo train --config=configs/qwen2_5_1_5b_gtpo.py --workdir=WORKDIR --config.model.path=Qwen/Qwen2.5-1.5B

Hardware: TPU v5e, topology v5e:4x8 (32 chips). Expected time, an estimate by the roofline and never measured: at least
55.4 s a step, if every completion is as long as it may be.
"""

from gtpo_jax.config.published import paper


def get_config():
  return paper("1_5b", "gtpo")
