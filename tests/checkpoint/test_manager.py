"""Checkpoints under every damage that a disk can do: found, set aside, and the one before is read."""

import dataclasses
import os
import shutil

import jax
import numpy as np
import pytest
from etils import epath

from gtpo_jax.checkpoint.integrity import NAME, Damaged, check_seal, write_seal
from gtpo_jax.checkpoint.manager import Checkpoints, open_run, run_params
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.models.qwen2 import Qwen2, init_params
from gtpo_jax.runtime.errors import RunError, UserError
from gtpo_jax.runtime.mesh import make_mesh, single_device_mesh
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer

# A read or save that fails in one array leaves Orbax's coroutines for the others behind; they complain of their closed event loop.
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
  return Qwen2(SHAPE, mesh)


def contents(folder):
  return {
    str(file.relative_to(folder)): file.read_bytes()
    for file in sorted(folder.rglob("*"))
    if file.is_file()
  }


@pytest.fixture(scope="module")
def model():
  return model_on(single_device_mesh())


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
  """A folder with the steps 3 and 5."""
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


def assert_is_step(found, model, step):
  jax.tree.map(np.testing.assert_array_equal, found.state, state_of(model, step))
  assert found.facts == {"guide": "a digest"} and found.leftovers.keys() == LEFTOVERS.keys()
  for name, x in LEFTOVERS.items():
    np.testing.assert_array_equal(found.leftovers[name], x)
    assert found.leftovers[name].dtype == x.dtype


def test_all_of_it_comes_back(saved, model):
  before = contents(saved)
  assert_is_step(Checkpoints(saved).restore(model, OPTIMIZER), model, 5)
  assert contents(saved) == before


def truncate(file):
  file.write_bytes(file.read_bytes()[:-1])


def delete(file):
  file.unlink()


def flip(file, at=None):
  content = bytearray(file.read_bytes())
  at = len(content) * 4 if at is None else at
  content[at // 8] ^= 1 << at % 8
  file.write_bytes(content)


def test_every_file_truncated_deleted_and_flipped(copy):
  """Each of them is noticed without a byte being given to Orbax, and mended it is good again."""
  folder = copy / "5"
  files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
  assert {"seal", "commit_success.txt", "params/_METADATA", "rest/manifest.ocdbt"} <= {
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
      with pytest.raises(Damaged, match=r"is missing|is not what was written|has no seal"):
        check_seal(epath.Path(folder), ITEMS)
      file.write_bytes(good)
    flips += len(bits)
  assert flips >= 100
  check_seal(epath.Path(folder), ITEMS)


@pytest.mark.parametrize(
  ("damage", "name"),
  [
    (delete, "seal"),
    (truncate, "_CHECKPOINT_METADATA"),
    (flip, "params/_sharding"),
    (truncate, "rest/ocdbt.process_0/manifest.ocdbt"),
    (flip, "leftovers/manifest.ocdbt"),
  ],
  ids=lambda value: getattr(value, "__name__", value),
)
def test_the_step_before_is_used_and_nothing_else_is_touched(copy, model, damage, name):
  damage(copy / "5" / name)
  before = contents(copy)
  said = []
  assert_is_step(Checkpoints(copy, keep=3).restore(model, OPTIMIZER, said.append), model, 3)
  assert (
    len(said) == 1
    and "the checkpoint of step 5 is damaged" in said[0]
    and name in said[0]
    and "step 3 is read instead" in said[0]
  )
  assert contents(copy) == {
    key.replace("5/", "5.damaged/", 1) if key.startswith("5/") else key: value
    for key, value in before.items()
  }


def test_flipped_bits_of_the_arrays_are_found_by_their_values(copy, model):
  """Large files are not read twice: what they hold is known by its digest alone. 48 flips, under a seal that fits the damaged files."""
  folder = copy / "5"
  found = 0
  seal = check_seal(epath.Path(folder), ITEMS)
  payload = [
    max((folder / item / "ocdbt.process_0" / "d").iterdir(), key=lambda file: file.stat().st_size)
    for item in ITEMS[:2]
  ]
  harmless = 0
  for file in payload:
    good = file.read_bytes()
    size = file.stat().st_size * 8
    for i in range(24):
      flip(file, (i * size) // 24 + i % 8)
      write_seal(epath.Path(folder), seal["leaves"], seal["facts"])
      checkpoints = Checkpoints(copy)
      try:
        checkpoints._read(5, {"params": None, "rest": None, "leftovers": None})
        harmless += 1  # a byte that stands for nothing: what is read is what was saved
      except Damaged:
        found += 1
      file.write_bytes(good)
  assert found + harmless == 48 and found >= 40, (found, harmless)


@pytest.mark.parametrize("item", ITEMS[:2])
def test_sound_files_with_other_values_are_found(copy, model, item):
  """What no checksum of a file format sees: the item of another step, under a seal that fits its files."""
  folder = copy / "5"
  seal = check_seal(epath.Path(folder), ITEMS)
  shutil.rmtree(folder / item)
  shutil.copytree(copy / "3" / item, folder / item)
  write_seal(epath.Path(folder), seal["leaves"], seal["facts"])
  said = []
  assert_is_step(Checkpoints(copy, keep=3).restore(model, OPTIMIZER, said.append), model, 3)
  assert len(said) == 1 and item in said[0] and "is not what was saved" in said[0]


def test_damage_upon_damage(copy, model):
  flip(copy / "5" / "params" / "_METADATA")
  shutil.copytree(copy / "5", copy / "5.damaged")
  delete(copy / "3" / NAME)
  said = []
  assert Checkpoints(copy, keep=3).restore(model, OPTIMIZER, said.append) is None
  assert [line.split(";")[-1] for line in said][1].endswith("and there is none before it")
  assert sorted(entry.name for entry in copy.iterdir()) == ["3.damaged", "5.damaged", "5.damaged.2"]


def test_a_run_goes_on_from_the_step_before(copy, model):
  flip(copy / "5" / "rest" / "_METADATA")
  checkpoints = Checkpoints(copy, keep=3)
  state = checkpoints.restore(model, OPTIMIZER, lambda line: None).state
  checkpoints.save(state.replace(step=state.step + 2), LEFTOVERS)
  checkpoints.close()
  assert Checkpoints(copy).steps() == [3, 5]


def test_a_reader_tells_and_leaves_the_folder_alone(copy, model):
  flip(copy / "5" / "params" / "_METADATA")
  before = contents(copy)
  with pytest.raises(
    RunError,
    match=r"step 5 in .* is damaged \(params/_METADATA is not what was written\); step 3 is before it",
  ):
    run_params(copy.parent, model)
  jax.tree.map(
    np.testing.assert_array_equal, run_params(copy.parent, model, 3)[0], state_of(model, 3).params
  )
  flip(copy / "5" / "rest" / "_METADATA")  # which is none of a sampler's business
  flip(copy / "5" / "params" / "_METADATA")
  assert run_params(copy.parent, model)[1] == 5
  assert contents(copy).keys() == before.keys()


def test_what_a_kill_left_half_written_does_not_count_and_is_cleared_away_by_the_owner(copy, model):
  shutil.copytree(copy / "5", copy / "7.orbax-checkpoint-tmp")
  assert open_run(copy.parent).latest == 5 and (copy / "7.orbax-checkpoint-tmp").exists()
  checkpoints = Checkpoints(copy, keep=3)
  assert_is_step(checkpoints.restore(model, OPTIMIZER), model, 5)
  checkpoints.save(
    state_of(model, 8)
  )  # Orbax clears away in the background, and is done before it saves
  checkpoints.close()
  assert sorted(entry.name for entry in copy.iterdir()) == ["3", "5", "8"]


@pytest.fixture(scope="module")
def from_eight(tmp_path_factory):
  """Step 2, saved on 2 x 2 x 2 devices, and what it was."""
  folder = tmp_path_factory.mktemp("eight") / "checkpoints"
  wide = model_on(make_mesh(2, 2, 2))
  state = init_state(init_params(wide, jax.random.key(2)), OPTIMIZER, wide)
  checkpoints = Checkpoints(folder, keep=1)
  checkpoints.save(state, LEFTOVERS, {"guide": "a digest"})
  checkpoints.close()
  return folder, jax.device_get(state)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2), (1, 2, 1, 2)])
