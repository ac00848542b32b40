"""Saving and restoring checkpoints, and every kind of damage that a disk can cause."""

import asyncio
import dataclasses
import gc
import os
import shutil
import sys
import types
from concurrent import futures

import jax
import numpy as np
import pytest
import tensorstore
from etils import epath
from meshes import mesh_of

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.checkpoint.integrity import (
  RECORD_FILE,
  CorruptCheckpoint,
  check_integrity,
  write_integrity_record,
)
from gtpo_jax.checkpoint.opening import open_run, run_params
from gtpo_jax.checkpoint.steps import read_checkpoint
from gtpo_jax.models.params import init_params
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import RunError, UserError
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.runtime.startup import prepare_libraries
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer

# If reading or saving one array fails, Orbax abandons the coroutines of the other arrays. They then
# complain that their event loop is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SHAPE = dataclasses.replace(
  PRESETS["tiny"], layers=1, width=32, mlp=48, vocab_size=64, heads=4, kv_heads=2, head_dim=8
)
OPTIMIZER = make_optimizer(OptimizerConfig(), 10)
LEFTOVERS = {
  "drawn": np.asarray(7, np.int32),
  "flags": np.array([[True, False]]),
  "log_probs": np.linspace(0, 1, 6, dtype=np.float32),
}
ITEMS = ("params", "rest", "leftovers")


def state_of(model, step):
  state = init_state(init_params(model, jax.random.key(step)), OPTIMIZER, model)
  filled = jax.tree.map(lambda x: x + step / 8 if x.dtype == np.float32 else x, state.opt_state)
  return state.replace(step=state.step + step, opt_state=filled)


def model_on(mesh):
  return Transformer(SHAPE, mesh)


def contents(folder):
  return {
    str(file.relative_to(folder)): file.read_bytes()
    for file in sorted(folder.rglob("*"))
    if file.is_file()
  }


@pytest.fixture(scope="module", autouse=True)
def collected():
  """Collects what failed reads leave while its warnings are ignored, not in another file's test."""
  yield
  gc.collect()


@pytest.fixture(scope="module")
def model():
  return model_on(single_device_mesh())


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
  """A folder with checkpoints of steps 3 and 5."""
  folder = tmp_path_factory.mktemp("saved") / "checkpoints"
  checkpoints = Checkpoints(folder, keep=3)
  for step in (3, 5):
    checkpoints.save(state_of(model, step), LEFTOVERS, {"guide": "a digest"})
  checkpoints.close()
  return folder


@pytest.fixture
def copy(saved, tmp_path):
  shutil.copytree(saved, tmp_path / "checkpoints")
  return tmp_path / "checkpoints"


def assert_is_step(restored, model, step):
  jax.tree.map(np.testing.assert_array_equal, restored.state, state_of(model, step))
  assert restored.metadata == {"guide": "a digest"}
  assert restored.leftovers.keys() == LEFTOVERS.keys()
  for name, x in LEFTOVERS.items():
    np.testing.assert_array_equal(restored.leftovers[name], x)
    assert restored.leftovers[name].dtype == x.dtype


def test_restores_everything_that_was_saved(saved, model):
  before = contents(saved)
  assert_is_step(Checkpoints(saved).restore(model, OPTIMIZER), model, 5)
  assert contents(saved) == before


def test_restores_an_adapted_entropy_coefficient(model, tmp_path):
  adapted = make_optimizer(OptimizerConfig(), 10, entropy_coef=0.25)
  state = init_state(init_params(model, jax.random.key(0)), adapted, model)
  state = state.replace(step=state.step + 1, entropy_coef=state.entropy_coef + 0.5)
  checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
  checkpoints.save(state, None)
  checkpoints.close()
  restored = Checkpoints(tmp_path / "checkpoints").restore(model, adapted)
  assert float(restored.state.entropy_coef) == 0.75
  with pytest.raises(UserError, match="entropy_coef"):  # the run no longer adapts it
    Checkpoints(tmp_path / "checkpoints").restore(model, OPTIMIZER)


def truncate(file):
  file.write_bytes(file.read_bytes()[:-1])


def delete(file):
  file.unlink()


