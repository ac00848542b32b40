"""Checks programs with unit tests (HumanEval, MBPP) or with expected outputs (APPS, TACO).

The program is untrusted; the tests come from the dataset. `inside.py` explains how the tests call
the program in a sandbox, and what the program can and cannot do there. A program that is called by
tests cannot pass them by its exit code or by what it prints.
"""

from __future__ import annotations

import functools
import inspect
import json
import marshal
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_jax.rewards.finding import after_thinking
from gtpo_jax.runtime.sandbox import inside
from gtpo_jax.runtime.sandbox.bubblewrap import run_inside
from gtpo_jax.runtime.sandbox.supervisor import RunResult

OUTPUT_KEPT = 16384  # maximum characters of a program's output in a verdict
REASON_KEPT = 300  # maximum characters of a reason in a verdict
# A completion that continues the prompt ends before the first of these: the stop sequences of the
# HumanEval paper (2107.03374), and a closing fence.
STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n```")


@dataclass(frozen=True)
class CodeVerdict:
  """The verdict on a program.

  Attributes:
    passed: whether the program passed; None if no verdict could be reached, through no fault of
      the program.
    reason: "passed", "failed", "error", "timeout", "memory", "output" (it printed too much) or
      "no verdict". Details can follow after ": ", such as the first line of an exception.
    output: stdout followed by stderr, at most OUTPUT_KEPT characters.
  """

  passed: bool | None
  reason: str
  output: str = ""


def run_code(
  program: str,
  tests: str,
  timeout_s: float = 5,
  memory_mb: int = 512,
  *,
  allow_unsandboxed: bool = False,
) -> CodeVerdict:
  """Runs `program`, then `tests` against it, in a sandbox.

  Returns a verdict whatever the program does: the program cannot make this function raise.

  Args:
    program: any text. It is executed as a module that is not `__main__`.
    tests: Python code that raises if the program is wrong. It can use the names that the program
      defines, and the program's module as `__program__`.
    timeout_s: wall-clock seconds for the program and the tests together.
    memory_mb: MiB of memory for the program and the tests together.
    allow_unsandboxed: DANGEROUS. If no sandbox is available, run the program as this user, with
      this machine's files and network.

  Raises:
    UserError: no sandbox is available, and allow_unsandboxed is not set.
  """
  limits = {"timeout_s": timeout_s, "memory_mb": memory_mb, "allow_unsandboxed": allow_unsandboxed}
  return _run(program, tests, None, limits)[0]


def run_stdin(
  program: str,
  stdin: str,
  expected: str,
  timeout_s: float = 5,
  memory_mb: int = 512,
  *,
  allow_unsandboxed: bool = False,
) -> CodeVerdict:
  """Runs `program` as `__main__` on `stdin`.

  The program passes if it ends normally and prints `expected`. Whitespace around the text and
  around each line is ignored. The comparison happens outside the sandbox, where the program cannot
  affect it. See `run_code` for the other arguments and the errors.
  """
  limits = {"timeout_s": timeout_s, "memory_mb": memory_mb, "allow_unsandboxed": allow_unsandboxed}
  verdict, result = _run(program, "", stdin, limits)
  stderr = result.stderr.decode("utf-8", "replace").strip() if result else ""
  if verdict.reason.startswith("error") and stderr:
    raised = stderr.splitlines()[-1][:REASON_KEPT]
    kind = "memory" if raised.startswith("MemoryError") else "error"
    return CodeVerdict(False, f"{kind}: {raised}", verdict.output)
  if verdict.passed and _lines(result.stdout.decode("utf-8", "replace")) != _lines(expected):
    return CodeVerdict(False, "failed: stdout is not what was expected", verdict.output)
  return verdict


def _lines(text: str) -> list[str]:
  """Returns the lines without spaces around them; other control characters are text."""
  return [line.strip(" \t\r") for line in text.strip(" \t\r\n").split("\n")]


def _run(
  program: str, tests: str, stdin: str | None, limits: dict[str, Any]
) -> tuple[CodeVerdict, RunResult | None]:
  """Runs a program under tests, or as `__main__` on `stdin`, and returns how the run ended too.

  A run that cannot start, for example because the disk is full, has no verdict.
  """
  secret = secrets.token_hex(16)
  private = marshal.dumps((secret, tests))
  data = (stdin or "").encode("utf-8", "replace")
  try:
    result = run_inside(_inside_code(), (program, stdin is None), private, stdin=data, **limits)
  except OSError as error:
    return CodeVerdict(None, f"no verdict: {error}"), None
  return _verdict(result, secret), result


def _verdict(result: RunResult, secret: str) -> CodeVerdict:
  """Converts the report of the judge, the process that runs the tests, to a verdict.

  If the judge started but sent no report, the program fails: either it exceeded a limit or it must
  have stopped the judge.
  """
  output = result.stdout[:OUTPUT_KEPT] + result.stderr[:OUTPUT_KEPT]
  output = output.decode("utf-8", "replace")[:OUTPUT_KEPT]
  report = result.report.decode("utf-8", "replace")
  if result.ended_by == "start":
    last_line = output.strip().splitlines()[-1:]
    reason = f"no verdict: the sandbox did not start: {last_line}"
    return CodeVerdict(None, reason[:REASON_KEPT])
  if report.startswith(secret) and report.endswith("\n"):
    reason = report.removeprefix(secret)[:-1]
    passed = {"passed": True, "no verdict": None}.get(reason.partition(":")[0], False)
    return CodeVerdict(passed, reason, output)
  if result.ended_by == "report":
    return CodeVerdict(False, "error: the program stopped its judge", output)
  return CodeVerdict(False, result.ended_by, output)


def code_correct(
  completion: str,
  extra: Mapping[str, Any],
  timeout_s: float = 5,
  memory_mb: int = 512,
  *,
  allow_unsandboxed: bool = False,
) -> bool | None:
  """Returns whether a completion passes the tests in `extra`.

  Args:
    completion: text whose last fenced code block after the thinking is the program, or the program
      alone.
    extra: the tests; the keys determine the format. HumanEval: prompt, test, entry_point. MBPP:
      test_list (lines of asserts), optionally test_setup_code or test_imports. LiveCodeBench, APPS,
      TACO: input_output, a mapping (or its JSON) with inputs and outputs, and with fn_name if the
      tests call a function.
    timeout_s: wall-clock seconds per run. Problems of HumanEval and MBPP and those with fn_name
      need a single run, all others one run per input.
    memory_mb: MiB of memory per run.
    allow_unsandboxed: see `run_code`.

  Returns:
    The verdict, or None if no verdict was reached.

  Raises:
    UserError: no sandbox is available, and allow_unsandboxed is not set.
    ValueError: `extra` has none of these formats.
  """
  completion = after_thinking(completion)
  limits = {"timeout_s": timeout_s, "memory_mb": memory_mb, "allow_unsandboxed": allow_unsandboxed}
  if "entry_point" in extra:
    parts = humaneval(completion, extra["prompt"], extra["test"], extra["entry_point"])
    return run_code(*parts, **limits).passed
  program = program_of(completion)
  if "test_list" in extra:
    setup = [extra.get("test_setup_code") or "", *(extra.get("test_imports") or ())]
    tests = "\n".join([*setup, *extra["test_list"]])
    return run_code(program, tests, **limits).passed
  if "input_output" in extra:
    cases = extra["input_output"]
    cases = json.loads(cases) if isinstance(cases, str) else cases
    if cases.get("fn_name"):
      return run_code(program, _function_tests(cases), **limits).passed
    for stdin, expected in zip(cases["inputs"], cases["outputs"], strict=True):
      verdict = run_stdin(program, _joined(stdin), _joined(expected), **limits)
      if not verdict.passed:
        return verdict.passed
    return True
  raise ValueError(f"extra must have entry_point, test_list or input_output, got {sorted(extra)}")


def _joined(lines: str | Sequence[str]) -> str:
  return lines if isinstance(lines, str) else "\n".join(lines)


def _function_tests(cases: Mapping[str, Any]) -> str:
  """Returns asserts that test a function, or a method of the class Solution.

  If [x] is expected, x is accepted too. A tuple equals a list with the same items.
  """
  name = repr(cases["fn_name"])
  lines = [
    "def plain(x): return [plain(y) for y in x] if isinstance(x, (list, tuple)) else x",
    "owner = Solution() if hasattr(__program__, 'Solution') else __program__",
    f"candidate = getattr(owner, {name})",
  ]
  for arguments, expected in zip(cases["inputs"], cases["outputs"], strict=True):
    call = f"candidate(*{list(arguments)!r})"
    lines.append(f"result = plain({call}); expected = {expected!r}")
    lines.append("assert result == expected or [result] == expected")
  return "\n".join(lines)


def program_of(completion: str) -> str:
  """Returns the last fenced block of a completion, or the entire text if there is none.

  A block without a closing fence runs to the end.
  """
  blocks = re.findall(
    r"(?ms)^[ \t]*+```[ \t]*+(?:python3?|py)?[ \t]*+\n(.*?)(?:^[ \t]*+```|\Z)", completion
  )
  return blocks[-1] if blocks else completion


def humaneval(completion: str, prompt: str, test: str, entry_point: str) -> tuple[str, str]:
  """Returns the program and the tests of a HumanEval problem.

  Some tests call a helper function that the prompt defines, such as `poly`. They contain their own
  copy of the prompt, so the program cannot replace the helper.
  """
  program = program_of(completion)
  if re.search(rf"(?m)^(?:async )?def {re.escape(entry_point)}\b", program):
    program = f"{prompt}\n\n{program}"  # chat models repeat the signature
  else:
    ends = [program.find(stop) for stop in STOPS]
    end = min((end for end in ends if end >= 0), default=len(program))
    program = prompt + program[:end]
  candidate = f"{entry_point} = __program__.{entry_point}"
  return program, f"{prompt}\n\n{candidate}\n\n{test}\n\ncheck({entry_point})\n"


@functools.cache
def _inside_code() -> bytes:
  """Returns the code that runs in the sandbox: `inside.py`, compiled from its source.

  The sandbox does not contain this package, so the code cannot be imported there.
  """
  return marshal.dumps(compile(inspect.getsource(inside), "<judge>", "exec", dont_inherit=True))
