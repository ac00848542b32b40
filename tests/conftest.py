"""Gives tests eight CPU devices, a shared compile cache, and checks for a sandbox and a browser."""

import importlib.metadata
import importlib.util
import os
import shutil
import signal
import tempfile

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "gtpo_jax_test_xla")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


import jax  # reads the variables above

from gtpo_jax.runtime.startup import reserve_cpu_threads


def pytest_runtest_setup(item):
  """Skips a test that needs the sandbox if it does not work; fails it if CI requires one."""
  if item.get_closest_marker("sandbox"):
    from gtpo_jax.rewards import sandbox_problem

    if problem := sandbox_problem():
      skip_or_fail("GTPO_REQUIRE_SANDBOX", f"the sandbox does not work: {problem}")


def skip_or_fail(required, reason):
  """Skips the test, or fails it if the environment variable `required` is set, as in CI."""
  if os.environ.get(required):
    pytest.fail(reason)
  pytest.skip(reason)


@pytest.fixture(scope="session")
def browser():
  """This machine's Chromium in headless mode. CI fails if it is missing."""
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


def pytest_configure(config):
  """Sets up signals, XLA's flags and the devices.

  The default suite spends most of its time in compilation, so XLA compiles with few optimizations.
  `-m slow` spends more time computing, so it compiles with the default settings.
  """
  # A shell's background jobs ignore SIGINT, and processes that tests start would inherit this.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  if config.option.markexpr == "not slow":
    flags = ["--xla_backend_optimization_level=0"]
    # Later versions of XLA do not know this flag and would exit.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
      flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
  reserve_cpu_threads()
  jax.devices()
  os.environ.pop("NPROC", None)  # programs that tests start set their own value
