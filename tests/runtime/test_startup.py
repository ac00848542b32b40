"""Start-up: no silent use of the CPU, the place of the compile cache, and the CUDA extra."""

import logging
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from gtpo_jax.logs import profile
from gtpo_jax.logs.profile import compile_count, describe_compile_cache
from gtpo_jax.runtime import startup
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.startup import (
  QUIET_LOGGERS,
  choose_gpu_memory,
  cuda_extra,
  nvidia_driver,
  place_compile_cache,
  prepare_devices,
  prepare_jax,
  prepare_libraries,
  reads_compile_cache,
  refuse_cpu_fallback,
  use_compile_cache,
)


@pytest.fixture
def machine_with_gpu(monkeypatch, tmp_path):
  (tmp_path / "nvidia3").touch()
  table = {
    "an NVIDIA GPU": (str(tmp_path / "nvidia[0-9]*"), "cuda", "cuda"),
    "a TPU": (str(tmp_path / "accel[0-9]*"), "tpu", "tpu"),
  }
  monkeypatch.setattr(startup, "ACCELERATORS", table)
  before = jax.config.jax_platforms
  jax.config.update("jax_platforms", None)  # the tests themselves ask for the CPU
  yield
  jax.config.update("jax_platforms", before)


def test_a_gpu_that_jax_does_not_use_is_an_error(machine_with_gpu):
  with pytest.raises(UserError) as error:
    refuse_cpu_fallback()
  message = str(error.value)
  assert message.startswith("this machine has an NVIDIA GPU, but JAX would use the CPU (")
  assert "; pip install 'jax[cuda13]<" in message
  assert message.endswith(", or set JAX_PLATFORMS=cpu to use the CPU")
  assert "\n" not in message


def test_the_cpu_can_be_requested(machine_with_gpu, monkeypatch):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides the GPUs
  refuse_cpu_fallback()
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
  jax.config.update("jax_platforms", "cpu")
  refuse_cpu_fallback()


def test_a_machine_without_accelerator(machine_with_gpu, tmp_path):
  (tmp_path / "nvidia3").unlink()
  refuse_cpu_fallback()


def test_a_platform_that_does_not_start(monkeypatch):
  def default_backend():
    raise RuntimeError("Unable to initialize backend 'cuda': no driver\nand more")

  monkeypatch.setattr(jax, "default_backend", default_backend)
  with pytest.raises(UserError, match=r"^JAX does not start with JAX_PLATFORMS=cpu \(Unable .* no"):
    refuse_cpu_fallback()


def test_importing_part_of_the_package_prints_nothing_on_a_cpu():
  """This includes a machine with libtpu, which prints a warning if JAX looks for TPU chips."""
  env = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
  program = "from gtpo_jax import algorithms\nimport jax\njax.devices()"
  done = subprocess.run(
    [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=100
  )
  assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
  ("mine", "expected"),
  [
    ({}, {"XLA_CLIENT_MEM_FRACTION": "0.9"}),
    ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
    # JAX does not start if both names are set.
    ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}),
  ],
)
def test_the_share_of_a_gpus_memory(mine, expected, monkeypatch):
  for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
    monkeypatch.setenv(name, mine.get(name, ""))  # an empty value counts as none
  choose_gpu_memory()
  found = {name: value for name, value in os.environ.items() if "MEM_FRACTION" in name and value}
  assert found == expected


@pytest.mark.parametrize(
  ("libtpu", "device", "expected"),
  [(True, None, "cpu"), (True, "nvidia0", None), (True, "kfd", None), (False, None, None)],
)
def test_the_cpu_is_chosen_where_libtpu_would_look_for_chips(
  libtpu, device, expected, monkeypatch, tmp_path
):
  """Whether the CUDA plugin is installed plays no part: `gtpo plan` needs it without a GPU."""
  if device:
    (tmp_path / device).touch()
  monkeypatch.setattr(startup, "NVIDIA_DEVICE_FILES", str(tmp_path / "nvidia[0-9]*"))
  monkeypatch.setattr(startup, "OTHER_GPU_DEVICE_FILES", (str(tmp_path / "kfd"),))
  monkeypatch.setattr(startup, "has_tpu", lambda: False)
  find_spec = lambda name: name != "libtpu" or libtpu
  monkeypatch.setattr(startup.importlib.util, "find_spec", find_spec)
  monkeypatch.setenv("JAX_PLATFORMS", "")
  monkeypatch.delenv("JAX_PLATFORMS")
  startup.choose_platform()
  assert os.environ.get("JAX_PLATFORMS") == expected


@pytest.mark.parametrize(("driver", "expected"), [("version", None), ("missing", "1")])
def test_cuda_is_not_checked_without_a_driver(driver, expected, monkeypatch, tmp_path):
  (tmp_path / "version").write_text("")
  monkeypatch.setattr(startup, "NVIDIA_DRIVER_FILE", str(tmp_path / driver))
  monkeypatch.setattr(startup, "NVIDIA_DEVICE_FILES", str(tmp_path / "nvidia[0-9]*"))
  monkeypatch.setenv(startup.CUDA_CHECKS_VARIABLE, "0")
  monkeypatch.delenv(startup.CUDA_CHECKS_VARIABLE)
  startup.skip_cuda_checks()
  assert os.environ.get(startup.CUDA_CHECKS_VARIABLE) == expected
  monkeypatch.setenv(startup.CUDA_CHECKS_VARIABLE, "0")
  startup.skip_cuda_checks()
  assert os.environ[startup.CUDA_CHECKS_VARIABLE] == "0"


