r"""Qwen2.5-7B on DAPO-Math-17k with DAPO, without dynamic sampling (arXiv 2508.04349).

    gtpo train --config=configs/qwen2_5_7b_dapo_static.py --workdir=WORKDIR \
               --config.model.path=Qwen/Qwen2.5-7B

GTPO, GRPO-S and DAPO without dynamic sampling differ only in `algorithm.name`:
`qwen2_5_7b_gtpo.py`, `qwen2_5_7b_grpo_s.py` and `qwen2_5_7b_dapo_static.py`.

Hardware: TPU v5p, topology v5p:2x4x4 (32 chips).
Expected time (roofline estimate, never measured): at least 69.2 s per step if every
completion reaches its maximum length.
"""

from gtpo_jax.config.published import paper


def get_config():
  return paper("7b", "dapo", dynamic_sampling=False)
