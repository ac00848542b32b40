"""Qwen2.5-0.5B on DAPO-Math-17k by DAPO, at the settings of the paper's comparison (arXiv 2508.04349).

    gtpo train --config=configs/qwen2_5_0_5b_dapo.py --workdir=WORKDIR --config.model.path=Qwen/Qwen2.5-0.5B

Hardware: TPU v5e, topology v5e:4x4 (16 chips). Expected time, an estimate by the roofline and never measured: at least
35.9 s a step, if every completion is as long as it may be; dynamic sampling draws more.
"""

from gtpo_jax.config.published import paper


def get_config():
  return paper("0_5b", "dapo")
