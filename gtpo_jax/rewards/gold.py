"""Checks the gold answers and tests of problems, before any completion exists.

If the tests of a problem cannot run, or nothing can match its answer, each of its completions would
otherwise be wrong or have no verdict. The rows of a file are checked when the file is read. A
verifier must accept a completion that states the gold answer, and refuse one that states nothing.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gtpo_jax.rewards.code import humaneval, run_code
from gtpo_jax.rewards.constraints.instruction_verdicts import check_instructions
from gtpo_jax.rewards.gym.scores import check_entry
from gtpo_jax.rewards.math.extraction import MAX_CHARS, gold_answer
from gtpo_jax.rewards.math.values import read
from gtpo_jax.rewards.math.verdicts import quick_verdict
from gtpo_jax.rewards.plain import choice_correct, exact_correct
from gtpo_jax.rewards.synthetic import countdown_reaches, sentence_correct
from gtpo_jax.rewards.truth import check_truth
from gtpo_jax.rewards.verifiers import VERIFIERS, missing_extra
from gtpo_jax.runtime.errors import first_line
from gtpo_jax.runtime.files import unique_keys
from gtpo_jax.runtime.sandbox.bubblewrap import sandbox_problem
from gtpo_jax.runtime.sandbox.inside import modules_in

MAX_COUNTDOWN_DIGITS = 9  # of the numbers that a countdown step may contain
MAX_SEARCHED_NUMBERS = 4  # of a countdown problem; the search with more takes milliseconds
SHOWN_CHARS = 80  # of an answer in a message

Extra = Mapping[str, Any]


def check_gold(kind: str, answer: str, extra: Extra, rule: str = "math") -> None:
  """Checks that the verifier of `kind` can decide whether completions of a problem are correct.

  Args:
    kind: `Problem.kind`.
    answer: `Problem.answer`.
    extra: `Problem.extra`, of any content.
    rule: the config's `reward.math_rule`, for the kind "math".

  Raises:
    ValueError: the kind has no verifier, its verifier cannot use the answer or the extra, or
      `extra["truth"]` is malformed. The message completes a sentence that begins with the row.
  """
  if kind not in VERIFIERS:
    valid = ", ".join(VERIFIERS)
    raise ValueError(f"is of kind {kind!r}, which has no verifier; valid are {valid}")
  if kind == "math":
    _math(answer, rule)
  elif kind in REQUIREMENTS:
    REQUIREMENTS[kind](answer, extra)
  check_truth(extra)


@functools.cache
def gold_check(rule: str) -> Callable[[str, str, Extra], None]:
  """Returns `check_gold` with this rule, always the same function."""
  return functools.partial(check_gold, rule=rule)


_OTHER_KINDS = "the kind exact, or your own reward.verifier"
_EMPTY = "is empty without its formatting; write an answer, or leave it out"
_UNSTATED = (
  "is not the answer of a completion that states it; close its braces, or use your own "
  "reward.verifier"
)
_DIGIT = re.compile(r"[0-9]")
_MARKS = re.compile(r"[\\{}#]|box|answer", re.IGNORECASE)  # what may end or replace a box


def _unusable(kind: str, answer: str, why: str) -> ValueError:
  return ValueError(f"is of kind {kind!r}, but its answer {answer[:SHOWN_CHARS]!r} {why}")


def _math(answer: str, rule: str) -> None:
  wrong = functools.partial(_unusable, "math", answer)
  if rule == "dapo":
    if not quick_verdict(f"Answer: {answer}", answer, rule) or quick_verdict("", answer, rule):
      raise wrong(f"cannot be stated in DAPO's `Answer:` line; use {_OTHER_KINDS}")
    return
  target = gold_answer(answer).strip()
  if len(target) > MAX_CHARS:
    raise wrong(f"is longer than {MAX_CHARS} characters; use {_OTHER_KINDS}")
  has_digit = bool(_DIGIT.search(target))  # then it is not empty, and most answers are numbers
  if has_digit and not _MARKS.search(answer):
    return
  if not has_digit and not read(target)[0]:
    raise wrong(_EMPTY)
  if not quick_verdict(f"\\boxed{{{target}}}", answer):
    raise wrong(_UNSTATED)


def _exact(answer: str, extra: Extra) -> None:
  if answer.strip() and not _MARKS.search(answer):
    return
  if exact_correct("", answer) or exact_correct("\\boxed{}", answer):
    raise _unusable("exact", answer, _EMPTY)
  statements = (f"\\boxed{{{answer}}}", f"Answer: {answer}", answer)
  if not any(exact_correct(text, answer) for text in statements):
    raise _unusable("exact", answer, _UNSTATED)


def _digits(kind: str, answer: str, extra: Extra) -> None:
  if not re.fullmatch(r"\d+", answer, re.ASCII):
    raise _unusable(kind, answer, "does not consist of digits")


def _choice(answer: str, extra: Extra) -> None:
  if choice_correct("", answer) is None:
    raise _unusable("choice", answer, "is not a letter from A to J; use the kind exact")


def _countdown(answer: str, extra: Extra) -> None:
  numbers = extra.get("numbers")
  digits = rf"\d{{1,{MAX_COUNTDOWN_DIGITS}}}"
  is_number = lambda value: type(value) is int and re.fullmatch(digits, str(value), re.ASCII)
  if not isinstance(numbers, list | tuple) or not numbers or not all(map(is_number, numbers)):
    raise ValueError(
      f"is of kind 'countdown', but extra.numbers is not a list of whole numbers of at most "
      f"{MAX_COUNTDOWN_DIGITS} digits"
    )
  if not re.fullmatch(digits, answer, re.ASCII):
    why = f"is not a whole number of at most {MAX_COUNTDOWN_DIGITS} digits"
    raise _unusable("countdown", answer, why)
  if len(numbers) <= MAX_SEARCHED_NUMBERS and not countdown_reaches(numbers, int(answer)):
    raise ValueError(
      f"is of kind 'countdown', but no steps with +, - and * lead from its numbers "
      f"{list(numbers)} to its answer {answer}; leave it out"
    )


def _sentence(answer: str, extra: Extra) -> None:
  topic = extra.get("topic")
  word = extra.get("word")
  used = f"Once the {topic} was near the {word}."
  if not all(isinstance(x, str) for x in (topic, word)) or not sentence_correct(used, topic, word):
    raise ValueError(
      "is of kind 'sentence', but its extra has no topic and word that are single words in lower "
      f"case and may be used, got {str(topic)[:SHOWN_CHARS]!r} and {str(word)[:SHOWN_CHARS]!r}"
    )


def _code(answer: str, extra: Extra) -> None:
  if missing := missing_extra("code", extra):
    raise ValueError(f"is of kind 'code', but its tests are missing: it has no {missing}")
  next(check for first, check in TESTS.items() if first in extra)(extra)


def _humaneval(extra: Extra) -> None:
  for name in ("prompt", "test", "entry_point"):
    _source(extra[name], name)
  if not extra["entry_point"].isidentifier():
    raise ValueError(f"has entry_point {extra['entry_point'][:SHOWN_CHARS]!r}, which is not a name")
  tree = _checks(
    extra["test"], humaneval("", extra["prompt"], extra["test"], extra["entry_point"])[1]
  )
  if not any(isinstance(x, ast.FunctionDef) and x.name == "check" for x in ast.walk(tree)):
    raise ValueError("has a test without a function check(candidate), which would test nothing")


def _test_list(extra: Extra) -> None:
  tests = extra["test_list"]
  if not isinstance(tests, list | tuple) or not tests:
    raise ValueError("has a test_list that is not a list of tests")
  imports = extra.get("test_imports") or ()
  if not isinstance(imports, list | tuple):
    raise ValueError("has test_imports that are not a list")
  for line in (*tests, *imports, extra.get("test_setup_code") or ""):
    _source(line, "test_list, test_imports or test_setup_code")
  _checks("\n".join([extra.get("test_setup_code") or "", *imports, *tests]))


def _input_output(extra: Extra) -> None:
  cases = extra["input_output"]
  if isinstance(cases, str):
    try:
      cases = json.loads(cases, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"has an input_output that is not valid JSON: {error}") from None
  if not isinstance(cases, Mapping):
    raise ValueError("has an input_output that is not an object")
  inputs = cases.get("inputs")
  outputs = cases.get("outputs")
  for value in (inputs, outputs):
    if not isinstance(value, list | tuple) or not value:
      raise ValueError("has an input_output without lists of inputs and outputs")
  if len(inputs) != len(outputs):
    raise ValueError(f"has an input_output with {len(inputs)} inputs and {len(outputs)} outputs")
  if name := cases.get("fn_name"):
    _check_calls(name, inputs, outputs)
  elif not all(isinstance(line, str) for value in (*inputs, *outputs) for line in _lines(value)):
    raise ValueError("has an input_output whose inputs and outputs are not text")
  elif not any("".join(output).strip() for output in outputs):
    raise ValueError("has an input_output whose outputs are all empty, which any program prints")


def _check_calls(name: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
  _source(name, "fn_name")
  if not name.isidentifier():
    raise ValueError(f"has fn_name {name[:SHOWN_CHARS]!r}, which is not a name")
  if not all(isinstance(arguments, list | tuple) for arguments in inputs):
    raise ValueError("has an input_output whose inputs are not lists of arguments")
  try:
    json.dumps([inputs, outputs], allow_nan=False)
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(f"has an input_output whose items are not plain values: {error}") from None


def _checks(tests: str, whole: str = "") -> ast.Module:
  """Returns the parsed tests. Raises ValueError if they do not compile or check nothing.

  They check nothing if no assert about a value of the program can fail. Where that is not plain to
  see and a sandbox is there, they are run: no program that computes nothing may pass them.

  Args:
    tests: Python code.
    whole: the code with what the sandbox runs around it, by default `tests`.
  """
  tree, whole_tree = _parsed(tests), _parsed(whole or tests)
  names = _names_of_program(tree)
  called = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}
  called |= {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute)} | {"check"}
  reached = list(_reached(tree, called))
  own = {x.id for x in reached if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
  if not any(_checks_something(node, names, own & names) for node in reached) or (
    not any(_is_plain_check(node, names) for node in _always_run(tree))
    and not sandbox_problem()
    and all(_passes(value, whole_tree) for value in ("None", "'nothing'"))
  ):
    raise ValueError(
      "has tests that check nothing, so that any program would pass: they have no assert about a "
      f"value of the program: {' '.join(tests.split())[:SHOWN_CHARS]!r}"
    )
  return tree


def _parsed(tests: str) -> ast.Module:
  """Returns the parsed tests. Raises ValueError if they do not compile."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # such as of an escape in a text
      return compile(tests, "<tests>", "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise ValueError(f"has tests that do not compile: {first_line(error)}") from None


def _names_of_program(tree: ast.Module) -> set[str]:
  """Returns the names in tests that are the program's or depend on it.

  As in the sandbox, a name is that of the builtin, unless the tests have no other name.
  """
  nodes = list(ast.walk(tree))
  names_of = lambda node: {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
  bound = {x.id for x in nodes if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load)}
  bound |= {x.name for x in nodes if isinstance(x, ast.FunctionDef | ast.ClassDef)}
  bound |= {x.asname or x.name.partition(".")[0] for x in nodes if isinstance(x, ast.alias)}
  used = names_of(tree) - modules_in(ast.unparse(tree))
  used = used.difference(dir(builtins)) or used
  names = used - bound
  # What a statement, a loop or a function has beside a name of the program may depend on it.
  groups = [names_of(x) for x in nodes if isinstance(x, ast.stmt) and not hasattr(x, "body")]
  groups += [
    names_of(x.target) | names_of(x.iter)
    for x in nodes
    if isinstance(x, ast.For | ast.comprehension)
  ]
  groups += [names_of(x) for x in nodes if isinstance(x, ast.withitem)]
  groups += [names_of(x) | {x.name} for x in nodes if isinstance(x, ast.FunctionDef | ast.ClassDef)]
  size = -1
  while len(names) > size:
    size = len(names)
    names = names.union(*(group & (bound | used) for group in groups if group & names))
  return names


def _always_run(tree: ast.Module) -> Iterator[ast.stmt]:
  """Yields the statements of the tests and of their function check that are in no other one."""
  for node in tree.body:
    yield node
    if isinstance(node, ast.FunctionDef) and node.name == "check":
      yield from node.body


def _is_plain_check(node: ast.AST, names: set[str]) -> bool:
  """Whether a node asserts that a call of the program is equal to a literal."""
  test = node.test if isinstance(node, ast.Assert) else None
  if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
    return False
  sides = (test.left, test.comparators[0])
  is_literal = lambda x: not any(isinstance(y, ast.Name | ast.Call) for y in ast.walk(x))
  is_call = lambda x: (
    isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id in names
  )
  return len(test.comparators) == 1 and any(
    is_call(x) and is_literal(y) for x, y in (sides, sides[::-1])
  )


def _passes(value: str, tests: ast.Module) -> bool:
  """Returns whether a program whose functions all return a constant passes the tests."""
  names = {x.id for x in ast.walk(tests) if isinstance(x, ast.Name)}
  names |= {x.attr for x in ast.walk(tests) if isinstance(x, ast.Attribute)}  # of __program__
  program = "".join(f"def {name}(*given, **named): return {value}\n" for name in sorted(names))
  return bool(run_code(program, ast.unparse(tests)).passed)


def _reached(node: ast.AST, called: set[str]) -> Iterator[ast.AST]:
  """Yields the nodes of tests that run, and whose failures end the run.

  They are in no function that nothing calls, in no branch that is never entered, after no statement
  that leaves, and not where their errors are caught.
  """
  for child in ast.iter_child_nodes(node):
    is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
    is_idle = isinstance(child, ast.For) and not getattr(child.iter, "elts", True)
    if (is_function and not {child.name, "main"} & called) or is_idle or _suppresses(child):
      continue
    if isinstance(child, ast.If | ast.While) and _is_false(child.test):
      child = ast.Module(child.orelse, [])
    elif isinstance(child, ast.Try) and any(map(_catches_failures, child.handlers)):
      child = ast.Module([*child.handlers, *child.orelse, *child.finalbody], [])
    yield child
    yield from _reached(child, called)
    exits = isinstance(child, ast.Expr) and ast.unparse(child) in ("exit()", "quit()", "sys.exit()")
    if exits or isinstance(child, ast.Return | ast.Raise | ast.Break | ast.Continue):
      return


def _suppresses(node: ast.AST) -> bool:
  """Whether errors end in a block, as in with contextlib.suppress(Exception)."""
  return isinstance(node, ast.With) and "suppress(" in ast.unparse(node.items)


def _is_false(test: ast.expr) -> bool:
  """Whether a condition without calls and without names but __name__ is false."""
  allowed = (ast.Constant, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not)
  names = {x.id for x in ast.walk(test) if isinstance(x, ast.Name)}
  if names - {"__name__"} or not all(
    isinstance(x, (*allowed, ast.Name, ast.Load)) for x in ast.walk(test)
  ):
    return False
  try:
    return not eval(ast.unparse(test), {"__name__": "tests"})
  except TypeError:
    return False


def _catches_failures(handler: ast.ExceptHandler) -> bool:
  """Whether a failed assert ends here, and the handler can do nothing about it."""
  kinds = {x.id for x in ast.walk(handler.type or handler) if isinstance(x, ast.Name)}
  caught = not handler.type or kinds & {"AssertionError", "Exception", "BaseException"}
  return bool(caught) and not any(
    isinstance(x, ast.Raise | ast.Assert)
    or (isinstance(x, ast.Call) and ast.unparse(x.func) != "print")
    for line in handler.body
    for x in ast.walk(line)
  )


def _checks_something(node: ast.AST, names: set[str], own: set[str]) -> bool:
  """Whether a node of tests can fail: an assert about one of the names, or a call to assert.

  A name alone, as in assert f, is no such assert, unless it is a variable of the tests' own.
  """
  if isinstance(node, ast.Call):
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return name.startswith(("assert", "fail"))
  if isinstance(node, ast.Assert) and isinstance(node.test, ast.Name):
    return node.test.id in own
  if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant):
    return not node.test.value  # as after a call that must raise
  return isinstance(node, ast.Raise) or (
    isinstance(node, ast.Assert) and _can_be_false(node.test, names)
  )