@pytest.fixture
def default_cache(monkeypatch, tmp_path):
  """The compile cache is where `prepare_jax` puts it by default."""
  for name in ("NPROC", "XLA_CLIENT_MEM_FRACTION"):  # which `prepare_jax` would set
    monkeypatch.setenv(name, "")
  names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
  before = {name: getattr(jax.config, name) for name in names}
  was_on = jax.config.jax_enable_compilation_cache
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "home" / "gtpo_jax" / "xla"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # another test may raise it
  use_compile_cache(True)
  yield tmp_path
  for name, value in before.items():
    jax.config.update(name, value)
  use_compile_cache(was_on)
  compilation_cache.reset_cache()


@pytest.mark.parametrize(
  ("workdir", "processes", "place"),
  [
    ("runs/tiny", 1, "home/gtpo_jax/xla"),
    ("runs/tiny", 2, "runs/tiny/compile_cache"),
    ("gs://bucket/run/", 1, "gs://bucket/run/compile_cache"),
  ],
)
def test_where_the_compile_cache_is_kept(workdir, processes, place, default_cache, monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: processes)
  place_compile_cache(workdir)
  assert jax.config.jax_compilation_cache_dir.removeprefix(f"{default_cache}/") == place


def test_without_a_writable_home_the_compile_cache_is_beside_the_run(default_cache, monkeypatch):
  (default_cache / "file").touch()
  monkeypatch.setenv("XDG_CACHE_HOME", str(default_cache / "file"))
  jax.config.update("jax_compilation_cache_dir", None)
  prepare_jax()
  assert jax.config.jax_compilation_cache_dir is None
  place_compile_cache(default_cache / "run")
  assert jax.config.jax_compilation_cache_dir == str(default_cache / "run" / "compile_cache")


def test_programs_are_written_to_the_workdir_and_found_there(default_cache, monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  place_compile_cache(default_cache / "run")
  program = lambda x: jax.numpy.sin(x) @ jax.numpy.cos(x.T)
  compile_count()
  found = profile._events[profile.CACHE_HIT]
  jax.jit(program)(np.ones((3, 5)))
  assert list((default_cache / "run" / "compile_cache").glob("*-cache"))
  jax.clear_caches()
  jax.jit(program)(np.ones((3, 5)))
  assert profile._events[profile.CACHE_HIT] == found + 1
  assert describe_compile_cache().startswith(
    f"the compile cache {default_cache}/run/compile_cache "
  )


def test_a_cache_folder_set_by_the_user_is_kept(default_cache, monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  jax.config.update("jax_compilation_cache_dir", str(default_cache / "mine"))
  place_compile_cache("runs/tiny")
  assert jax.config.jax_compilation_cache_dir == str(default_cache / "mine")


@pytest.mark.devices
@pytest.mark.parametrize("count", [1, 8])
def test_programs_of_several_cpu_devices_are_not_read_from_the_cache(
  count, default_cache, monkeypatch
):
  """They could deadlock. Those of one device are written to the cache and read again."""
  folder = default_cache / "cache"
  jax.config.update("jax_compilation_cache_dir", str(folder))
  compilation_cache.reset_cache()
  devices = jax.devices()[:count]
  monkeypatch.setattr(jax, "devices", lambda: devices)
  prepare_devices()
  assert reads_compile_cache() == (count == 1)
  jax.jit(lambda x: x * 3.0 + count)(np.ones(3))
  assert folder.exists() == (count == 1)


@pytest.fixture
def process_settings(monkeypatch):
  """Undoes what `prepare_libraries` changes. The value is a list of the errors that are shown."""
  levels = {name: logging.getLogger(name).level for name in QUIET_LOGGERS}
  shown = []
  monkeypatch.setattr(sys, "unraisablehook", shown.append)
  yield shown
  for name, level in levels.items():
    logging.getLogger(name).setLevel(level)


def test_libraries_are_quiet_about_errors_that_are_raised_anyway(process_settings):
  for name in QUIET_LOGGERS:
    logging.getLogger(name).setLevel(logging.NOTSET)
  prepare_libraries()
  hook = sys.unraisablehook
  prepare_libraries()
  assert sys.unraisablehook is hook  # no chain of hooks
  assert [logging.getLogger(name).level for name in QUIET_LOGGERS] == [*QUIET_LOGGERS.values()]
  late, other = (
    types.SimpleNamespace(exc_value=RuntimeError(text))
    for text in ("Event loop is closed", "something else")
  )
  hook(late)
  hook(other)
  assert process_settings == [other]


@pytest.mark.parametrize(
  ("text", "version", "extra"),
  [
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19", 535, "cuda12"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release", 580, "cuda"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  575.57.08  Release", 575, "cuda12"),
    ("something else", None, "cuda"),
    (None, None, "cuda"),
  ],
)
def test_the_cuda_extra_matches_the_driver(monkeypatch, tmp_path, text, version, extra):
  file = tmp_path / "version"
  if text:
    file.write_text(text + "\nGCC version: 12.2.0\n")
  monkeypatch.setattr(startup, "NVIDIA_DRIVER_FILE", str(file))
  assert (nvidia_driver(), cuda_extra()) == (version, extra)
