"""Every verifier takes linear time on what a collapsed policy writes: 100,000 repeated characters.

The checks run in a process that the kernel ends when one of them takes seconds of CPU time. At this
length, one that takes quadratic time needs many times as long.
"""

import functools
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_constraints import CASES, needs_packages, row
from test_verify import CASES as KINDS

from gtpo_jax.rewards import PARTS, VERIFIERS, VOTES, truth_marks
from gtpo_jax.rewards.code import humaneval
from gtpo_jax.rewards.constraints.instruction_verdicts import followed
from gtpo_jax.rewards.constraints.instructions import INSTRUCTIONS, Instruction
from gtpo_jax.rewards.gym.scores import answer_of
from gtpo_jax.rewards.verifiers import Options

CHARS = 100_000
LIMIT_S = 5.0  # of CPU time; a check takes milliseconds, those with NLTK up to a second
USUAL = ["\n", " ", "[", "<", "\n* "]
FURTHER = """
A. |? |! |answer |\\boxed{|**B|1,|
x|1|*|-|\\|{|}|]|(|)|<<|>|$|"|'|.|=|中|１|(B)|B) |P.S.|p. |#### |answer: |Answer:\n|\\boxed |
\\frac{|\\frac{1}{2}|\\text{|\\left(|sqrt(|^{|1+|1/|\\cup|<answer>|</answer>|<think>|def f|\r\n|
\t|\u3000|a@|http://
"""
PAIRS = [("(", ")"), ("{", "}"), ("[", "]"), ("<<", ">>"), ("\\boxed{", "}"), ("\\frac{", "}{1}")]


def texts(further):
  units = [*USUAL, *FURTHER.strip("\n").replace("|\n", "|").split("|")] if further else USUAL
  for unit in units:
    yield unit * (CHARS // len(unit))
    if further:
      yield f"Answer: {unit}" + " " * CHARS + unit
      yield f"\\boxed{{{unit * (900 // len(unit))}}}"
  for opening, closing in PAIRS if further else ():
    for depth in (1000, CHARS // 10):
      yield opening * depth + "1" + closing * depth
      yield f"Answer: {opening * depth}1{closing * depth}"
  yield "```" + "\t" * CHARS


def verify(kind, text):
  answer, extra, *_ = KINDS[kind]
  return VERIFIERS[kind]([text], [answer], [extra], Options())


def checks(further):
  """Yields names and functions of a text; of verifiers with processes, what runs before these."""
  for kind in VERIFIERS:
    if kind not in ("code", "reasoning_gym"):
      yield kind, functools.partial(verify, kind)
  yield "code", lambda text: humaneval(text, "def f():\n", "", "f")
  for mode in ("tag", "boxed", "line"):
    yield f"reasoning_gym, {mode}", lambda text, mode=mode: answer_of(text, mode)
  for name, kwargs, *_ in CASES:
    quick = INSTRUCTIONS[name].require is Instruction._field_defaults["require"]
    if quick or (further and not needs_packages(name)):
      extra = row(name, **kwargs)
      yield name, lambda text, extra=extra: followed(text, extra)
  for name, vote in VOTES.items():
    yield f"vote {name}", vote
  for name, part in PARTS.items():
    yield f"part {name}", lambda text, part=part: part([""], [text], [""], [{}])
  steps = {"truth": [["a", "1"], ["1", "2"]]}
  yield "truth", lambda text: truth_marks("math", "q", text, "1", steps)


def run_all(further):
  for text in texts(further):
    for name, check in checks(further):
      print(f"{name} of {text[:20]!r} and so on", flush=True)
      signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # its signal ends a process
      check(text)
  signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.mark.parametrize("further", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_verifier_takes_quadratic_time(further):
  code = f"import test_degenerate\ntest_degenerate.run_all({further})"
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=Path(__file__).parent,
    capture_output=True,
    text=True,
    env={"PYTHONPATH": ":".join(sys.path)},
    timeout=1800,
  )
  assert done.returncode == 0, (done.stdout[-200:], done.stderr[-2000:])
