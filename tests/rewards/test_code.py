"""Programs and their tests in the sandbox."""

import gzip
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_jax.rewards.code import code_correct, humaneval, program_of, run_code, run_stdin

HUMANEVAL = Path(__file__).parents[3] / "shared" / "data" / "HumanEval.jsonl.gz"

POINT = """
class Point:
  def __init__(self, x, y): self.x, self.y = x, y
  def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
  def times(self, k): return Point(self.x * k, self.y * k)
  def __len__(self): return 2
  def __iter__(self): return iter((self.x, self.y))
  def __getitem__(self, i): return (self.x, self.y)[i]
  def __str__(self): return f'<{self.x} {self.y}>'
  def key(self): return self.x
"""

PASS = {
  "a function": ("def f(x): return x + 1", "assert f(1) == 2"),
  "keywords": (
    "def f(a, *b, c=0, **d): return [a, b, c, d]",
    "assert f(1, 2, c=3, e=4) == [1, (2,), 3, {'e': 4}]",
  ),
  "text of all kinds": (
    "def f(x): return x + 'é\U0001f600\\0\\ud800'",
    "assert f('漢') == '漢é\U0001f600\\0\\ud800'",
  ),
  "all plain values": (
    "def f(x): return x",
    """
x = [None, True, 3, -10**40, 2.5, float('inf'), 1j, 'a', b'\\xff', bytearray(b'x')]
x += [(1,), {1}, frozenset([2]), {'k': [()]}, range(3), int]
assert f(x) == x and [type(a) for a in f(x)] == [type(a) for a in x]""",
  ),
  "values of the library": (
    """
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
def f():
  counts, lists = Counter('aab'), defaultdict(list, {1: [2]})
  return (Fraction(1, 3), Decimal('1.10'), counts, deque([1]), lists, OrderedDict(a=1),
          date(2024, 1, 2))
def g(): return namedtuple('Pair', 'a b')(1, 2)""",
    """
from fractions import Fraction
a, b, c, d, e, g1, h = f()
assert a == Fraction(1, 3) and a + 1 == Fraction(4, 3) and str(b) == '1.10'
assert c == {'a': 2, 'b': 1} and d[0] == 1
assert e == {1: [2]} and e[5] == [] and g1 == {'a': 1} and h.year == 2024
assert g() == (1, 2) and type(g()) is tuple and 2 in g()""",
  ),
  "arguments changed in place": (
    "def f(a, b, c): a.sort(); b.update(x=1); c.clear()",
    """
a, b, c = [3, 1, 2], {}, {1}
assert f(a, b, c) is None and a == [1, 2, 3] and b == {'x': 1} and c == set()""",
  ),
  "functions passed": (
    "def f(g, xs): return sorted(xs, key=g)",
    "assert f(lambda x: -x, [1, 3, 2]) == [3, 2, 1]",
  ),
  "built-in functions passed": (
    "def f(g, kind): return g([kind('1'), 2])",
    "assert f(sum, int) == 3",
  ),
  "functions returned": ("def f(n): return lambda x: x + n", "assert f(2)(3) == 5"),
  "generators": (
    "def f():\n  n = 0\n  while True:\n    yield n\n    n += 1",
    "from itertools import islice\nassert list(islice(f(), 4)) == [0, 1, 2, 3]",
  ),
  "exceptions": (
    "class Mine(ValueError): pass\ndef f(): raise Mine('x')\ndef g(): return {}['k']",
    """
try: f()
except ValueError as error: assert str(error) == 'x' and type(error).__name__ == 'Mine'
else: assert False
try: g()
except KeyError as error: assert error.args == ('k',)
else: assert False""",
  ),
  "objects": (
    POINT,
    """
p = Point(1, 2)
assert p.x == 1 and p.key() == 1 and list(p) == [1, 2]
p.x = 5
assert p.key() == 5 and (p.times(2)).x == 10
assert isinstance(p, Point) and not isinstance(3, Point)""",
  ),
  "a class that extends a plain type": (
    "class Cache(dict):\n  def put(self, k, v): self[k] = v\n  def at(self, k): return self[k]",
    "c = Cache()\nc.put(1, 2)\nassert c.at(1) == 2",
  ),
  "numbers of enumerations": (
    "import enum\nclass E(enum.IntEnum): A = 3\nclass S(str, enum.Enum): B = 'b'"
    "\ndef f(): return [E.A, S.B]",
    "assert f() == [3, 'b'] and [type(x) for x in f()] == [int, str]",
  ),
  "modules of the program": (
    "import math",
    "assert math.sqrt(4) == 2 and __program__.math.floor(2.5) == 2",
  ),
  "an entry point named as a builtin": ("def sum(a, b): return a * b", "assert sum(10, 15) == 150"),
  "a constant": ("N = [1, 2]", "assert N == [1, 2]"),
  "exit is known": ("def f():\n  try: exit()\n  except SystemExit: return 1", "assert f() == 1"),
  "dataclasses": (
    "from dataclasses import dataclass\n@dataclass\nclass A:\n  x: int = 3",
    "assert A().x == 3 and A(4).x == 4",
  ),
  "recursion": ("def f(n): return n and 1 + f(n - 1)", "assert f(900) == 900"),
  "a main block is not run": (
    "def f(): return 1\nif __name__ == '__main__': input()",
    "assert f() == 1",
  ),
  "a long program": ("x = 0\n" + "x += 1\n" * 50000, "assert x == 50000"),
  "a large answer": ("def f(x): return x[::-1]", "x = list(range(100000))\nassert f(x) == x[::-1]"),
}

