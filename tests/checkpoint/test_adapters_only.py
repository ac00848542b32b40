"""Checkpoints of runs with adapters hold no base model, and restore bit for bit."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from etils import epath
from flax.traverse_util import flatten_dict
from meshes import mesh_of
from toys import TIMING, small_run

from gtpo_jax.checkpoint.checkpoints import PARAMS, Checkpoints
from gtpo_jax.checkpoint.integrity import check_integrity
from gtpo_jax.data.chat import load_chat
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.loop import train
from gtpo_jax.models import PRESETS, Transformer, init_params, save
from gtpo_jax.models.config import Lora
from gtpo_jax.models.lora import split_adapters, without_lora
from gtpo_jax.rollout.policies import open_policy
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer

SMALL = dataclasses.replace(
  PRESETS["tiny"], layers=1, width=32, mlp=48, heads=4, kv_heads=2, head_dim=8, lora=Lora(2)
)
OPTIMIZER = make_optimizer(OptimizerConfig(), 10)


def state_of(mesh=None, quantize=""):
  config = dataclasses.replace(SMALL, quantize=quantize)
  model = Transformer(config, mesh or single_device_mesh())
  params = init_params(model, jax.random.key(0))
  state = init_state(params, OPTIMIZER, model)
  return model, state.replace(step=state.step + 3)


def base_of(state):
  return lambda: split_adapters(state.params)[1]


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def size_of(folder):
  return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def saved(folder, state):
  checkpoints = Checkpoints(folder, keep=2)
  checkpoints.save(state)
  checkpoints.close()
  return folder


def save_with_base(folder, state):
  """Saves adapters and the base model, as WORKDIR/base has them."""
  checkpoints = Checkpoints(folder, keep=2)
  checkpoints.save_params(state.params, 3, with_base=True)
  checkpoints.close()
  return folder


@pytest.mark.devices
@pytest.mark.parametrize("quantize", ["", "int4"])
@pytest.mark.slow
def test_a_checkpoint_holds_adapters_and_restores_on_any_mesh(quantize, tmp_path):
  model, state = state_of(quantize=quantize)
  folder = saved(tmp_path / "checkpoints", state)
  leaves = check_integrity(epath.Path(folder) / "3", (PARAMS,)).leaves[PARAMS]
  assert len(leaves) == 14
  assert all("lora_" in path for path in leaves)
  restored = Checkpoints(folder).restore(model, OPTIMIZER, base=base_of(state))
  assert_equal(restored.state, state)
  wide, same = state_of(mesh_of(2, 2, 1, 2), quantize)
  restored = Checkpoints(folder).restore(wide, OPTIMIZER, base=base_of(same))
  assert_equal(restored.state, state)


@pytest.mark.slow
def test_it_is_smaller_than_the_model(tmp_path):
  config = dataclasses.replace(PRESETS["tiny"], lora=Lora(2))
  model = Transformer(config, single_device_mesh())
  state = init_state(init_params(model, jax.random.key(0)), OPTIMIZER, model)
  state = state.replace(step=state.step + 3)
  before = size_of(save_with_base(tmp_path / "before", state) / "3" / PARAMS)
  after = size_of(saved(tmp_path / "after", state) / "3" / PARAMS)
  assert after < before / 10


def test_parameters_saved_with_the_base_restore_without_another_one(tmp_path):
  model, state = state_of()
  folder = save_with_base(tmp_path / "base", state)
  assert_equal(Checkpoints(folder).newest_params(model, base=pytest.fail), state.params)
  assert_equal(Checkpoints(folder).restore_params(model, 3), state.params)


def test_another_base_model_is_refused(tmp_path):
  model, state = state_of()
  folder = saved(tmp_path / "checkpoints", state)
  other = init_params(without_lora(model), jax.random.key(1))
  for restore in (
    lambda: Checkpoints(folder).restore(model, OPTIMIZER, base=lambda: other),
    lambda: Checkpoints(folder).restore_params(model, base=lambda: other),
  ):
    with pytest.raises(UserError, match=r"were trained on another base model: its digest was \w+"):
      restore()
  with pytest.raises(ValueError, match="pass base="):
    Checkpoints(folder).restore(model, OPTIMIZER)


def adapters(**changes):
  common = {"steps": 2, "model.lora_rank": 2, "warm_start.steps": 0, "sampling.max_tokens": 18}
  common |= {"algorithm.contrast": False, "optimizer.learning_rate": 1e-2}
  common |= {"eval.problems": 4, "eval.batch": 4}
  return small_run(**{**common, **changes})


def lasting(workdir):
  """Returns the metrics of training that do not depend on time or on the process."""
  return [
    {k: v for k, v in row.items() if not k.startswith((*TIMING, "eval/"))}
    for row in read_jsonl(workdir / "metrics.jsonl")
  ]


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
  """A Hugging Face folder of the tiny model with random weights."""
  model = Transformer(PRESETS["tiny"], single_device_mesh())
  folder = tmp_path_factory.mktemp("hf") / "tiny"
  chat = load_chat()
  save(model, init_params(model, jax.random.key(5)), chat.tokenizer, folder, stop=chat.stop)
  return folder


@pytest.mark.parametrize(
  "source",
  [
    pytest.param("folder", marks=pytest.mark.manual),
    pytest.param("folder int4", marks=pytest.mark.slow),
    pytest.param("preset", marks=pytest.mark.manual),
    pytest.param("warm start", marks=pytest.mark.manual),
    pytest.param("folder on eight devices", marks=[pytest.mark.devices, pytest.mark.manual]),
  ],
)
def test_a_run_resumes_bit_for_bit(source, hf, tmp_path):
  changes = {"model.path": str(hf)}
  if source == "folder int4":
    changes["model.quantize"] = "int4"
  if source == "folder on eight devices":
    changes |= {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
  if source == "preset":
    changes = {}
  if source == "warm start":
    changes |= {"warm_start.steps": 2, "warm_start.batch": 8}
  go = lambda name, **more: train(adapters(**changes, **more), tmp_path / name, Display(False))
  go("whole")
  go("halves", steps=1)
  go("halves", steps=2)
  assert lasting(tmp_path / "halves")[1:] == lasting(tmp_path / "whole")[1:]
  whole, halves = (open_policy(tmp_path / name, 2)[2] for name in ("whole", "halves"))
  assert_equal(whole, halves)
  leaves = check_integrity(epath.Path(tmp_path) / "halves" / "checkpoints" / "2", (PARAMS,)).leaves[
    PARAMS
  ]
  assert all("lora_" in path for path in leaves)
  worker, _, first, step = open_policy(tmp_path / "whole", 0)
  assert step == 0
  assert_equal(split_adapters(first)[1], split_adapters(whole)[1])
  assert any(
    np.any(np.asarray(x) != np.asarray(flatten_dict(first)[path]))
    for path, x in flatten_dict(split_adapters(whole)[0]).items()
  )
  assert (tmp_path / "whole" / "base").exists() == (source in ("preset", "warm start"))
  assert worker.model.config.lora.rank == 2


@pytest.mark.slow
def test_a_changed_base_model_is_refused_in_one_line(hf, tmp_path):
  folder = shutil.copytree(hf, tmp_path / "hf")
  config = adapters(**{"model.path": str(folder), "steps": 1})
  train(config, tmp_path / "run", Display(False))
  shutil.rmtree(folder)
  model = Transformer(PRESETS["tiny"], single_device_mesh())
  chat = load_chat()
  save(model, init_params(model, jax.random.key(6)), chat.tokenizer, folder, stop=chat.stop)
  with pytest.raises(UserError, match="trained on another base model"):
    open_policy(tmp_path / "run", 1)
  shutil.rmtree(folder)
  with pytest.raises(UserError, match="no folder at"):
    open_policy(tmp_path / "run", 1)
