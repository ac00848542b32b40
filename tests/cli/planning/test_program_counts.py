"""How many programs each shipped config can reach. Nothing is compiled."""

from pathlib import Path

import pytest
from plan_cases import needs_cuda_plugin, needs_libtpu

from gtpo_jax.cli.planning.run_programs import build_engine, build_model
from gtpo_jax.cli.planning.topology import topology_devices
from gtpo_jax.config import load
from gtpo_jax.config.workloads import run_workloads
from gtpo_jax.rollout.batch import abstract_batches
from gtpo_jax.sampling.inventory import count_kinds, reachable

CONFIGS = Path(__file__).parents[3] / "configs"
# Those for a CPU; the architecture of smollm2_sentences is read from the model's folder.
NOT_PLANNED = ("base", "tiny", "compare", "smollm2_sentences")
TRAINED = sorted(
  path.stem
  for path in CONFIGS.glob("*.py")
  if path.stem not in NOT_PLANNED and not path.stem.startswith("eval_")
)
MOST = 20
MOST_WITH_TURNS = 24  # completions are read again after each turn, with each number of slots


def count(name, topology):
  """The programs of sampling, evaluation and the update, on a mesh of two shards."""
  mesh = ("data=1", "expert=1", "fsdp=-1", "context=1", "tensor=1")
  config = load(str(CONFIGS / f"{name}.py"), [f"--config.mesh.{size}" for size in mesh])
  devices, _ = topology_devices(topology)
  model = build_model(config, devices[:2])
  programs = build_engine(config, model).programs
  counts = count_kinds(reachable(programs, run_workloads(config).values()))
  counts["update"] = len(abstract_batches(config, model.mesh))
  return counts


def most_of(name):
  has_turns = load(str(CONFIGS / f"{name}.py"), []).env.is_used
  return MOST_WITH_TURNS if has_turns else MOST


@needs_libtpu
@pytest.mark.parametrize("name", TRAINED)
def test_few_programs_on_tpus(name):
  counts = count(name, "v5e:2x2")
  assert counts.total() <= most_of(name), counts
  assert counts["decode"] <= 4  # two numbers of slots, with and without the evaluation's top-p


@needs_cuda_plugin
@pytest.mark.parametrize("name", TRAINED)
def test_few_programs_on_gpus(name):
  assert count(name, "h100:2").total() <= most_of(name)
