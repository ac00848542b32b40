"""Pip commands for messages about missing packages. They do not name gtpo_jax itself."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement


def install_command(extra: str) -> str:
  """Returns the pip command that installs what an extra of gtpo_jax adds.

  It lists the packages themselves, so it works however gtpo_jax was installed.
  """
  try:
    lines = importlib.metadata.requires("gtpo_jax") or []
  except importlib.metadata.PackageNotFoundError:  # a source tree
    lines = []
  wanted = [requirement for requirement in map(Requirement, lines) if _adds(extra, requirement)]
  for requirement in wanted:
    requirement.marker = None
  if not wanted:
    return f"in a clone, pip install -e '.[{extra}]'"
  return "pip install " + " ".join(f"'{requirement}'" for requirement in wanted)


def _adds(extra: str, requirement: Requirement) -> bool:
  marker = requirement.marker
  return bool(marker) and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