FAIL = {
  "wrong": ("def f(x): return x", "assert f(1) == 2", "failed: assert f(1) == 2"),
  "wrong, with a message": (
    "def f(x): return x",
    "assert f(1) == 2, 'off\\nby one'",
    "failed: off",
  ),
  "raises": ("def f(x): return x / 0", "f(1)", "error: ZeroDivisionError: division by zero"),
  "raises at once": ("import numpy", "pass", "error: ModuleNotFoundError: No module named 'numpy'"),
  "no such function": ("def g(): pass", "f()", "error: NameError: name 'f' is not defined"),
  "syntax": ("def f(:", "pass", "error: SyntaxError: invalid syntax"),
  "exits": ("import sys\nsys.exit(0)", "pass", "error: SystemExit: 0"),
  "NUL bytes": ("x = '\0'", "pass", "error: SyntaxError"),
  "surrogates": ("x = '\ud800'", "pass", "error: Unicode"),
  "too many parentheses": ("(" * 100000, "pass", ""),
  "a very long line": ("x = " + "-" * 1000000 + "1", "pass", ""),
  "memory": ("x = 'a' * 10**10", "pass", "memory: MemoryError"),
  "an answer too large": ("def f(): return 'a' * 300_000_000", "f()", ""),
  "reads": ("x = input()", "pass", "error: EOFError"),
  "a cycle": (
    "def f():\n  a = []\n  a.append(a)\n  return a",
    "assert f() == 1",
    "error: RecursionError",
  ),
}


# Programs that compute nothing, with tests that they would pass if an object of theirs, or a name
# that they define, took part in what the tests compute.
_LIAR = "class L{base}:\n  {method} = lambda self, *x: {value}\ndef f(*x): return L({made})"
_NEAR = "assert abs(f(3) - 1.5) < 1e-6"
LIES = {
  **{
    f"{base}.{method}": (_LIAR.format(base=f"({base})", method=method, value=value, made=7), tests)
    for base in ("float", "int", "complex")
    for method, value, tests in (
      ("__sub__", "0.0", _NEAR),
      ("__rsub__", "0.0", "assert abs(1.5 - f(3)) < 1e-6"),
      ("__eq__", "True", "assert f(3) == 1.5"),
      ("__round__", "1.5", "assert round(f(3), 2) == 1.5"),
      ("__mul__", "3", "assert f(3) * 2 == 3"),
      ("__lt__", "True", "assert f(3) < 1.5"),
      ("__abs__", "0", "assert abs(f(3)) == 0"),
      ("__float__", "1.5", "import math\nassert math.isclose(f(3), 1.5)"),
    )
  },
  **{
    f"object.{method}": (_LIAR.format(base="", method=method, value=value, made=""), tests)
    for method, value, tests in (
      ("__sub__", "0.0", _NEAR),
      ("__eq__", "True", "assert f(3) == 1.5"),
      ("__ne__", "True", "assert f(3) != 1.5"),
      ("__contains__", "True", "assert 5 in f(3)"),
      ("__iter__", "iter(range(100))", "assert 5 in f(3)"),
      ("__len__", "3", "assert len(f(3)) == 3"),
      ("__bool__", "True", "assert f(3)"),
      ("__getitem__", "5", "assert f(3)[1] == 5"),
      ("__str__", "'5'", "assert str(f(3)) == '5'"),
      ("__hash__", "5", "assert f(3) not in {5}"),
      ("__divmod__", "(0, 0)", "assert divmod(f(3), 2) == (0, 0)"),
      ("__format__", "'5'", "assert f'{f(3)}' == '5'"),
    )
  },
  "two objects": (
    "class L:\n  __eq__ = lambda a, b: True\ndef f(x): return L()",
    "assert f(1) == f(2)",
  ),
  "nested": ("class L:\n  __eq__ = lambda a, b: True\ndef f(): return [L()]", "assert f() == [5]"),
  "list": (
    "class L(list):\n  __eq__ = lambda a, b: True\ndef f(): return L()",
    "assert f() == [5]",
  ),
  "length": (
    "class L(list):\n  __len__ = lambda a: 3\ndef f(): return L()",
    "assert len(f()) == 3",
  ),
  "str": (
    "class L(str):\n  __eq__ = lambda a, b: True\ndef f(): return L('')",
    "assert f() == 'a'",
  ),
  "math": (
    "class math:\n  isclose = lambda *x: True\ndef f(x): return 0",
    "assert math.isclose(f(3), 1.5)",
  ),
  "np": (
    "class np:\n  allclose = lambda *x: True\ndef f(x): return 0",
    "assert np.allclose(f(3), 1.5)",
  ),
  "isclose": ("isclose = lambda *x: True\ndef f(x): return 0", "assert isclose(f(3), 1.5)"),
  "Counter": (
    "Counter = lambda x: 0\ndef f(x): return 0",
    "assert Counter(f('a')) == Counter('a')",
  ),
  "deepcopy": ("deepcopy = lambda x: 0\ndef f(x): return 0", "assert deepcopy([1]) == f(1)"),
  "abs": ("abs = lambda *x: 0\ndef f(x): return 0", _NEAR),
}


