"""Random configs compile for a GPU that is not attached, or are refused in one line before that."""

import os

import numpy as np
import pytest
from plan_cases import needs_cuda_plugin, small_config

from gtpo_jax.algorithms import RECIPES
from gtpo_jax.cli.planning.run_programs import RunPrograms, build_model
from gtpo_jax.cli.planning.topology import topology_devices
from gtpo_jax.runtime.errors import UserError

CASES = int(os.environ.get("GTPO_SWEEP_CASES", "60"))


def draw(rng):
  """Returns a topology and config values by dotted name."""
  pick = lambda *values: values[rng.integers(len(values))]
  chip = pick("t4", "l4", "a100-40", "a100", "h100", "h200", "b200")
  gpus = int(pick(1, 2, 4, 8))
  tensor = int(pick(1, 1, 2))
  context = int(pick(1, 1, 1, 2))
  fsdp = max(gpus // (tensor * context), 1)
  dtype = pick("float32", "bfloat16", "bfloat16", "float16")
  return f"{chip}:{gpus}", {
    "model.compute_dtype": dtype,
    "model.param_dtype": pick("float32", "bfloat16") if dtype == "bfloat16" else "float32",
    "model.attention": pick("", "", "", "cudnn", "blocks"),
    "model.lora_rank": int(pick(0, 0, 8)),
    "mesh.data": 1,
    "mesh.fsdp": fsdp,
    "mesh.context": context,
    "mesh.tensor": tensor,
    "data.max_prompt_tokens": int(rng.integers(1, 200)),
    "sampling.max_tokens": int(rng.integers(2, 400)),
    "sampling.attention": pick("", "", "xla", "triton"),
    "sampling.kv_dtype": pick("", "", "int8"),
    "sampling.top_p": pick(1.0, 0.9),
    "batch.prompts": int(pick(4, 8, 16, 6)),
    "batch.group": int(rng.integers(2, 9)),
    "batch.micro_batches": int(pick(1, 1, 2)),
    "batch.minibatches": int(pick(1, 1, 2)),
    "batch.head_chunk": int(pick(0, 0, 100)),
    "algorithm.name": pick(*sorted(RECIPES.keys() - {"opd"})),
    "optimizer.offload": bool(pick(False, False, True)),
  }


@pytest.mark.manual
@needs_cuda_plugin
@pytest.mark.parametrize("seed", range(CASES))
def test_a_random_config_compiles_or_is_refused(seed):
  topology, values = draw(np.random.default_rng(seed))
  devices, _ = topology_devices(topology)
  try:
    config = small_config(**values)
    programs = RunPrograms(config, build_model(config, devices))
  except UserError as refusal:
    assert "\n" not in str(refusal)
    return
  compiled = list(programs.compile_largest())
  assert all(program.peak > 0 for program in compiled)
  assert {"update", "layout", "sampling: decode"} <= {program.name for program in compiled}
