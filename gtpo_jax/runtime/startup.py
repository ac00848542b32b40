"""Settings that must be made before JAX starts. Importing this module imports no JAX."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from gtpo_jax.runtime.errors import UserError

GPU_PLUGINS = ("cuda12", "cuda13", "rocm7", "rocm60")
TPU_DEVICE_FILES = ("/dev/accel0", "/dev/vfio")
MIN_COMPILE_TIME_S = 0.2  # programs that compile faster are not cached
THREADS_PER_CPU_DEVICE = 32
JOIN_TIMEOUT_S = 120


def prepare_jax() -> None:
  """Configures the platform and the compile cache. Call it before JAX is first imported.

  Without this, JAX looks for TPU chips on every machine that has `libtpu` installed. Existing
  values of `JAX_PLATFORMS` and `JAX_COMPILATION_CACHE_DIR`, and of the corresponding JAX options,
  are left unchanged.
  """
  has_tpu = any(Path(path).exists() for path in TPU_DEVICE_FILES)
  has_gpu_plugin = any(importlib.util.find_spec(f"jax_{kind}_plugin") for kind in GPU_PLUGINS)
  force_cpu = importlib.util.find_spec("libtpu") and not has_tpu and not has_gpu_plugin
  if force_cpu:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  reserve_cpu_threads()
  import jax

  if force_cpu and not jax.config.jax_platforms:  # a notebook may have imported JAX already
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
  if jax.config.jax_compilation_cache_dir is None:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(home / "gtpo_jax" / "xla"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_TIME_S)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)  # no minimum


def use_compile_cache(on: bool) -> None:
  """Turns JAX's compile cache on or off, even after programs were compiled."""
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  if jax.config.jax_enable_compilation_cache != on:
    jax.config.update("jax_enable_compilation_cache", on)
    # JAX decides only once whether it uses a cache; this makes it decide again.
    compilation_cache.reset_cache()


def reserve_cpu_threads() -> None:
  """Sets the size of XLA's thread pool for virtual CPU devices, which XLA reads at start-up.

  A device that waits in a collective occupies a thread, and by default the pool has one thread per
  CPU core. Devices may start independent collectives in different orders, several at a time; when
  all threads wait, the program deadlocks.
  """
  devices = os.environ.get("JAX_NUM_CPU_DEVICES", "1")
  if devices.isdigit() and int(devices) > 1:
    os.environ.setdefault("NPROC", str(THREADS_PER_CPU_DEVICE * int(devices)))


def join_processes() -> None:
  """Connects the processes of this run if a launcher has started several.

  The launcher sets `JAX_COORDINATOR_ADDRESS` (host:port of the first process), `JAX_NUM_PROCESSES`
  and `JAX_PROCESS_ID`.

  Raises:
    UserError: the address is set, but the other two are not integers.
  """
  if os.environ.get("JAX_COORDINATOR_ADDRESS"):
    import jax

    try:
      count = int(os.environ["JAX_NUM_PROCESSES"])
      index = int(os.environ["JAX_PROCESS_ID"])
    except (KeyError, ValueError):
      raise UserError(
        "JAX_COORDINATOR_ADDRESS is set, so JAX_NUM_PROCESSES and JAX_PROCESS_ID must be integers"
      ) from None
    jax.distributed.initialize(
      num_processes=count, process_id=index, initialization_timeout=JOIN_TIMEOUT_S
    )
