"""Whether completions follow the instructions of their problem, and whether these can be checked.

`extra` has the instructions, as in IFEval's files: `instruction_id_list`, a list of names,
and `kwargs`, the arguments of each. An argument that is null, zero or empty counts as missing.

Some arguments are regular expressions, which may take exponential time. Problems with such
arguments are checked in worker processes that are killed when they hang.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gtpo_jax.rewards.constraints.instructions import INSTRUCTIONS, pattern, patterns
from gtpo_jax.rewards.finding import after_thinking
from gtpo_jax.rewards.math.worker_pool import WorkerPool, wait_all
from gtpo_jax.runtime.errors import did_you_mean

STRICT = "strict"
LOOSE = "loose"
SHOWN_CHARS = 80  # of a value in a message
_REPEATS = re.compile(r"[*+?{|]")  # without these, a regular expression takes linear time


def followed_shares(
  completions: Sequence[str],
  extras: Sequence[Mapping[str, Any]],
  mode: str = STRICT,
  timeout_s: float = 5.0,
) -> list[float | None]:
  """Returns the share of the instructions of its problem that each completion follows.

  It is None if the regular expressions of a problem take longer than `timeout_s` seconds. The other
  arguments are those of `followed`.
  """
  shares = []
  for completion, extra in zip(completions, extras, strict=True):
    names, kwargs = extra["instruction_id_list"], extra["kwargs"]
    if _may_hang(names, kwargs):
      problem = json.dumps({"mode": mode, "instruction_id_list": names, "kwargs": kwargs})
      shares.append(_pool().submit(problem, completion, timeout_s))
    else:
      shares.append(_share(followed(completion, extra, mode)))
  return wait_all(shares)


def share_in_worker(problem: str, completion: str) -> float:
  """Returns the share of instructions that a completion follows.

  The problem is its `extra`, with the mode, as JSON.
  """
  extra = json.loads(problem)
  return _share(followed(completion, extra, extra["mode"]))


def _share(verdicts: Sequence[bool]) -> float:
  return sum(verdicts) / len(verdicts)


def _may_hang(names: Sequence[str], kwargs: Sequence[Mapping[str, Any] | None]) -> bool:
  """Whether an argument is a regular expression that repeats something or has alternatives."""
  for name, given in zip(names, kwargs, strict=True):
    for key, kind in INSTRUCTIONS[name].arguments.items():
      value = (given or {}).get(key)
      expressions = [value] if kind is pattern else value if kind is patterns else []
      if any(_REPEATS.search(expression) for expression in expressions):
        return True
  return False


@functools.cache
def _pool() -> WorkerPool:
  return WorkerPool(check="gtpo_jax.rewards.constraints.instruction_verdicts:share_in_worker")


def followed(completion: str, extra: Mapping[str, Any], mode: str = STRICT) -> list[bool]:
  """Returns whether a completion follows each instruction of its problem.

  Args:
    completion: any text, of which what follows the thinking counts; a blank one follows no
      instruction.
    extra: `Problem.extra`, accepted by `check_instructions`.
    mode: "strict", or "loose": the instruction counts as followed if any of eight variants of the
      text follows it, which lack the first line, the last line, all stars, or several of these
      (section 2.2 of 2311.07911).
  """
  completion = after_thinking(completion)
  texts = [completion]
  if mode == LOOSE:
    lines = completion.split("\n")
    texts += ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    texts = list(dict.fromkeys(texts + [text.replace("*", "") for text in texts]))
  texts = [text for text in texts if text.strip()]
  verdicts = []
  for name, given in zip(extra["instruction_id_list"], extra["kwargs"], strict=True):
    arguments = _given(given)
    follows = INSTRUCTIONS[name].follows
    verdicts.append(any(follows(text, **arguments) for text in texts))
  return verdicts


def _given(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
  return {name: value for name, value in (arguments or {}).items() if value}


def check_instructions(answer: str, extra: Mapping[str, Any]) -> None:
  """Checks that the instructions of a problem can be checked.

  Raises:
    ValueError: there are none, one is unknown, or its arguments are not what it needs.
    MissingPackage: an instruction needs a package that is not installed.
  """
  names = extra.get("instruction_id_list")
  kwargs = extra.get("kwargs")
  if not isinstance(names, list | tuple) or not names:
    raise ValueError("is of kind 'constraints', but has no list extra.instruction_id_list")
  is_arguments = lambda value: value is None or isinstance(value, Mapping)
  if not isinstance(kwargs, list | tuple) or not all(map(is_arguments, kwargs)):
    raise ValueError("is of kind 'constraints', but extra.kwargs is not a list of objects")
  if len(names) != len(kwargs):
    raise ValueError(f"has {len(names)} instructions, but {len(kwargs)} kwargs")
  for name, arguments in zip(names, kwargs, strict=True):
    _check_instruction(name, _given(arguments))


def _check_instruction(name: Any, arguments: Mapping[str, Any]) -> None:
  instruction = INSTRUCTIONS.get(name) if isinstance(name, str) else None
  if not instruction:
    suggestion = did_you_mean(name, INSTRUCTIONS) if isinstance(name, str) else ""
    raise ValueError(f"has the unknown instruction {str(name)[:SHOWN_CHARS]!r}{suggestion}")
  if unknown := [key for key in arguments if key not in instruction.arguments]:
    valid = ", ".join(instruction.arguments) or "none"
    raise ValueError(f"has an argument {unknown[0]!r} of {name}; its arguments are {valid}")
  for key, problem_of in instruction.arguments.items():
    if key not in arguments:
      raise ValueError(f"has no argument {key} of {name}")
    if problem := problem_of(arguments[key]):
      raise ValueError(
        f"has the argument {key} = {str(arguments[key])[:SHOWN_CHARS]!r} of {name}, which {problem}"
      )
  if arguments.get("nth_paragraph", 0) > arguments.get("num_paragraphs", 0):
    raise ValueError(f"has an nth_paragraph above the num_paragraphs of {name}")
  instruction.require(f"the instruction {name}")
