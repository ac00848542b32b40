"""What must be settled before JAX starts. Importing this imports no JAX."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from gtpo_jax.runtime.errors import UserError


def prepare_jax() -> None:
  """Keeps JAX from looking for TPU chips that are not here, and gives it a compile cache. Call it before JAX is imported.

  `JAX_PLATFORMS` and `JAX_COMPILATION_CACHE_DIR`, or JAX's own settings of that kind, are left alone where they are set.
  """
  chips = any(Path(path).exists() for path in ("/dev/accel0", "/dev/vfio"))
  gpu_plugin = any(
    importlib.util.find_spec(f"jax_{kind}_plugin")
    for kind in ("cuda12", "cuda13", "rocm7", "rocm60")
  )
  cpu_alone = importlib.util.find_spec("libtpu") and not chips and not gpu_plugin
  if cpu_alone:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  give_threads()
  import jax

  if cpu_alone and not jax.config.jax_platforms:  # a notebook may have imported it before
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
  if jax.config.jax_compilation_cache_dir is None:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(home / "gtpo_jax" / "xla"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def use_compile_cache(on: bool) -> None:
  """Turns JAX's compile cache on or off, whatever was compiled before."""
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  if jax.config.jax_enable_compilation_cache != on:
    jax.config.update("jax_enable_compilation_cache", on)
    compilation_cache.reset_cache()  # JAX decides once whether it has a cache; this makes it decide again


def give_threads() -> None:
  """Gives virtual CPU devices threads enough, through a variable that XLA reads when it makes its devices.

  A device that waits for others in a collective keeps a thread of a pool as large as the machine. Devices may take up independent
  collectives in different order, several each; once every thread waits, none can go on.
  """
  devices = os.environ.get("JAX_NUM_CPU_DEVICES", "1")
  if devices.isdigit() and int(devices) > 1:
    os.environ.setdefault("NPROC", str(32 * int(devices)))


def join_processes() -> None:
  """Joins the processes of this run, where a launcher says that there are several.

  It sets `JAX_COORDINATOR_ADDRESS` (host:port of the first), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`.
  """
  if os.environ.get("JAX_COORDINATOR_ADDRESS"):
    import jax

    try:
      count = int(os.environ["JAX_NUM_PROCESSES"])
      index = int(os.environ["JAX_PROCESS_ID"])
    except (KeyError, ValueError):
      raise UserError(
        "JAX_COORDINATOR_ADDRESS is set, so JAX_NUM_PROCESSES and JAX_PROCESS_ID must be set to whole numbers"
      ) from None
    jax.distributed.initialize(num_processes=count, process_id=index, initialization_timeout=120)
