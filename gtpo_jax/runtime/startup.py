"""The settings that gtpo_jax makes for its whole process, and why. Importing this imports no JAX.

They are made by two calls, and by nothing else:

- `prepare_jax`, before JAX is first imported: JAX's platform, its share of a GPU's memory, the
  threads of XLA's virtual CPU devices and the compile cache; and `prepare_libraries`: which loggers
  are silent, what tokenizers may print and start, which late errors of Orbax are not printed, and
  that `epath` accepts files of users without a name.
- `prepare_devices`, once the processes have joined and before the first program: whether programs
  may be read from the compile cache.

`gtpo` makes both calls, and `place_compile_cache` for the cache of a run. From Python, using a name
of `gtpo_jax` makes the first and `gtpo_jax.train` the second. Packages that take long to import
are set up where they are first needed: `data.chat.load_chat` silences transformers,
`storage.paths.storage_path` lets fsspec keep no listings of folders, `planning.topology` tells
libtpu that there are no chips, and `data.tfds_tasks` provides a module that TFDS needs.
"""

from __future__ import annotations

import glob
import importlib.util
import logging
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

from gtpo_jax.runtime.chips import GPU_MEMORY_FRACTION
from gtpo_jax.runtime.cluster.launchers import NVIDIA_DEVICE_FILES, has_tpu
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.installing import install_command

OTHER_GPU_DEVICE_FILES = ("/dev/dxg", "/dev/kfd")  # of Windows' Linux (WSL 2), and of AMD
ACCELERATORS = {  # name: (pattern of its device files, the extra of gtpo_jax, JAX's platform)
  "an NVIDIA GPU": (NVIDIA_DEVICE_FILES, "cuda", "cuda"),
  "a TPU": ("/dev/accel[0-9]*", "tpu", "tpu"),
}
CUDA_CHECKS_VARIABLE = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
NVIDIA_DRIVER_FILE = "/proc/driver/nvidia/version"
CUDA_13_DRIVER = 580  # the oldest that runs it; older ones run CUDA 12
CACHE_FOLDER = "compile_cache"  # in the workdir
MIN_COMPILE_TIME_S = 0.2  # programs that compile faster are not cached
THREADS_PER_CPU_DEVICE = 32
# Set the share of a GPU's memory that JAX takes. The second is deprecated, and JAX refuses to start
# if both are set.
GPU_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# Loggers that show less than they would by themselves.
QUIET_LOGGERS = {
  # They would disturb the display. Orbax's failures are raised too.
  **dict.fromkeys(("absl", "orbax", "asyncio"), logging.CRITICAL),
  # They log each request to a judge; the package openai uses one or the other.
  **dict.fromkeys(("httpx", "httpx2"), logging.WARNING),
  "matplotlib": logging.ERROR,  # it warns of a HOME that is read-only
  # They log a traceback for each error of an object store that they raise as well.
  **dict.fromkeys(("gcsfs", "s3fs", "adlfs"), logging.CRITICAL),
}
LIBRARY_VARIABLES = {  # unless the user has set them
  "TOKENIZERS_PARALLELISM": "false",  # threads of its own, which would not survive a fork
  "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
CLOSED_LOOP = "Event loop is closed"


def prepare_jax() -> None:
  """Configures libraries, platform, memory and compile cache. Call it before JAX is imported.

  Without this, JAX looks for TPU chips on every machine that has `libtpu` installed. Existing
  values of `JAX_PLATFORMS`, `XLA_CLIENT_MEM_FRACTION`, `JAX_COMPILATION_CACHE_DIR` and
  `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS` are left unchanged, and so are the corresponding JAX
  options of the first three.
  """
  prepare_libraries()
  choose_platform()
  reserve_cpu_threads()
  choose_gpu_memory()
  skip_cuda_checks()
  import jax

  cache = jax.config.jax_compilation_cache_dir or _default_cache()
  if cache and "://" not in cache:
    cache = os.path.abspath(cache)  # a reward function may change the current folder
  jax.config.update("jax_compilation_cache_dir", cache)
  if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_TIME_S)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)  # no minimum


