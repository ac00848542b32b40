"""Checkpoints restored by other processes than their writers, and damage that only one sees."""

import jax
import numpy as np
import pytest
from meshes import mesh_of
from preloaded import python
from processes import HERE, start_together

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.models.params import init_params
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer

pytestmark = pytest.mark.devices

OPTIMIZER = make_optimizer(OptimizerConfig(), 10)


@pytest.fixture
def saved(tmp_path):
  """Checkpoints of steps 1 and 2, saved on 2 x 2 x 2 devices, and their states."""
  model = Transformer(PRESETS["tiny"], mesh_of(2, 2, 1, 2))
  states = {}
  checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
  for step in (1, 2):
    state = init_state(init_params(model, jax.random.key(step)), OPTIMIZER, model)
    state = state.replace(
      step=state.step + step, opt_state=jax.tree.map(lambda x: x + 3, state.opt_state)
    )
    checkpoints.save(state)
    states[step] = {
      jax.tree_util.keystr(path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(state))
    }
  checkpoints.close()
  return tmp_path / "checkpoints", states


def restore(folder, mesh, devices, before="true"):
  """Restores in two processes; the second first runs a command in its own mount namespace.

  Returns the state that each process restored, and their output.
  """
  line = [*python(), str(HERE / "restore.py"), str(folder), str(folder.parent / "restored"), mesh]
  own_view = ["unshare", "--mount", "sh", "-c", f'{before} && exec "$@"', "sh", *line]
  codes, printed = start_together([line, line if before == "true" else own_view], devices)
  assert codes == [0, 0], printed
  return [dict(np.load(folder.parent / f"restored_{i}.npz")) for i in range(2)], printed


def assert_same(restored, state):
  assert restored.keys() == state.keys()
  for name, x in state.items():
    assert restored[name].dtype == x.dtype
    np.testing.assert_array_equal(restored[name], x)


@pytest.mark.some(0, slow=1)
@pytest.mark.parametrize(("mesh", "devices"), [("2,1,1,1,1", 1), ("1,1,2,1,2", 2)])
def test_saved_on_eight_devices_and_restored_on_two_processes(saved, mesh, devices):
  folder, states = saved
  restored, printed = restore(folder, mesh, devices)
  assert "damaged" not in printed[0] + printed[1]
  for each in restored:
    assert_same(each, states[2])


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", pytest.param("empty", marks=pytest.mark.manual)])
def test_damage_seen_by_one_process_makes_all_restore_the_previous_step(saved, tmp_path, damage):
  """Simulates damage on one machine's disk. The first process, which checks files, finds none."""
  folder, states = saved
  file = max(
    (folder / "2" / "params" / "ocdbt.process_0" / "d").iterdir(),
    key=lambda file: file.stat().st_size,
  )
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  (tmp_path / "bad").write_bytes(content if damage == "flipped" else b"")
  restored, printed = restore(folder, "2,1,1,1,1", 1, f"mount --bind {tmp_path / 'bad'} {file}")
  assert "the checkpoint of step 2 is damaged" in printed[0], printed
  assert "trying step 1 instead" in printed[0]
  for each in restored:
    assert_same(each, states[1])
  assert sorted(entry.name for entry in folder.iterdir()) == ["1", "2.damaged"]
