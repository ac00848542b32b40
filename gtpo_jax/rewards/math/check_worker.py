"""The worker process of `worker_pool.py`: reads checks from stdin and writes verdicts.

    python -P check_worker.py PARENT_PID MEMORY_MB CHECK SYS_PATH_AS_JSON

It imports the standard library and the check, but nothing from gtpo_jax, so it starts without JAX.
A request is one line, [gold, answer, limit in seconds] as JSON. A reply is one line: 1, 0, ? or a
float with a point.
The first line written is "ready", or the reason why the check cannot be imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Callable

# The worker ends itself this many seconds after the limit, in case no parent is left to kill it.
GRACE_S = 1.0
PARENT_POLL_S = 1.0  # seconds between checks that the parent is alive
READ_BYTES = 65_536
MAX_ERROR_BYTES = 1000
NUMBER_DIGITS = 30
RELATIVE_ERROR = 1e-5  # of an answer that is written with six digits


def equal_by_math_verify(gold: str, answer: str) -> bool | None:
  """Returns whether math-verify finds two LaTeX expressions equivalent.

  Numbers must also be nearly equal relatively, and equations may be multiples of each other. An
  answer that math-verify cannot parse is wrong. If it cannot parse the gold answer, nothing is
  compared and the result is None. The time limits of math-verify are disabled, because they raise
  in threads, do not interrupt C code, and report a timeout as a wrong answer.

  Source: github.com/huggingface/Math-Verify.
  """
  from math_verify import LatexExtractionConfig, parse, verify

  def read(text: str) -> list:
    return parse(
      f"${text}$",
      [LatexExtractionConfig()],
      fallback_mode="no_fallback",
      parsing_timeout=None,
      raise_on_error=True,
    )

  target = read(gold)
  if not target:
    return None
  given = read(answer)
  if verify(target, given, timeout_seconds=None, raise_on_error=True):
    return not given or _same_size(target[0], given[0])
  return bool(given) and _same_equation(target[0], given[0])


def _same_size(a: object, b: object) -> bool:
  """Whether two numbers are nearly equal, relatively; math-verify rounds them to six decimals.

  Anything but numbers is the same, as math-verify says.
  """
  from sympy import Expr

  are_numbers = all(isinstance(x, Expr) and x.is_number for x in (a, b))
  if not are_numbers or a == b:
    return True
  (x, y) = (expression.evalf(NUMBER_DIGITS) for expression in (a, b))
  if not (x.is_comparable and y.is_comparable):
    return True
  return bool(abs(x - y) <= RELATIVE_ERROR * max(abs(x), abs(y)))


def _same_equation(a: object, b: object) -> bool:
  """Whether an equation is a multiple of another, as 2x - y + 3 = 0 is of y = 2x + 3."""
  from sympy import Eq, cancel

  if not (isinstance(a, Eq) and isinstance(b, Eq)):
    return False
  (one, other) = (equation.lhs - equation.rhs for equation in (a, b))
  if not other.free_symbols:
    return False
  ratio = cancel(one / other)
  return bool(ratio.is_number and ratio.is_nonzero)


def _load(name: str) -> Callable[[str, str], bool | float | None]:
  if name:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)
  equal_by_math_verify("\\sqrt{8}+x", "x+2\\sqrt{2}")  # builds the parser's tables
  return equal_by_math_verify


def _listen(parent: int, requests: queue.SimpleQueue) -> None:
  """Adds the lines of stdin to `requests`, and ends this process when its parent dies.

  The parent's death is noticed by the end of stdin or, if a fork of the parent keeps the pipe open,
  by a different parent id.
  """
  buffer = b""
  while True:
    if select.select([0], [], [], PARENT_POLL_S)[0]:
      data = os.read(0, READ_BYTES)
      if not data:
        os._exit(0)
      *lines, buffer = (buffer + data).split(b"\n")
      for line in lines:
        requests.put(line)
    elif os.getppid() != parent:
      os._exit(0)


def _serve(parent: int, memory_mb: int, check_name: str, path: list[str]) -> None:
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.pthread_sigmask(signal.SIG_SETMASK, [])
  replies = os.dup(1)
  os.dup2(2, 1)  # text that a library prints must not be read as a verdict
  sys.path[:] = path
  requests: queue.SimpleQueue = queue.SimpleQueue()
  threading.Thread(target=_listen, args=(parent, requests), daemon=True).start()
  try:
    check = _load(check_name)
  except Exception as error:
    reason = f"{type(error).__name__}: {error}".replace("\n", " ").encode(errors="replace")
    os.write(replies, reason[:MAX_ERROR_BYTES] + b"\n")
    return
  with contextlib.suppress(ImportError, ValueError, OSError):  # on a system without this limit
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20,) * 2)
  os.write(replies, b"ready\n")
  while True:
    gold, answer, limit_s = json.loads(requests.get())
    # The kernel's timer ends the process even if C code holds the GIL.
    signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)
    try:
      verdict = check(gold, answer)
    except Exception:
      verdict = None
    signal.setitimer(signal.ITIMER_REAL, 0)
    of_number = repr(verdict) if isinstance(verdict, float) else str(int(bool(verdict)))
    reply = "?" if verdict is None else of_number
    os.write(replies, f"{reply}\n".encode())


if __name__ == "__main__":
  _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