def prepare_devices() -> None:
  """Turns the compile cache off if programs will run on several CPU devices, of any process.

  Call it once JAX may start: all processes have joined, and nothing has been compiled. With jaxlib
  0.10.2 a program of several CPU devices that is read from the cache can deadlock: devices wait for
  one another in different collectives. A freshly compiled program does not. The cached program
  seems to have lost the order in which XLA makes devices start collectives. `make_mesh` refuses
  several CPU devices while the cache is in use (`reads_compile_cache`).
  """
  import jax

  devices = jax.devices()
  if len(devices) > 1 and devices[0].platform == "cpu":
    use_compile_cache(False)


def prepare_libraries() -> None:
  """Silences `QUIET_LOGGERS` and late errors of Orbax; lets `epath` describe all files.

  It sets each of `LIBRARY_VARIABLES` that is not set.
  """
  for name, value in LIBRARY_VARIABLES.items():
    os.environ.setdefault(name, value)
  for name, level in QUIET_LOGGERS.items():
    logging.getLogger(name).setLevel(level)
  _ignore_late_writes()
  _accept_unknown_owners()


def _ignore_late_writes() -> None:
  """Prints no traceback for writes of TensorStore that end after their save has failed.

  Orbax raises the error of the first write and closes its event loop. Every other write then fails
  to report to that loop.
  """
  show = sys.unraisablehook

  def show_others(unraisable: Any) -> None:
    if str(unraisable.exc_value) != CLOSED_LOOP:
      show(unraisable)

  if getattr(show, "__name__", "") != show_others.__name__:
    sys.unraisablehook = show_others


def _accept_unknown_owners() -> None:
  """Lets `epath` describe files whose owner or group has no name, by its number.

  Containers often run under such a user, and shared file systems hold files of such users; Orbax
  asks `epath` for descriptions. Without this change it raises KeyError
  (https://github.com/google/etils/issues/790).
  """
  from etils.epath import backend, stat_utils

  system = getattr(backend, "_OsPathBackend", None)
  named = getattr(system, "stat", None)
  if named is None or named.__name__ == "described":  # a later version of etils, or done already
    return

  def described(self: Any, path: Any) -> Any:
    try:
      return named(self, path)
    except KeyError:
      found = os.stat(path)
    return stat_utils.StatResult(
      is_directory=stat.S_ISDIR(found.st_mode),
      length=found.st_size,
      mtime=int(found.st_mtime),
      owner=str(found.st_uid),
      group=str(found.st_gid),
      mode=found.st_mode,
    )

  system.stat = described


def choose_platform() -> None:
  """Selects the CPU on a machine that has `libtpu` but no accelerator; see `prepare_jax`.

  An installed CUDA plugin is no sign of a GPU: it may be there for `gtpo plan`.
  """
  has_gpu = any(glob.glob(files) for files in (NVIDIA_DEVICE_FILES, *OTHER_GPU_DEVICE_FILES))
  if has_tpu() or has_gpu or not importlib.util.find_spec("libtpu"):
    return
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  if "jax" in sys.modules:  # a notebook may have imported it already
    import jax

    if not jax.config.jax_platforms:
      jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def choose_gpu_memory() -> None:
  """Sets the share of each GPU's memory that JAX takes, unless the user has."""
  if not any(os.environ.get(name) for name in GPU_MEMORY_VARIABLES):
    os.environ[GPU_MEMORY_VARIABLES[0]] = str(GPU_MEMORY_FRACTION)


def skip_cuda_checks() -> None:
  """Lets JAX's CUDA plugin start on a machine without a driver, where it only compiles plans.

  It asks CUDA's libraries for their versions when it starts, and cuPTI 13.5 does not answer without
  a driver. JAX then prints a traceback and has no GPU compiler.
  """
  if not os.path.exists(NVIDIA_DRIVER_FILE) and not glob.glob(NVIDIA_DEVICE_FILES):
    os.environ.setdefault(CUDA_CHECKS_VARIABLE, "1")


def _default_cache() -> str | None:
  """Returns the folder of this user's compile cache; None if nothing can be written there."""
  try:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "gtpo_jax" / "xla"
    folder.mkdir(parents=True, exist_ok=True)
  except (OSError, RuntimeError):  # a home that is read-only, or none
    return None
  return str(folder) if _is_writable(folder) else None