def flip(file, at=None):
  content = bytearray(file.read_bytes())
  at = len(content) * 4 if at is None else at
  content[at // 8] ^= 1 << at % 8
  file.write_bytes(content)


def test_damage_to_any_file_is_found(copy):
  """Damage is found before Orbax reads anything; the repaired checkpoint is valid again."""
  folder = copy / "5"
  files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
  assert {"integrity_record", "commit_success.txt", "params/_METADATA", "rest/manifest.ocdbt"} <= {
    str(file.relative_to(folder)) for file in files
  }
  assert len(files) >= 25
  flips = 0
  for file in files:
    good = file.read_bytes()
    bits = [(7 * i + len(good) * 8 * i // 4) % (len(good) * 8) for i in range(4)]
    for damage in [
      truncate,
      delete,
      lambda file: file.write_bytes(b""),
      *(lambda file, bit=bit: flip(file, bit) for bit in bits),
    ]:
      damage(file)
      with pytest.raises(CorruptCheckpoint, match=r"is missing|differs from what was written"):
        check_integrity(epath.Path(folder), ITEMS)
      file.write_bytes(good)
    flips += len(bits)
  assert flips >= 100
  check_integrity(epath.Path(folder), ITEMS)


@pytest.mark.parametrize(
  ("damage", "name"),
  [
    (delete, "integrity_record"),
    (truncate, "_CHECKPOINT_METADATA"),
    (flip, "params/_sharding"),
    (truncate, "rest/ocdbt.process_0/manifest.ocdbt"),
    (flip, "leftovers/manifest.ocdbt"),
  ],
  ids=lambda value: getattr(value, "__name__", value),
)
def test_a_damaged_step_is_renamed_and_the_previous_one_restored(copy, model, damage, name):
  damage(copy / "5" / name)
  before = contents(copy)
  said = []
  assert_is_step(Checkpoints(copy, keep=3).restore(model, OPTIMIZER, said.append), model, 3)
  assert (
    len(said) == 1
    and "the checkpoint of step 5 is damaged" in said[0]
    and name in said[0]
    and "trying step 3 instead" in said[0]
  )
  assert contents(copy) == {
    key.replace("5/", "5.damaged/", 1) if key.startswith("5/") else key: value
    for key, value in before.items()
  }


def test_digests_find_flipped_bits_in_array_files(copy):
  """Large files are not hashed, so only the digests of their arrays protect them.

  After each of 24 flips, the record is rewritten to match the damaged file.
  """
  folder = copy / "5"
  detected = 0
  record = check_integrity(epath.Path(folder), ITEMS)
  payload = [
    max((folder / item / "ocdbt.process_0" / "d").iterdir(), key=lambda file: file.stat().st_size)
    for item in ITEMS[:2]
  ]
  harmless = 0
  for file in payload:
    good = file.read_bytes()
    size = file.stat().st_size * 8
    for i in range(12):
      flip(file, (i * size) // 12 + i % 8)
      write_integrity_record(epath.Path(folder), record.leaves, record.metadata)
      try:
        read_checkpoint(epath.Path(folder), dict.fromkeys(ITEMS))
        harmless += 1  # an unused byte: the arrays are what was saved
      except CorruptCheckpoint:
        detected += 1
      file.write_bytes(good)
  assert detected + harmless == 24 and detected >= 20, (detected, harmless)


@pytest.mark.parametrize("item", ITEMS[:2])
def test_digests_find_valid_files_with_other_values(copy, model, item):
  """An item is replaced by that of another step, and the record is rewritten to match the files."""
  folder = copy / "5"
  record = check_integrity(epath.Path(folder), ITEMS)
  shutil.rmtree(folder / item)
  shutil.copytree(copy / "3" / item, folder / item)
  write_integrity_record(epath.Path(folder), record.leaves, record.metadata)
  said = []
  assert_is_step(Checkpoints(copy, keep=3).restore(model, OPTIMIZER, said.append), model, 3)
  assert len(said) == 1 and item in said[0] and "differs from what was saved" in said[0]


def test_several_damaged_checkpoints(copy, model):
  flip(copy / "5" / "params" / "_METADATA")
  shutil.copytree(copy / "5", copy / "5.damaged")
  delete(copy / "3" / RECORD_FILE)
  said = []
  assert Checkpoints(copy, keep=3).restore(model, OPTIMIZER, said.append) is None
  assert said[1].endswith("; there is none before it")
  assert sorted(entry.name for entry in copy.iterdir()) == ["3.damaged", "5.damaged", "5.damaged.2"]


def test_a_damaged_step_can_be_saved_again(copy, model):
  flip(copy / "5" / "rest" / "_METADATA")
  checkpoints = Checkpoints(copy, keep=3)
  state = checkpoints.restore(model, OPTIMIZER, lambda line: None).state
  damaged = contents(copy / "5.damaged")
  checkpoints.save(state.replace(step=state.step + 2), LEFTOVERS)
  checkpoints.close()
  assert Checkpoints(copy).steps() == [3, 5] and contents(copy / "5.damaged") == damaged
  restored = Checkpoints(copy).restore(model, OPTIMIZER, pytest.fail)
  assert restored.state.step == 5 and restored.metadata == {}


def test_a_reader_reports_damage_and_changes_nothing(copy, model):
  flip(copy / "5" / "params" / "_METADATA")
  before = contents(copy)
  with pytest.raises(
    RunError,
    match=r"step 5 in .* is damaged \(params/_METADATA differs from what was written\); "
    r"the one before is step 3",
  ):
    run_params(copy.parent, model)
  jax.tree.map(
    np.testing.assert_array_equal, run_params(copy.parent, model, 3)[0], state_of(model, 3).params
  )
  flip(copy / "5" / "rest" / "_METADATA")  # not read for the parameters
  flip(copy / "5" / "params" / "_METADATA")
  assert run_params(copy.parent, model)[1] == 5
  assert contents(copy).keys() == before.keys()


def test_an_incomplete_step_is_ignored_and_removed_by_the_next_save(copy, model):
  shutil.copytree(copy / "5", copy / "7.orbax-checkpoint-tmp")
  assert open_run(copy.parent).latest == 5 and (copy / "7.orbax-checkpoint-tmp").exists()
  checkpoints = Checkpoints(copy, keep=3)
  assert_is_step(checkpoints.restore(model, OPTIMIZER), model, 5)
  checkpoints.save(state_of(model, 8))  # Orbax first removes the temporary folder
  checkpoints.close()
  assert sorted(entry.name for entry in copy.iterdir()) == ["3", "5", "8"]


@pytest.fixture(scope="module")
def from_eight(tmp_path_factory):
  """The folder of a checkpoint saved on 2 x 2 x 2 devices, and its state on the host."""
  folder = tmp_path_factory.mktemp("eight") / "checkpoints"
  wide = model_on(mesh_of(2, 2, 1, 2))
  state = init_state(init_params(wide, jax.random.key(2)), OPTIMIZER, wide)
  checkpoints = Checkpoints(folder, keep=1)
  checkpoints.save(state, LEFTOVERS, {"guide": "a digest"})
  checkpoints.close()
  return folder, jax.device_get(state)


@pytest.mark.devices
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 2, 1, 2), (1, 2, 2, 1)])
@pytest.mark.some(0, slow=2)
def test_saved_on_eight_devices_and_restored_on_others(from_eight, sizes):
  folder, state = from_eight
  here = model_on(mesh_of(*sizes))
  restored = Checkpoints(folder).restore(here, OPTIMIZER, pytest.fail)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored.state), state)
  np.testing.assert_array_equal(restored.leftovers["log_probs"], LEFTOVERS["log_probs"])