@pytest.mark.sandbox
@pytest.mark.some(8, slow=40)
@pytest.mark.parametrize("name", LIES)
def test_programs_that_lie_to_their_tests_fail(name):
  verdict = run_code(*LIES[name], timeout_s=30)
  assert verdict.passed is False, verdict


BASES = {"": "", "float": "0.25", "int": "7", "str": "'q'", "list": "[7]", "dict": "{7: 7}"}
METHODS = str.split(
  "eq ne lt le gt ge sub rsub add radd mul truediv abs round len contains getitem iter bool float"
  " int index hash str repr format neg mod pow divmod"
)
# What a test may ask of f(3), whose right value is 1.5, and that no value above fulfils.
ASKED = st.sampled_from(
  [
    *("f(3) == 1.5", "1.5 == f(3)", "abs(f(3) - 1.5) < 1e-6", "round(f(3), 1) == 1.5"),
    *("f(3) in (1.5,)", "[f(3)] == [1.5]", "{0: f(3)} == {0: 1.5}", "str(f(3)) == '1.5'"),
    *("1.4 < f(3) < 1.6", "f(3) * 2 == 3", "not f(3) != 1.5", "float(f(3)) == 1.5"),
    *("math.isclose(f(3), 1.5)", "sorted([f(3), 9])[0] == 1.5", "max(1.4, f(3)) == 1.5"),
  ]
)


@pytest.mark.sandbox
@settings(derandomize=True, max_examples=25, deadline=None)
@given(
  st.sampled_from(sorted(BASES)),
  st.lists(st.sampled_from(METHODS), min_size=1, max_size=6, unique=True),
  st.sampled_from(["True", "0", "1.5", "iter([1.5])", "'1.5'", "self", "args[0] if args else 1"]),
  ASKED,
)
def test_a_value_that_lies_passes_no_test(base, methods, lie, check):
  lines = "".join(f"  def __{name}__(self, *args): return {lie}\n" for name in methods)
  program = f"class L({base}):\n{lines}def f(x): return L({BASES[base]})"
  verdict = run_code(program, f"import math\nassert {check}", timeout_s=30)
  assert verdict.passed is False, (program, check, verdict)


# Tests that need the library's own function of this name to fail f, which returns [0].
USES = {
  "abs": "abs(f(1)[0] - 2) < 1e-6",
  "round": "round(f(1)[0]) == 2",
  "len": "len(f(1)) == 2",
  "sorted": "sorted(f(1)) == [2]",
  "all": "all(x == 2 for x in f(1))",
  "any": "any(x == 2 for x in f(1))",
  "map": "list(map(f, [1])) == [[2]]",
  "isinstance": "isinstance(f(1), str)",
  "str": "str(f(1)) == '[2]'",
  "float": "float(f(1)[0]) == 2.0",
  "math": "math.isclose(f(1)[0], 2)",
}


