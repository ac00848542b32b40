"""Gives tests one CPU device or eight, a compile cache, and checks for a sandbox and a browser."""

import collections
import gc
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import tempfile
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "gtpo_jax_test_xla")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # tracing is faster
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is first imported


import jax  # reads the variables above

from gtpo_jax.runtime.startup import (
  prepare_devices,
  prepare_libraries,
  reserve_cpu_threads,
  use_compile_cache,
)

MOST_RESIDENT = 3 << 30  # bytes of a process, above which it drops its compiled programs

# The tests of such a folder share compiled programs, or the import of torch; one process runs them.
SHARED_FOLDERS = ("algorithms", "models/hf", "rollout", "sampling", "training")
LONGEST = (  # folders and files that take longest; they begin first
  "training/",
  "rollout/",
  "algorithms/",
  "sampling/",
  "faults/test_exact_resume",
  "faults/test_two_processes",
  "test_real_model",
  "test_loop",
  "test_cli",
  "models/hf/",
  "loop/test_python",
  "test_notebooks",
  "test_docs",
  "faults/",
  "cli/planning/",
  "rewards/test_gym",
  "cli/report/test_report",
  "test_export",
  "models/",
  "serving/",
)

hypothesis.settings.register_profile("without deadlines", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("without deadlines")


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item):
  """Gives the test its devices, and checks for a sandbox if the test needs one.

  Tests with the mark `devices` see all eight devices, the others see one. The compile cache is off
  for the former, because a program of several CPU devices that was read from it can deadlock; see
  `make_mesh`.
  """
  several = item.get_closest_marker("devices") is not None
  jax.devices = every_device if several else first_device
  use_compile_cache(not several)
  if item.get_closest_marker("sandbox"):
    from gtpo_jax.rewards import sandbox_problem

    if problem := sandbox_problem():
      skip_or_fail("GTPO_REQUIRE_SANDBOX", f"the sandbox does not work: {problem}")


every_device = jax.devices


def first_device(backend=None):
  """Takes the place of `jax.devices` in tests without the mark `devices`."""
  return every_device(backend) if backend else every_device()[:1]


def resident_bytes():
  """Returns the memory of this process; 0 where Linux does not tell it."""
  try:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  except OSError:
    return 0


def skip_or_fail(required, reason):
  """Skips the test, or fails it if the environment variable `required` is set, as in CI."""
  if os.environ.get(required):
    pytest.fail(reason)
  pytest.skip(reason)


@pytest.fixture(scope="module", autouse=True)
def drop_compiled_programs():
  """Frees the programs of earlier files once they take gigabytes."""
  yield
  if resident_bytes() > MOST_RESIDENT:
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def browser():
  """This machine's Chromium in headless mode. CI fails if it is missing.

  Until it is closed, Playwright's event loop runs in this thread, where the tests of other modules
  may start their own.
  """
  program = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
  )
  if program is None:
    skip_or_fail("GTPO_REQUIRE_BROWSER", "Chromium is missing: install chromium")
  if importlib.util.find_spec("playwright") is None:
    skip_or_fail("GTPO_REQUIRE_BROWSER", "playwright is missing: pip install playwright")
  from playwright.sync_api import sync_playwright

  with sync_playwright() as driver:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    chromium = driver.chromium.launch(executable_path=program, args=arguments)
    yield chromium
    chromium.close()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
  """The workdir of a run of two steps, and what `gtpo train` has printed."""
  from command_line import TRAIN, gtpo
  from shared_folders import create_once

  def create(folder):
    settings = ["--config.steps=2", "--config.checkpoint.every=1"]
    done = gtpo(*TRAIN, f"--workdir={folder / 'run'}", *settings)
    assert done.returncode == 0, done.stderr
    (folder / "out").write_text(done.stdout)

  folder = create_once(tmp_path_factory, "finished_run", create)
  return folder / "run", (folder / "out").read_text()