def _is_writable(folder: Path) -> bool:
  """Returns whether files can be created in a folder, which need not exist yet."""
  existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
  return os.access(existing, os.W_OK)


def place_compile_cache(workdir: str | os.PathLike[str]) -> None:
  """Moves the compile cache into the workdir if only that outlives the machine.

  This is so if the workdir is in an object store, or if the run has several processes: they share
  the workdir, and the first one writes the programs that all of them read when they restart. It is
  also moved if the user has no cache folder. `JAX_COMPILATION_CACHE_DIR` takes precedence.
  """
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  cache = jax.config.jax_compilation_cache_dir
  chosen = cache and cache != _default_cache()
  remote = "://" in str(workdir)
  if not chosen and (not cache or jax.process_count() > 1 or remote):
    if not remote and not _is_writable(Path(workdir).absolute()):
      return  # the run will refuse this workdir
    folder = f"{str(workdir).rstrip('/')}/{CACHE_FOLDER}"
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()  # JAX may have opened the other one


def refuse_cpu_fallback() -> None:
  """Refuses to run on the CPU of a machine with an accelerator, unless it was asked for.

  JAX itself only logs that it falls back to the CPU, and the run would take days.

  Raises:
    UserError: JAX does not use the accelerator, or does not start.
  """
  import jax

  try:
    backend = jax.default_backend()
  except RuntimeError as error:
    raise UserError(
      f"JAX does not start with JAX_PLATFORMS={jax.config.jax_platforms or ''!s} "
      f"({first_line(error)}); `gtpo doctor` shows what this machine has"
    ) from error
  if backend != "cpu" or jax.config.jax_platforms:
    return
  for name, (files, extra, platform) in ACCELERATORS.items():
    hidden = platform == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if platform == "cuda":
      extra = cuda_extra()
    if glob.glob(files) and not hidden:
      raise UserError(
        f"this machine has {name}, but JAX would use the CPU ({_start_failure(platform)}); "
        f"{install_command(extra)}, or set JAX_PLATFORMS=cpu to use the CPU"
      )


def cuda_extra() -> str:
  """Returns the extra of gtpo_jax that fits this machine's NVIDIA driver: cuda or cuda12."""
  version = nvidia_driver()
  return "cuda12" if version and version < CUDA_13_DRIVER else "cuda"


def nvidia_driver() -> int | None:
  """Returns the major version of this machine's NVIDIA driver; None if there is none."""
  try:
    text = Path(NVIDIA_DRIVER_FILE).read_text()
  except OSError:
    return None
  found = re.search(r"Kernel Module\b.*?\s(\d+)\.\d", text)
  return int(found[1]) if found else None


def _start_failure(platform: str) -> str:
  """Returns why JAX does not use a platform, in one line."""
  import jax

  try:
    jax.devices(platform)
  except RuntimeError as error:
    return first_line(error)
  return f"its default is {jax.default_backend()}"


def use_compile_cache(on: bool) -> None:
  """Turns JAX's compile cache on or off, even after programs were compiled."""
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  if jax.config.jax_enable_compilation_cache != on:
    jax.config.update("jax_enable_compilation_cache", on)
    # JAX decides only once whether it uses a cache; this makes it decide again.
    compilation_cache.reset_cache()


def reads_compile_cache() -> bool:
  """Whether JAX may read programs from a compile cache."""
  import jax

  return bool(jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir)


def reserve_cpu_threads() -> None:
  """Sets the size of XLA's thread pool for virtual CPU devices, which XLA reads at start-up.

  A device that waits in a collective occupies a thread, and by default the pool has one thread per
  CPU core. Devices may start independent collectives in different orders, several at a time; when
  all threads wait, the program deadlocks.
  """
  devices = os.environ.get("JAX_NUM_CPU_DEVICES", "1")
  if devices.isdigit() and int(devices) > 1:
    os.environ.setdefault("NPROC", str(THREADS_PER_CPU_DEVICE * int(devices)))