@pytest.mark.sandbox
@settings(derandomize=True, max_examples=12, deadline=None)
@given(st.sampled_from(sorted(USES)))
def test_the_names_of_tests_are_not_the_program_s(name):
  lie = "type('L', (), {'isclose': lambda *x: True})" if name == "math" else "lambda *x: True"
  verdict = run_code(f"{name} = {lie}\ndef f(x): return [0]", f"assert {USES[name]}", timeout_s=30)
  assert verdict.passed is False, (name, verdict)


@pytest.mark.sandbox
def test_control_characters_do_not_separate_what_is_printed():
  assert run_stdin("print('1 2')", "", "1 2\r\n").passed
  for text in ("1\x0c2", "1\x0b2", "1\x1c2", "1\u20282", "1\x852"):
    assert not run_stdin(f"print({text!r})", "", "1\n2").passed
    assert not run_stdin(f"print({text!r})", "", "1 2").passed


@pytest.mark.sandbox
@pytest.mark.parametrize("name", PASS)
def test_good_programs_pass(name):
  verdict = run_code(*PASS[name], timeout_s=30)
  assert verdict.passed is True and verdict.reason == "passed", verdict


@pytest.mark.sandbox
@pytest.mark.parametrize("name", FAIL)
def test_wrong_programs_fail_with_a_reason(name):
  program, tests, reason = FAIL[name]
  verdict = run_code(program, tests, timeout_s=30)
  assert verdict.passed is False and verdict.reason.startswith(reason), verdict
  assert "\n" not in verdict.reason and len(verdict.reason) <= 310


@pytest.mark.sandbox
@pytest.mark.parametrize(
  ("program", "tests"),
  [
    ("while True: pass", "pass"),
    ("def f():\n  while True: pass", "f()"),
    ("import time\ntime.sleep(100)", "pass"),
  ],
)
@pytest.mark.parametrize("limit", [0.5, 1.5])
@pytest.mark.some(2, slow=1)
def test_a_timeout_ends_the_run_at_its_limit(program, tests, limit):
  began = time.monotonic()
  verdict = run_code(program, tests, timeout_s=limit)
  assert verdict.passed is False and verdict.reason == "timeout"
  assert limit <= time.monotonic() - began < limit + 20


@pytest.mark.sandbox
@pytest.mark.parametrize(
  ("tests", "reason"),
  [
    ("assert (", "no verdict: the tests do not compile"),
    ("class A: pass\nf(A())", "no verdict: the tests pass an object of A"),
  ],
)
def test_faults_of_the_tests_give_no_verdict(tests, reason):
  verdict = run_code("def f(x): return x", tests)
  assert verdict.passed is None and verdict.reason.startswith(reason)


@pytest.mark.sandbox
def test_output_is_kept_and_capped():
  assert run_code("print('héllo')", "pass").output == "héllo\n"
  verdict = run_code("print('x' * 100000)", "pass")
  assert verdict.passed
  assert verdict.output == "x" * 16384


DOUBLE = "for line in open(0): print(int(line) * 2, end=' \\n')"
THREAD = "import threading\nthreading.Thread(target=lambda: print(input())).start()"


@pytest.mark.sandbox
@pytest.mark.parametrize(
  ("program", "stdin", "expected"),
  [
    (DOUBLE, "1\n2\n", "2\n4"),
    ("print(input())", "é\n", "é\n\n"),
    (THREAD, "4\n", "4"),
    ("if __name__ == '__main__':\n  print(1)\n  exit()", "", "1"),
    ("print('x' * 10**6)", "", "x" * 10**6),
  ],
  ids=["lines", "characters", "threads", "exit", "long"],
)
def test_expected_stdout_passes(program, stdin, expected):
  assert run_stdin(program, stdin, expected).passed


@pytest.mark.sandbox
@pytest.mark.parametrize(
  ("program", "reason"),
  [
    ("print(2)", "failed: stdout is not what was expected"),
    ("print(1)\n1 / 0", "error: ZeroDivisionError: division by zero"),
    ("print(1)\nexit(3)", "error: the program ended with exit status 3"),
    ("x = 'a' * 10**10", "memory"),
    ("while True: pass", "timeout"),
  ],
)
def test_unexpected_stdout_and_failures_do_not_pass(program, reason):
  verdict = run_stdin(program, "", "1", timeout_s=1 if reason == "timeout" else 5)
  assert verdict.passed is False
  assert verdict.reason.startswith(reason)


