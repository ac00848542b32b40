"""Whether a program is right: HumanEval, MBPP, stdin-and-stdout tests. The program is hostile text; the tests are the dataset's.

How the two meet in a sandbox, and what a program can and cannot do there, is in inside.py. Exit codes and printed text mean nothing.
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

from gtpo_jax.rewards import inside
from gtpo_jax.rewards.sandbox import Ended, run_inside

OUTPUT_KEPT = 16384  # characters of a program's output in a verdict
STOPS = (
  "\nclass ",
  "\ndef ",
  "\n#",
  "\nif ",
  "\nprint(",
  "\n```",
)  # of a bare continuation, as in the HumanEval paper


@dataclass(frozen=True)
class CodeVerdict:
  """What became of a program."""

  passed: bool | None  # None: no verdict could be reached, through no fault of the program
  reason: str  # passed, failed, error, timeout, memory, output or no verdict; then ": " and the first line of what was raised
  output: str = ""  # stdout then stderr, at most OUTPUT_KEPT characters


def run_code(
  program: str,
  tests: str,
  timeout_s: float = 5,
  memory_mb: int = 512,
  *,
  allow_unsandboxed: bool = False,
) -> CodeVerdict:
  """Runs `program`, then `tests` against it, in a sandbox.

  Args:
    program: any text. It is executed as a module that is not `__main__`.
    tests: Python that raises where the program is wrong. It sees the program's names, and the program itself as `__program__`.
    timeout_s: wall-clock seconds for both together.
    memory_mb: MiB of memory for both together.
    allow_unsandboxed: DANGEROUS: where there is no sandbox, run the program as this user with this machine's files and network.

  Returns:
    The verdict; it never raises for anything that the program does. UserError where there is no sandbox and none was waived.
  """
  secret = secrets.token_hex(16)
  ended = _attempt(
    (program, True), marshal.dumps((secret, tests)), b"", timeout_s, memory_mb, allow_unsandboxed
  )
  return _verdict(ended, secret) if isinstance(ended, Ended) else ended


def run_stdin(
  program: str,
  stdin: str,
  expected: str,
  timeout_s: float = 5,
  memory_mb: int = 512,
  *,
  allow_unsandboxed: bool = False,
) -> CodeVerdict:
  """Runs `program` as `__main__` on `stdin`; passed if it ends well and its stdout is `expected`, spaces at line ends aside.

  Arguments and errors as for run_code. The comparison happens out here: what is printed is the answer.
  """
  secret = secrets.token_hex(16)
  text = stdin.encode("utf-8", "replace")
  ended = _attempt(
    (program, False), marshal.dumps((secret, "")), text, timeout_s, memory_mb, allow_unsandboxed
  )
  verdict = _verdict(ended, secret) if isinstance(ended, Ended) else ended
  if (
    verdict.reason.startswith("error")
    and isinstance(ended, Ended)
    and (said := ended.err.decode("utf-8", "replace").strip())
  ):
    last = said.splitlines()[-1][:300]
    return CodeVerdict(
      False, f"{'memory' if last.startswith('MemoryError') else 'error'}: {last}", verdict.output
    )
  if verdict.passed and _lines(ended.out.decode("utf-8", "replace")) != _lines(expected):
    return CodeVerdict(False, "failed: stdout is not what was expected", verdict.output)
  return verdict


def _lines(text: str) -> list[str]:
  return [line.strip() for line in text.strip().splitlines()]


def _attempt(
  public: tuple, private: bytes, stdin: bytes, timeout_s: float, memory_mb: int, allow: bool
) -> Ended | CodeVerdict:
  try:
    return run_inside(
      _inside(),
      public,
      private,
      stdin=stdin,
      timeout_s=timeout_s,
      memory_mb=memory_mb,
      allow_unsandboxed=allow,
    )
  except OSError as error:  # no process, no pipe, no room: this machine's trouble
    return CodeVerdict(None, f"no verdict: {error}")


def _verdict(ended: Ended, secret: str) -> CodeVerdict:
  """What the judge has reported; a judge that was silenced after its start was silenced by the program."""
  output = (ended.out[:OUTPUT_KEPT] + ended.err[:OUTPUT_KEPT]).decode("utf-8", "replace")[
    :OUTPUT_KEPT
  ]
  report = ended.report.decode("utf-8", "replace")
  if ended.how == "start":
    return CodeVerdict(
      None, f"no verdict: the sandbox did not start: {output.strip().splitlines()[-1:]}"[:300]
    )
  if report.startswith(secret) and report.endswith("\n"):
    word = report.removeprefix(secret)[:-1]
    return CodeVerdict(
      {"passed": True, "no verdict": None}.get(word.partition(":")[0], False), word, output
    )
  return CodeVerdict(
    False, ended.how if ended.how != "report" else "error: the program stopped its judge", output
  )


def code_correct(
  completion: str,
  extra: Mapping[str, Any],
  timeout_s: float = 5,
  memory_mb: int = 512,
  *,
  allow_unsandboxed: bool = False,
) -> bool | None:
  """Whether a completion solves a problem, by the tests in `extra`, whose keys say which kind it is.

  Args:
    completion: text with a fenced block of Python, of which the last counts, or bare code.
    extra: HumanEval: prompt, test, entry_point. MBPP: test_list (lines of asserts), optionally test_setup_code or test_imports.
      LiveCodeBench, APPS, TACO: input_output, a mapping or its JSON: inputs, outputs, and fn_name where a function is called.
    timeout_s: wall-clock seconds for each run: one for HumanEval, MBPP and fn_name, one for each input otherwise.
    memory_mb: MiB.
    allow_unsandboxed: see run_code.

  Returns:
    The verdict, None where none was reached. UserError where there is no sandbox; ValueError for an `extra` of no known kind.
  """
  limits = {"timeout_s": timeout_s, "memory_mb": memory_mb, "allow_unsandboxed": allow_unsandboxed}
  if "entry_point" in extra:
    return run_code(
      *humaneval(completion, extra["prompt"], extra["test"], extra["entry_point"]), **limits
    ).passed
  if "test_list" in extra:
    lines = [
      extra.get("test_setup_code") or "",
      *(extra.get("test_imports") or ()),
      *extra["test_list"],
    ]
    return run_code(program_of(completion), "\n".join(lines), **limits).passed
  if "input_output" in extra:
    cases = extra["input_output"]
    cases = json.loads(cases) if isinstance(cases, str) else cases
    if cases.get("fn_name"):
      return run_code(program_of(completion), _calls(cases), **limits).passed
    for stdin, expected in zip(cases["inputs"], cases["outputs"], strict=True):
      verdict = run_stdin(program_of(completion), _text(stdin), _text(expected), **limits)
      if not verdict.passed:
        return verdict.passed
    return True
  raise ValueError(f"extra must have entry_point, test_list or input_output, got {sorted(extra)}")


def _text(lines: str | Sequence[str]) -> str:
  return lines if isinstance(lines, str) else "\n".join(lines)


def _calls(cases: Mapping[str, Any]) -> str:
  """Asserts for a function, or for a method of Solution; an expected [x] may stand for x, and a tuple for a list."""
  return "\n".join(
    [
      "def plain(x): return [plain(y) for y in x] if isinstance(x, (list, tuple)) else x",
      f"candidate = getattr(Solution() if hasattr(__program__, 'Solution') else __program__, {cases['fn_name']!r})",
      *(
        f"result = plain(candidate(*{list(given)!r})); expected = {wanted!r}\n"
        "assert result == expected or [result] == expected"
        for given, wanted in zip(cases["inputs"], cases["outputs"], strict=True)
      ),
    ]
  )


def program_of(completion: str) -> str:
  """The last fenced block (one that was cut off runs to the end), or the whole text where there is none."""
  blocks = re.findall(
    r"(?ms)^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", completion
  )
  return blocks[-1] if blocks else completion


def humaneval(completion: str, prompt: str, test: str, entry_point: str) -> tuple[str, str]:
  """(program, tests) of a HumanEval problem; helpers of the prompt, such as poly, come to the tests from the prompt itself."""
  program = program_of(completion)
  if re.search(rf"(?m)^(?:async )?def {re.escape(entry_point)}\b", program):
    program = f"{prompt}\n\n{program}"  # the whole function again, as chat models answer
  else:
    cut = min((place for stop in STOPS if (place := program.find(stop)) >= 0), default=len(program))
    program = prompt + program[:cut]
  return (
    program,
    f"{prompt}\n\n{entry_point} = __program__.{entry_point}\n\n{test}\n\ncheck({entry_point})\n",
  )


@functools.cache
def _inside() -> bytes:
  """What runs in the sandbox is the text of a module: nothing of the project is there to import."""
  return marshal.dumps(compile(inspect.getsource(inside), "<judge>", "exec", dont_inherit=True))
