r"""GTPO on a mixture of experts, Qwen3-30B-A3B, with the problems and lengths of 2508.04349.

    gtpo train --config=configs/qwen3_30b_a3b_gtpo.py --workdir=WORKDIR \
               --config.model.path=Qwen/Qwen3-30B-A3B

Hardware: 16 v5p chips (2x2x4). Of each chip's 95 GiB, the compiled update needs 61.7, the layout of
sampling 35.5, prefill 82.8 and decoding 87.4. None of it has been run.
"""

from gtpo_jax.config.published import paper


def get_config():
  config = paper("7b", "gtpo")
  config.model.preset = "qwen3-30b-a3b"
  config.mesh.expert = 8
  config.mesh.fsdp = 2
  config.mesh.data = 1
  config.mesh.tensor = 1
  config.batch.micro_batches = 8
  config.model.remat = "full"
  return config