# As in assert (f(1) == 2, "message").
_ALWAYS_TRUE = (
  *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.ListComp, ast.GeneratorExp, ast.Lambda),
  *(ast.JoinedStr, ast.Constant),
)
_TRUE_OF_ALL = ("callable", "hasattr", "id", "repr", "str", "type")  # calls that any program passes


def _can_be_false(test: ast.expr, names: set[str]) -> bool:
  if isinstance(test, ast.BoolOp):
    decide = all if isinstance(test.op, ast.Or) else any
    return decide(_can_be_false(value, names) for value in test.values)
  if isinstance(test, ast.UnaryOp):
    return _can_be_false(test.operand, names)
  is_pair = isinstance(test, ast.Compare) and len(test.comparators) == 1
  if is_pair and isinstance(test.ops[0], ast.Eq | ast.Is | ast.LtE | ast.GtE):
    is_same = ast.dump(test.left) == ast.dump(test.comparators[0])
    return not is_same and _has_name(test, names)
  is_call = isinstance(test, ast.Call) and isinstance(test.func, ast.Name)
  if isinstance(test, _ALWAYS_TRUE) or (is_call and test.func.id in _TRUE_OF_ALL):
    return False
  return _has_name(test, names)


def _has_name(node: ast.AST, names: set[str]) -> bool:
  return any(isinstance(x, ast.Name) and x.id in names for x in ast.walk(node))


