"""What must be settled before JAX starts. Importing this imports no JAX."""
from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def prepare_jax() -> None:
  """Keeps JAX from looking for TPU chips that are not here, and gives it a compile cache. Call it before JAX is imported.

  `JAX_PLATFORMS` and `JAX_COMPILATION_CACHE_DIR` are left alone where they are set.
  """
  chips = any(Path(path).exists() for path in ("/dev/accel0", "/dev/vfio"))
  gpu_plugin = any(importlib.util.find_spec(f"jax_{kind}_plugin") for kind in ("cuda12", "cuda13", "rocm7", "rocm60"))
  if importlib.util.find_spec("libtpu") and not chips and not gpu_plugin:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  import jax
  if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(home / "gtpo_jax" / "xla"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
