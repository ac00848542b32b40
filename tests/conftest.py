"""Eight virtual CPU devices for every test, a compile cache shared by the test processes, and what tests need of the machine."""

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


import jax  # after its settings

from gtpo_jax.runtime.startup import give_threads


def pytest_runtest_setup(item):
  """Where GTPO_REQUIRE_SANDBOX is set, as in CI, a sandbox that does not work is a failure."""
  if item.get_closest_marker("sandbox"):
    from gtpo_jax.rewards import sandbox_problem

    if problem := sandbox_problem():
      (pytest.fail if os.environ.get("GTPO_REQUIRE_SANDBOX") else pytest.skip)(
        f"no sandbox here: {problem}"
      )


@pytest.fixture(scope="session")
def browser():
  """The machine's own Chromium, without a window. Where GTPO_REQUIRE_BROWSER is set, as in CI, its lack is a failure."""
  program = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
  )
  if program is None or importlib.util.find_spec("playwright") is None:
    lack = (
      "no Chromium here: install chromium"
      if program is None
      else "playwright is not installed: pip install playwright"
    )
    (pytest.fail if os.environ.get("GTPO_REQUIRE_BROWSER") else pytest.skip)(lack)
  from playwright.sync_api import sync_playwright

  with sync_playwright() as driver:
    opened = driver.chromium.launch(
      executable_path=program, args=["--no-sandbox"] if os.geteuid() == 0 else []
    )
    yield opened
    opened.close()


def pytest_configure(config):
  """Compiling is most of what the default suite does: there XLA takes its quickest way. `-m slow` computes more and runs as users do."""
  signal.signal(
    signal.SIGINT, signal.default_int_handler
  )  # a shell's background job ignores it, and so would all that tests start
  if config.option.markexpr == "not slow":
    flags = ["--xla_backend_optimization_level=0"]
    if importlib.metadata.version("jaxlib").startswith(
      "0.10."
    ):  # later ones do not know this flag, and end at once
      flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
  give_threads()
  jax.devices()
  os.environ.pop("NPROC", None)  # the programs that tests start ask for their own
