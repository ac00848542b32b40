"""Calls reasoning-gym in processes of its own; imports the standard library until it does.

    python -P library.py names
    python -P library.py rows TASK KNOBS_AS_JSON SIZE SEED

Every line of the output is JSON: the names, or for each row [entry] or the reason, as text, why it
cannot be made. The first line is the problem with the task or its knobs, or null. Some tasks draw
from sets of Python or from its global generator: their rows are a function of seed and index only
if the process has a fixed PYTHONHASHSEED and makes all rows in order. The caller provides for that.

`score` runs in the workers of `math/worker_pool.py`. Some scorers of the library evaluate answers
as Python; here, none does (`_is_plain`, `LITERALS`).

Source: reasoning-gym (2505.24760).
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import enum
import functools
import importlib
import json
import math
import random
import re
import sys
import typing
import zlib
from collections.abc import Callable, Sequence
from typing import Any

Entry = dict[str, Any]

LEFT_OUT = ("composite",)  # mixes of others: see the weights of data.train
# Tasks whose boards are tuples, which JSON does not have.
TUPLES = ("arc_agi", "rearc")
# Modules whose scorers call eval on an answer that is written as a Python list.
LITERALS = (
  "algorithmic.binary_matrix",
  "algorithmic.number_sorting",
  "algorithmic.spiral_matrix",
  "algorithmic.string_insertion",
  "games.n_queens",
)
# Tasks whose scorers hand the answer to SymPy's parser, which evaluates it as Python.
EXPRESSIONS = (
  "countdown",
  "intermediate_integration",
  "polynomial_multiplication",
  "puzzle24",
  "simple_integration",
)
_FUNCTIONS = """
Abs C E Rational abs acos acosh acot acsc asec asin asinh atan atanh cos cosh cot csc exp ln log pi
sec sin sinh sqrt tan tanh
"""
_EXPRESSION = re.compile(r"(?:[\w\s+\-*/^(),!=]|\.(?![A-Za-z]))*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*")
_BITWISE = re.compile(r"[0-9a-fA-Fx+\-*&|^~<>()\s]*")


def score(problem: str, answer: str) -> float | None:
  """Returns the library's score of an answer; None if it is no finite number.

  The problem is a text from `scores.pack`.
  """
  name, knobs, entry = json.loads(zlib.decompress(base64.b64decode(problem)))
  if not _is_plain(name, answer, entry):
    return 0.0
  if name in TUPLES:
    metadata = entry["metadata"]
    boards = {key: _tuples(metadata[key]) for key in ("input", "output") if key in metadata}
    entry["metadata"] = metadata | boards
  value = float(_scorer(name, json.dumps(knobs))(answer, entry))
  return value if math.isfinite(value) else None


def _is_plain(name: str, answer: str, entry: Entry) -> bool:
  """Returns whether the scorer can be given the answer without running code that it contains."""
  if name == "bitwise_arithmetic":
    return bool(_BITWISE.fullmatch(str(entry["metadata"].get("problem", ""))))
  if name not in EXPRESSIONS:
    return True
  names = [name for name in _NAME.findall(answer) if len(name) > 1]
  return bool(_EXPRESSION.fullmatch(answer)) and set(names) <= set(_FUNCTIONS.split())


def _tuples(value: Any) -> Any:
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


@functools.lru_cache(maxsize=256)
def _scorer(name: str, knobs: str) -> Callable[[str, Entry], float]:
  """Returns the scorer of a task with these knobs, which some scorers read."""
  return _dataset(name, json.loads(knobs)).score_answer


def _datasets() -> dict[str, tuple[type, type]]:
  import reasoning_gym  # noqa: F401 (registers the tasks)
  from reasoning_gym.factory import DATASETS

  for module in LITERALS:
    importlib.import_module(f"reasoning_gym.{module}").eval = ast.literal_eval
  return {name: DATASETS[name] for name in sorted(DATASETS) if name not in LEFT_OUT}


def _dataset(name: str, knobs: dict[str, list[str]], **own: int) -> Any:
  """Returns a dataset of the library.

  Raises:
    ValueError: there is no such task or knob, or a value is out of bounds.
  """
  tasks = _datasets()
  if name not in tasks:
    raise ValueError(f"unknown task {name!r}")
  dataset, config = tasks[name]
  types = typing.get_type_hints(config)
  defaults = config()
  values = {}
  for key, texts in knobs.items():
    if key not in types or key in ("size", "seed"):
      valid = sorted(types.keys() - {"size", "seed"})
      raise ValueError(f"unknown knob {key!r}; valid are {', '.join(valid)}")
    try:
      values[key] = _value(types[key], texts, getattr(defaults, key))
    except (TypeError, ValueError) as error:
      raise ValueError(f"{key} = {', '.join(texts)!r} is refused: {error}") from None
  try:
    return dataset(config=config(**values, **own))
  except (AssertionError, TypeError, ValueError) as error:
    raise ValueError(str(error) or f"the knobs {knobs} are refused") from None


def _value(kind: Any, texts: Sequence[str], default: Any) -> Any:
  """Converts the texts of a knob to its type; a repeated knob is a list."""
  origin = typing.get_origin(kind)
  arguments = [argument for argument in typing.get_args(kind) if argument is not type(None)]
  if origin is typing.Union:
    return None if list(texts) == ["none"] else _value(arguments[0], texts, default)
  if isinstance(default, list | tuple) or kind is tuple or origin in (list, tuple):
    item = arguments[0] if arguments else type(default[0])
    return type(default or [])(_value(item, [text], None) for text in texts)
  if len(texts) != 1:
    raise ValueError("it takes one value")
  (text,) = texts
  if origin is typing.Literal:
    if text not in arguments:
      raise ValueError(f"valid are {', '.join(arguments)}")
    return text
  if kind is bool:
    if text.lower() not in ("true", "false"):
      raise ValueError("valid are True, False")
    return text.lower() == "true"
  if kind in (int, float, str) or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
    return kind(text)
  raise ValueError(f"a value of type {getattr(kind, '__name__', kind)} cannot be set here")


def _plain(value: Any) -> Any:
  """Converts what JSON cannot express."""
  if isinstance(value, set | frozenset):
    return sorted(value, key=repr)
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return dataclasses.asdict(value)
  return value.item() if hasattr(value, "item") else str(value)


def _print_rows(name: str, knobs: dict[str, list[str]], size: int, seed: int) -> None:
  random.seed(seed)
  try:
    dataset = _dataset(name, knobs, size=size, seed=seed)
  except Exception as error:
    _print(f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error))
    return
  _print(None)
  for index in range(size):
    random.seed(f"{seed} {index}")
    try:
      line = json.dumps([dataset[index]], default=_plain)
    except Exception as error:
      line = json.dumps(f"{type(error).__name__}: {error}")
    _print(json.loads(line))


def _print(value: Any) -> None:
  OUTPUT.write(json.dumps(value) + "\n")
  OUTPUT.flush()


if __name__ == "__main__":
  OUTPUT, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no row
  if sys.argv[1] == "names":
    _print(list(_datasets()))
  else:
    _print_rows(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
