"""`gtpo doctor`: what machine this is, what works, what is missing and how to get it."""

from __future__ import annotations

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
from gtpo_jax.runtime.errors import first_line

OPTIONAL = {  # distribution: what it is for, and the extra that brings it
  "libtpu": ("TPU chips, and gtpo plan for TPUs", "plan"),
  "jax-cuda13-plugin": ("NVIDIA GPUs", "cuda"),
  "datasets": ("hf:ID as a source of problems", "data"),
  "wandb": ("log.wandb", "wandb"),
  "torch": ("parity tests", "dev"),
  "mkdocs-material": ("make docs", "docs"),
}
CHIPS = {"an NVIDIA GPU": ("/dev/nvidia0", "cuda"), "a TPU": ("/dev/accel0", "tpu")}


def examine() -> int:
  """Prints the report; returns 0 where the main job can run, else 1."""
  import gtpo_jax

  good = True

  def line(name: str, value: str) -> None:
    print(f"{name:<20} {value}")

  line("gtpo_jax", gtpo_jax.__version__)
  line("python", f"{platform.python_version()} on {platform.platform()}")
  line(
    "processor",
    f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores",
  )
  line("memory", _memory())
  line("disk here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free")
  for package, found, advice in _required():
    good &= not advice
    line(package, found + (f": {advice}" if advice else ""))
  missing = sandbox_problem()
  line(
    "sandbox",
    f"none, so that no programs can be judged: {missing}"
    if missing
    else "works: programs can be judged",
  )
  for package, (purpose, extra) in OPTIONAL.items():
    line(package, _version(package) or f"not installed; for {purpose}: {_install(extra)}")
  try:
    import jax

    devices = jax.devices()
  except Exception as error:  # the very thing that this report is for
    line("devices", f"JAX does not start: {first_line(error)}")
    named = os.environ.get("JAX_PLATFORMS")
    print(
      "not ready: "
      + (
        f"JAX_PLATFORMS={named} names what is not here; unset it, or set it to cpu"
        if named
        else "mend what the line above says, or set JAX_PLATFORMS=cpu"
      )
    )
    return 1
  line(
    "devices",
    f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()}), {jax.process_count()} process(es)",
  )
  for chip, (place, extra) in CHIPS.items():
    if jax.default_backend() == "cpu" and Path(place).exists():
      line(
        "",
        f"{chip} is here, and JAX does not use it: {_install(extra)}, and leave JAX_PLATFORMS unset",
      )
  for device in devices[:1]:
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
      line("device memory", f"{stats['bytes_limit'] / 2**30:.1f} GiB each")
  began = time.perf_counter()
  x = jax.numpy.ones((1024, 1024))
  jax.block_until_ready(jax.jit(lambda x: x @ x)(x))
  line("matrix product", f"compiled and run in {time.perf_counter() - began:.2f} s")
  cache = jax.config.jax_compilation_cache_dir
  writable = _writable(Path(cache)) if cache else False
  line(
    "compile cache",
    f"{cache}{'' if writable else ' (not writable: set JAX_COMPILATION_CACHE_DIR; every start compiles anew)'}",
  )
  print(
    "ready: gtpo train --config=configs/tiny.py --workdir=runs/tiny"
    if good
    else "not ready: give the pip commands above"
  )
  return 0 if good else 1


def _required() -> Iterator[tuple[str, str, str]]:
  """What the package cannot do without: name, the version that is here, and what to do where it will not do ("" where it does)."""
  try:
    needed = importlib.metadata.requires("gtpo_jax") or []
  except importlib.metadata.PackageNotFoundError:
    yield "packages", "not checked, for gtpo_jax runs from a source tree", ""
    return
  for requirement in map(Requirement, needed):
    if requirement.marker is None:  # those of extras have one
      version = _version(requirement.name)
      fits = version is not None and requirement.specifier.contains(version, prereleases=True)
      yield requirement.name, version or "MISSING", "" if fits else f"pip install '{requirement}'"


def _install(extra: str) -> str:
  return f"pip install 'gtpo_jax[{extra}]', or -e '.[{extra}]' in a clone"


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _memory() -> str:
  try:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  except (ValueError, OSError, AttributeError):
    return "unknown"
  return f"{total / 2**30:.1f} GiB"


def _writable(folder: Path) -> bool:
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      return True
  except OSError:
    return False