def test_saved_on_eight_devices_and_restored_on_others(from_eight, sizes):
  folder, state = from_eight
  here = model_on(make_mesh(*sizes[:3], jax.devices()[: int(np.prod(sizes))], *sizes[3:]))
  found = Checkpoints(folder).restore(here, OPTIMIZER, pytest.fail)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(found.state), state)
  np.testing.assert_array_equal(found.leftovers["log_probs"], LEFTOVERS["log_probs"])


def test_arrays_of_other_shapes_or_types_are_told_from_damage(copy, model):
  before = contents(copy)
  wider = Qwen2(dataclasses.replace(SHAPE, mlp=64), model.mesh)
  kernel = r"params\['layers'\]\['down'\]\['kernel'\] is float32\[1, 48, 32\], and by this config float32\[1, 64, 32\]"
  halved = make_optimizer(OptimizerConfig(momentum_dtype="bfloat16"), 10)
  for other, optimizer, where in (
    (wider, OPTIMIZER, kernel),
    (model, halved, r"mu.* is float32.* by this config bfloat16"),
  ):
    with pytest.raises(UserError, match=where):
      Checkpoints(copy, keep=3).restore(other, optimizer, pytest.fail)
  assert contents(copy) == before


@pytest.fixture
def small_disk(tmp_path):
  """A file system of one MiB; skipped where it cannot be mounted."""
  folder = tmp_path / "disk"
  folder.mkdir()
  if os.system(f"mount -t tmpfs -o size=1m none {folder} 2>/dev/null"):
    pytest.skip("mounting needs root")
  yield folder
  os.system(f"umount {folder}")


def test_a_full_disk(small_disk, model):
  """The save fails in one line, what was saved before is whole, and with space it goes on."""
  checkpoints = Checkpoints(small_disk / "checkpoints", keep=3)
  checkpoints.save(state_of(model, 1))
  checkpoints.wait()
  before = contents(small_disk / "checkpoints" / "1")
  ballast = small_disk / "ballast"
  with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as out:
    while True:
      out.write(b"x" * 1024)
  with pytest.raises(
    RunError,
    match=r"the checkpoint of step 2 cannot be saved in .*; step 1 is whole: free some space",
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