def _source(text: Any, name: str) -> None:
  """Raises ValueError if a value is not text that can be compiled as part of a program."""
  if not isinstance(text, str):
    raise ValueError(f"has a {name} that is not text, but {type(text).__name__}")
  if "\0" in text:
    raise ValueError(f"has a {name} that contains a NUL character")
  text.encode()  # half of a surrogate pair raises UnicodeEncodeError, a ValueError


def _lines(value: Any) -> Sequence[Any]:
  """Returns the lines of a standard stream, which a value is or lists."""
  return value if isinstance(value, list | tuple) else [value]


# By the first key of each format of tests (`NEEDS`): a function that checks the format.
TESTS: dict[str, Callable[[Extra], None]] = {
  "entry_point": _humaneval,
  "test_list": _test_list,
  "input_output": _input_output,
}

# By `Problem.kind`: a function that raises ValueError if the kind's verifier cannot use an answer
# or extra. The kind "math" also depends on the rule.
REQUIREMENTS: dict[str, Callable[[str, Extra], None]] = {
  "last_number": functools.partial(_digits, "last_number"),
  "forks": functools.partial(_digits, "forks"),
  "choice": _choice,
  "exact": _exact,
  "countdown": _countdown,
  "sentence": _sentence,
  "code": _code,
  "constraints": check_instructions,
  "reasoning_gym": check_entry,
}