@pytest.mark.devices
def test_other_shapes_or_types_are_not_treated_as_damage(copy, model):
  before = contents(copy)
  wider = Transformer(dataclasses.replace(SHAPE, mlp=64), model.mesh)
  kernel = (
    r"params\['layers'\]\['down'\]\['kernel'\] is float32\[1, 48, 32\], "
    r"but float32\[1, 64, 32\] in this config"
  )
  halved = make_optimizer(OptimizerConfig(momentum_dtype="bfloat16"), 10)
  for other, optimizer, where in (
    (wider, OPTIMIZER, kernel),
    (model, halved, r"mu.* is float32.*, but bfloat16.* in this config"),
  ):
    with pytest.raises(UserError, match=where):
      Checkpoints(copy, keep=3).restore(other, optimizer, pytest.fail)
  assert contents(copy) == before


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 1 MiB; skips the test if it cannot be mounted."""
  folder = tmp_path / "disk"
  folder.mkdir()
  if os.system(f"mount -t tmpfs -o size=1m none {folder} 2>/dev/null"):
    pytest.skip("mounting needs root")
  yield folder
  os.system(f"umount {folder}")


def test_a_full_disk(small_disk, model):
  """The save fails with one line, the previous step is intact, and saving works given space."""
  checkpoints = Checkpoints(small_disk / "checkpoints", keep=3)
  checkpoints.save(state_of(model, 1))
  checkpoints.wait()
  before = contents(small_disk / "checkpoints" / "1")
  ballast = small_disk / "ballast"
  with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as out:
    while True:
      out.write(b"x" * 1024)
  with pytest.raises(
    RunError, match=r"cannot save the checkpoint of step 2 in .*; step 1 is intact; free some space"
  ) as error:
    checkpoints.save(state_of(model, 2))
    checkpoints.wait()
  assert "\n" not in str(error.value)
  ballast.unlink()
  again = Checkpoints(small_disk / "checkpoints", keep=3)
  jax.tree.map(
    np.testing.assert_array_equal, again.restore(model, OPTIMIZER).state, state_of(model, 1)
  )
  again.save(state_of(model, 2))
  again.close()
  assert contents(small_disk / "checkpoints" / "1") == before
  assert Checkpoints(small_disk / "checkpoints").steps() == [1, 2]


def test_writes_that_end_after_a_failed_save_print_nothing(monkeypatch):
  """TensorStore calls an event loop that is closed, as after a full disk or quota."""
  shown = []

  def show(unraisable):
    shown.append(unraisable.exc_value)

  monkeypatch.setattr(sys, "unraisablehook", show)
  prepare_libraries()
  write, future = tensorstore.Promise.new()

  async def fail():
    waiting.append(asyncio.ensure_future(future))
    await asyncio.sleep(0)
    raise ValueError("the first write")

  def save():
    loop = asyncio.new_event_loop()
    with pytest.raises(ValueError, match="the first write"):
      loop.run_until_complete(fail())
    loop.close()

  waiting = []
  with futures.ThreadPoolExecutor() as pool:  # a thread that runs no other loop
    pool.submit(save).result()
  write.set_result(1)
  future.result()
  assert not shown
  sys.unraisablehook(types.SimpleNamespace(exc_value=KeyError("other")))
  assert [type(error) for error in shown] == [KeyError]
