"""Restores a checkpoint as one of several processes.

`python restore.py CHECKPOINTS OUT DATA,FSDP,CONTEXT,TENSOR`; process i writes OUT_i.npz.
"""

import sys

import jax
import numpy as np

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.cluster.joining import join_processes
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.mesh import MESH_AXES, make_mesh
from gtpo_jax.runtime.startup import prepare_devices, prepare_jax
from gtpo_jax.training.state import OptimizerConfig, make_optimizer

if __name__ == "__main__":
  prepare_jax()
  join_processes()
  prepare_devices()
  _, folder, out, sizes = sys.argv
  mesh = make_mesh(**dict(zip(MESH_AXES, map(int, sizes.split(",")), strict=True)))
  model = Transformer(PRESETS["tiny"], mesh)
  saved = Checkpoints(folder, keep=3).restore(model, make_optimizer(OptimizerConfig(), 10))
  leaves = {
    jax.tree_util.keystr(path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(fetch(saved.state))
  }
  np.savez(f"{out}_{jax.process_index()}.npz", **leaves)
