"""A tool that runs Python in the sandbox."""

from __future__ import annotations

from collections.abc import Callable

from gtpo_jax.rewards.code import run_stdin
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.sandbox.bubblewrap import sandbox_problem


def python_tool(
  timeout_s: float = 5, memory_mb: int = 512, *, allow_unsandboxed: bool = False
) -> Callable[[str], str]:
  """Returns a tool `python(code)` that runs a program and returns what it prints.

  Each call starts anew: variables and files of earlier calls are gone.

  Args:
    timeout_s: wall-clock seconds for a program.
    memory_mb: MiB of memory for a program.
    allow_unsandboxed: DANGEROUS. If no sandbox is available, run programs as this user, with this
      machine's files and network.

  Raises:
    UserError: no sandbox is available, and allow_unsandboxed is not set.
  """
  if not allow_unsandboxed and (problem := sandbox_problem()):
    raise UserError(f"python_tool needs a sandbox, and there is none here: {problem}")

  def python(code: str) -> str:
    """Runs a Python program in a sandbox, and returns what it prints.

    Args:
      code: The program. Print what you want to see.
    """
    verdict = run_stdin(code, "", "", timeout_s, memory_mb, allow_unsandboxed=allow_unsandboxed)
    if verdict.passed is None:
      raise RuntimeError(verdict.reason)
    kind = verdict.reason.partition(":")[0]
    limits = {
      "timeout": f"it took longer than {timeout_s:g} s",
      "memory": f"it needed more than {memory_mb} MiB",
      "output": "it printed too much",
    }
    if kind in limits:
      return f"{verdict.output}\nError: {limits[kind]}".lstrip()
    return verdict.output

  return python
