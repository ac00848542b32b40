"""Messages about missing packages, with pip commands. They do not name gtpo_jax itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from packaging.requirements import Requirement

from gtpo_jax.runtime.errors import UserError

LISTED = 4  # packages of an extra that are listed one by one


class MissingPackage(UserError):
  """Raised when an optional package is missing. No row of a file is to blame."""


def require_package(module: str, what: str, extra: str, package: str = "") -> None:
  """Checks that an optional package is installed, without importing it.

  Args:
    module: its top-level module.
    what: what needs it, the subject of the message.
    extra: the extra of gtpo_jax that installs it.
    package: the name of the package, if it differs from the module's.
  """
  if importlib.util.find_spec(module) is None:
    raise MissingPackage(f"{what} needs {package or module}: {install_command(extra)}")


def install_command(extra: str) -> str:
  """Returns the pip command that installs what an extra of gtpo_jax adds.

  It lists the packages themselves, unless they are many, so it works however gtpo_jax is installed.
  """
  try:
    lines = importlib.metadata.requires("gtpo_jax") or []
  except importlib.metadata.PackageNotFoundError:  # a source tree
    lines = []
  wanted = [requirement for requirement in map(Requirement, lines) if _adds(extra, requirement)]
  for requirement in wanted:
    requirement.marker = None
  if not 0 < len(wanted) <= LISTED:
    return f"in a clone, pip install -e '.[{extra}]'"
  return "pip install " + " ".join(f"'{requirement}'" for requirement in wanted)


def _adds(extra: str, requirement: Requirement) -> bool:
  marker = requirement.marker
  return bool(marker) and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