def test_the_program_is_the_last_block():
  assert program_of("x = 1") == "x = 1"
  assert program_of("a\n```python\nx = 1\n```\nb\n```py\nx = 2\n```\nc") == "x = 2\n"
  assert program_of("a\n```\nx = 1\n```") == "x = 1\n"
  assert program_of("a\n```python\nx = 1\ny = ") == "x = 1\ny = "
  assert program_of("") == ""


def test_humaneval_continuations_and_complete_functions():
  prompt = "import math\n\ndef f(x):\n  '''Doubles.'''\n"
  program, _ = humaneval("  return 2 * x\n\ndef g(): pass", prompt, "", "f")
  assert program == prompt + "  return 2 * x\n"
  program, _ = humaneval("Sure:\n```python\ndef f(x):\n  return 2\n```", prompt, "", "f")
  assert program == prompt + "\n\ndef f(x):\n  return 2\n"


HUMANEVAL_EXTRA = {
  "prompt": "def f(x):\n  '''Doubles.'''\n",
  "test": "def check(candidate):\n  assert candidate(2) == 4",
  "entry_point": "f",
}
MBPP_EXTRA = {
  "test_list": ["assert f(2) == 4", "assert math.isclose(f(0.1), 0.2)"],
  "test_imports": ["import math"],
}
CASES = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
CALLS = {"inputs": [[[1, 2], 3]], "outputs": [[3, 6]], "fn_name": "scale"}
METHOD = "class Solution:\n  def scale(self, x, k): return tuple(k * y for y in x)"


@pytest.mark.sandbox
@pytest.mark.parametrize(
  ("completion", "extra", "verdict"),
  [
    ("  return 2 * x", HUMANEVAL_EXTRA, True),
    ("  return 3 * x", HUMANEVAL_EXTRA, False),
    ("```python\ndef f(x):\n  return 2 * x\n```", HUMANEVAL_EXTRA, True),
    ("x", {**HUMANEVAL_EXTRA, "test": "("}, None),
    ("```python\ndef f(x): return 2 * x\n```", MBPP_EXTRA, True),
    ("```python\ndef f(x): return 4\n```", MBPP_EXTRA, False),
    ("print(2 * int(input()))", {"input_output": CASES}, True),
    ("print(2)", {"input_output": json.dumps(CASES)}, False),
    (METHOD, {"input_output": CALLS}, True),
    ("def scale(x, k): return [k * y for y in x]", {"input_output": CALLS}, True),
    ("def scale(x, k): return x", {"input_output": CALLS}, False),
  ],
)
def test_code_correct_by_kind_of_tests(completion, extra, verdict):
  assert code_correct(completion, extra) is verdict


def test_an_unknown_kind_is_rejected():
  with pytest.raises(ValueError, match="got \\['tests'\\]"):
    code_correct("x", {"tests": 1})


def humaneval_rows():
  return [json.loads(line) for line in gzip.decompress(HUMANEVAL.read_bytes()).splitlines()]


@pytest.mark.sandbox
@pytest.mark.skipif(not HUMANEVAL.exists(), reason=f"{HUMANEVAL} is absent")
@pytest.mark.parametrize("right", [True, False])
def test_humaneval_canonical_solutions_pass_and_broken_bodies_fail(right):
  rows = humaneval_rows()
  assert len(rows) == 164
  bodies = [row["canonical_solution"] if right else "    return None\n" for row in rows]
  with ThreadPoolExecutor(4) as pool:
    verdicts = list(pool.map(lambda body, row: code_correct(body, row, timeout_s=60), bodies, rows))
  pairs = zip(rows, verdicts, strict=True)
  assert [row["task_id"] for row, verdict in pairs if verdict is not right] == []


@pytest.mark.sandbox
@pytest.mark.skipif(not HUMANEVAL.exists(), reason=f"{HUMANEVAL} is absent")
def test_a_program_cannot_replace_the_helpers_of_humaneval():
  """HumanEval/32 checks a root with the prompt's poly. A program that redefines poly as 0 fails."""
  row = next(row for row in humaneval_rows() if row["task_id"] == "HumanEval/32")
  cheat = f"```python\n{row['prompt']}    return {math.pi}\n\ndef poly(*x): return 0.0\n```"
  assert code_correct(cheat, row) is False
