"""Eight virtual CPU devices for every test, a compile cache shared by the test processes, and the tests that need a sandbox."""
import importlib.metadata
import os
import tempfile

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "gtpo_jax_test_xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_runtest_setup(item):
  """Where GTPO_REQUIRE_SANDBOX is set, as in CI, a sandbox that does not work is a failure."""
  if item.get_closest_marker("sandbox"):
    from gtpo_jax.rewards import sandbox_problem
    if problem := sandbox_problem():
      (pytest.fail if os.environ.get("GTPO_REQUIRE_SANDBOX") else pytest.skip)(f"no sandbox here: {problem}")


def pytest_configure(config):
  """Compiling is most of what the default suite does: there XLA takes its quickest way. `-m slow` computes more and runs as users do."""
  if config.option.markexpr == "not slow":
    flags = ["--xla_backend_optimization_level=0"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know this flag, and end at once
      flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
