"""`gtpo doctor`: reports on this machine, on missing packages, and on how to install them."""

from __future__ import annotations

import glob
import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from gtpo_jax.rewards import sandbox_problem
from gtpo_jax.runtime.chips import host_memory
from gtpo_jax.runtime.cluster.launchers import find_launch
from gtpo_jax.runtime.errors import RunError, UserError, first_line
from gtpo_jax.runtime.installing import install_command
from gtpo_jax.runtime.startup import ACCELERATORS, cuda_extra, nvidia_driver

OPTIONAL = {  # distribution: (purpose, the extra of gtpo_jax that installs it)
  "libtpu": ("TPU chips, and gtpo plan for TPUs", "plan"),
  "jax-cuda13-plugin": ("NVIDIA GPUs, and gtpo plan for them", "cuda"),
  "datasets": ("hf:ID as a source of problems", "data"),
  "reasoning-gym": ("rg:NAME as a source of problems", "reasoning-gym"),
  "langdetect": ("languages in problems of kind constraints", "constraints"),
  "nltk": ("sentences in problems of kind constraints", "constraints"),
  "wandb": ("log.wandb", "wandb"),
  "trackio": ("log.trackio", "trackio"),
  "openai": ("a judge (reward.judge), agents (env.agent)", "judge"),
  "uvicorn": ("gtpo serve", "serve"),
  "starlette": ("gtpo serve", "serve"),
  "torch": ("parity tests", "dev"),
  "mkdocs-material": ("make docs", "docs"),
}


def examine(program: str = "gtpo") -> int:
  """Prints the report. Returns 0 if `gtpo train` can run, and 1 otherwise.

  Args:
    program: the command that starts gtpo here.
  """
  _print_machine()
  launch_ok = _print_launcher()  # on a TPU host, JAX may wait for the other hosts
  packages_ok = _print_packages()
  if not _print_devices():
    return 1
  _print_compiler()
  if not launch_ok:
    print("not ready: change what the line launcher names")
  elif packages_ok:
    print(f"ready: {program} train --config=tiny --workdir=runs/tiny")
  else:
    print("not ready: run the pip commands above")
  return 0 if packages_ok and launch_ok else 1


def _line(name: str, value: str) -> None:
  print(f"{name:<20} {value}")


def _print_machine() -> None:
  import gtpo_jax

  can_count = hasattr(os, "sched_getaffinity")
  cores = len(os.sched_getaffinity(0)) if can_count else os.cpu_count()
  _line("gtpo_jax", gtpo_jax.__version__)
  _line("python", f"{platform.python_version()} on {platform.platform()}")
  _line("processor", f"{cores} cores")
  try:
    memory = f"{host_memory() / 2**30:.1f} GiB"
  except (ValueError, OSError, AttributeError):
    memory = "unknown"
  _line("memory", memory)
  _line("disk here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free")


def _print_packages() -> bool:
  """Prints packages and sandbox. Returns whether all required packages have a valid version."""
  all_fit = True
  for package, version, command in _required():
    all_fit &= not command
    _line(package, f"{version}: {command}" if command else version)
  problem = sandbox_problem()
  works = "works: programs can be scored"
  _line("sandbox", f"none, so programs cannot be scored: {problem}" if problem else works)
  for package, (purpose, extra) in OPTIONAL.items():
    missing = f"not installed; for {purpose}: {install_command(extra)}"
    _line(package, _version(package) or missing)
  return all_fit


def _print_devices() -> bool:
  """Prints the devices that JAX finds. Returns whether JAX starts."""
  try:
    import jax

    devices = jax.devices()
  except Exception as error:  # the report must explain any failure
    _line("devices", f"JAX does not start: {first_line(error)}")
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
      print(
        f"not ready: the platform of JAX_PLATFORMS={platforms} is not available here; "
        f"unset it, or set it to cpu"
      )
    else:
      print("not ready: fix the problem in the line above, or set JAX_PLATFORMS=cpu")
    return False
  backend = jax.default_backend()
  processes = jax.process_count()
  _line(
    "devices", f"{len(devices)} x {devices[0].device_kind} ({backend}), {processes} process(es)"
  )
  if version := nvidia_driver():
    _line("NVIDIA driver", f"{version}: {install_command(cuda_extra())}")
  for accelerator, (device_files, extra, _) in ACCELERATORS.items():
    if extra == "cuda":
      extra = cuda_extra()
    if backend == "cpu" and glob.glob(device_files):
      _line(
        "",
        f"this machine has {accelerator}, but JAX does not use it: "
        f"{install_command(extra)}, and leave JAX_PLATFORMS unset",
      )
  stats = devices[0].memory_stats() or {}
  if "bytes_limit" in stats:
    _line("device memory", f"{stats['bytes_limit'] / 2**30:.1f} GiB each")
  return True


def _print_launcher() -> bool:
  """Prints which launcher started this process as one of several, and what joining them needs.

  Returns whether the launcher's variables agree.
  """
  try:
    launch = find_launch()
  except (UserError, RunError) as error:
    _line("launcher", str(error))
    return False
  if launch:
    _line("launcher", f"{launch}; gtpo train, eval and export join the others, doctor does not")
  if launch and launch.count > 1:
    _line("to join", launch.advice())
  return True


def _print_compiler() -> None:
  import jax

  began = time.perf_counter()
  x = jax.numpy.ones((1024, 1024))
  jax.block_until_ready(jax.jit(lambda x: x @ x)(x))
  _line("matrix product", f"compiled and run in {time.perf_counter() - began:.2f} s")
  cache = jax.config.jax_compilation_cache_dir
  writable = _writable(Path(cache)) if cache else False
  advice = " (not writable: set JAX_COMPILATION_CACHE_DIR; every start compiles from scratch)"
  _line("compile cache", f"{cache}{'' if writable else advice}")


def _required() -> Iterator[tuple[str, str, str]]:
  """Yields (name, version, install command) of each required package.

  The command is empty if the installed version is in the required range.
  """
  try:
    requirements = importlib.metadata.requires("gtpo_jax") or []
  except importlib.metadata.PackageNotFoundError:
    yield "packages", "not checked, because gtpo_jax runs from a source tree", ""
    return
  for requirement in map(Requirement, requirements):
    if requirement.marker is None:  # the requirements of extras have a marker
      version = _version(requirement.name)
      fits = version is not None and requirement.specifier.contains(version, prereleases=True)
      yield requirement.name, version or "MISSING", "" if fits else f"pip install '{requirement}'"


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _writable(folder: Path) -> bool:
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      return True
  except OSError:
    return False