@pytest.fixture(scope="session")
def storage_server():
  """A Google Cloud Storage emulator, to which gs:// leads in this process and those it starts."""
  for module in ("gcsfs", "gcp_storage_emulator"):
    if importlib.util.find_spec(module) is None:
      pytest.skip(f"{module} is missing: pip install -e '.[dev]'")
  from object_store import object_store

  with object_store() as store:
    os.environ.update(store.environment)
    yield store


@pytest.fixture
def store(storage_server):
  """The emulator with an empty bucket, whose requests all succeed."""
  storage_server.reset()
  yield storage_server
  storage_server.reset()


def spread(tests, count):
  """Returns `count` of the tests at even distances, and the others."""
  kept = {i * len(tests) // count for i in range(count)}
  return [tests[i] for i in sorted(kept)], [x for i, x in enumerate(tests) if i not in kept]


def leave_some_rows(items):
  """Keeps COUNT rows of each test with `some(COUNT, slow=MORE)`, at even distances.

  MORE of the others, by default all, are marked as slow, and the rest as manual.
  """
  rows = collections.defaultdict(list)
  for item in items:
    if item.get_closest_marker("some") and not item.get_closest_marker("slow"):
      rows[item.nodeid.split("[")[0]].append(item)
  for tests in rows.values():
    mark = tests[0].get_closest_marker("some")
    _, others = spread(tests, min(mark.args[0], len(tests)))
    slow, manual = spread(others, min(mark.kwargs.get("slow", len(others)), len(others)))
    for item in slow:
      item.add_marker(pytest.mark.slow)
    for item in manual:
      item.add_marker(pytest.mark.manual)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
  """Gives the files of `SHARED_FOLDERS` to the same worker, with `--dist loadfile`."""
  if config.getvalue("dist") != "loadfile":
    return None
  from xdist.scheduler import LoadFileScheduling

  class LoadFolderScheduling(LoadFileScheduling):
    def _split_scope(self, nodeid):
      folder = nodeid.split("::")[0].removeprefix("tests/").rpartition("/")[0]
      return folder if folder in SHARED_FOLDERS else super()._split_scope(nodeid)

  return LoadFolderScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Chooses the rows of the default suite, marks what needs a browser, puts long files first.

  So no worker has much left when the other is done.
  """
  leave_some_rows(items)
  for item in items:
    if "browser" in item.fixturenames:
      item.add_marker(pytest.mark.browser)

  def place(item):
    name = item.nodeid.removeprefix("tests/")
    return next((i for i, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))

  items.sort(key=place)


def pytest_collection_finish():
  """Lets Python search for garbage less often.

  Tracing creates millions of objects; with Python's own thresholds, a tenth of a run's time and a
  fifth of a trace's goes into the search.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 10)


def use_own_temporary_folder(config):
  """Sets TMPDIR to a folder that is removed at the end; programs that tests kill leave files."""
  os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps tmp_path
  folder = tempfile.mkdtemp(prefix="gtpo_tests_")
  os.chmod(folder, 0o711)  # the sandbox's user must reach what is below
  config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
  os.environ["TMPDIR"] = folder
  tempfile.tempdir = None  # so that this process reads TMPDIR again


def pytest_configure(config):
  """Sets up signals, XLA's flags and the devices.

  Most tests spend more time in the compiler than in its programs, so XLA compiles with few
  optimizations. `-m manual` computes more, so it compiles with the default settings.
  """
  if not hasattr(config, "workerinput"):  # xdist's workers inherit the folder
    use_own_temporary_folder(config)
  # A shell's background jobs ignore SIGINT, and processes that tests start would inherit this.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  if config.option.markexpr != "manual":
    flags = ["--xla_backend_optimization_level=0"]
    # Later versions of XLA do not know this flag and would exit.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
      flags.append("--xla_cpu_use_fusion_emitters=false")
      flags.append("--xla_cpu_parallel_codegen_split_count=1")  # the workers use all cores
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
  reserve_cpu_threads()
  prepare_libraries()
  prepare_devices()
  os.environ.pop("NPROC", None)  # programs that tests start set their own value
  # Otherwise every process that a test starts would compile the package again.
  os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
