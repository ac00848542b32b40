"""Schemas of functions, and calls of them with whatever a model writes."""

import asyncio
import enum
import functools
import inspect
import json
import sys
from typing import Literal

import pytest

from gtpo_jax.environments.tools import Tools, as_text, schema_of
from gtpo_jax.environments.turns import ToolCall, Written
from gtpo_jax.runtime.errors import UserError


def search(query: str, top_k: int = 3, sort: Literal["date", "score"] = "score") -> list[str]:
  """Searches the handbook.

  Args:
    query: what to look for,
      in words.
    top_k: how many results.
    sort: the order.

  Returns:
    The titles.
  """
  return [f"{query} {i} by {sort}" for i in range(top_k)]


def plot(points: list[tuple[float, float]], labels: dict[str, int] | None = None) -> str:
  """Plots.

  Args:
    points: x and y.
    labels: by name.
  """
  return f"{points} {labels}"


async def wait(seconds: float):
  """Waits.

  Args:
    seconds: how long.
  """
  await asyncio.sleep(0)
  if seconds < 0:
    raise ValueError("the past is over")
  return {"waited": seconds}


def fail(how: str):
  """Raises.

  Args:
    how: the way.
  """
  if how == "exit":
    sys.exit(3)
  if how == "str":

    class Silent(Exception):
      def __str__(self):
        raise RuntimeError

    raise Silent
  raise KeyError(how)


class Color(enum.Enum):
  RED = "red"
  BLUE = "blue"


def paint(
  color: Color,
  at: tuple[int, float] = (0, 0.0),
  by_row: dict[int, Color] | None = None,
  rest: int | list[tuple[int, int]] = 0,
):
  """Paints.

  Args:
    color: the color.
    at: the place.
    by_row: other colors.
    rest: a number, or places.
  """
  return repr([color, at, by_row, rest])


@functools.cache
def tools():
  """Made in a test, because transformers imports torch to write schemas."""
  return Tools([search, plot, wait, fail, paint])


def run(name, **arguments):
  result = tools().run(ToolCall(name, arguments))
  return asyncio.run(as_coroutine(result)) if inspect.isawaitable(result) else result


async def as_coroutine(result):
  return await result


def test_the_schema_has_types_and_descriptions():
  assert tools().schemas[0]["function"] == {
    "name": "search",
    "description": "Searches the handbook.",
    "parameters": {
      "type": "object",
      "properties": {
        "query": {"type": "string", "description": "what to look for, in words."},
        "top_k": {"type": "integer", "description": "how many results."},
        "sort": {"type": "string", "enum": ["date", "score"], "description": "the order."},
      },
      "required": ["query"],
    },
    "return": {"type": "array", "items": {"type": "string"}, "description": "The titles."},
  }
  assert len(tools()) == 5


def test_calls_return_texts():
  assert run("search", query="jax", top_k=2) == ('["jax 0 by score", "jax 1 by score"]', False)
  assert run("search", query="jax", top_k=1.0) == ('["jax 0 by score"]', False)
  assert run("plot", points=[[1, 2.5]], labels={"a": 1}) == ("[(1, 2.5)] {'a': 1}", False)
  assert run("plot", points=[], labels=None) == ("[] None", False)
  assert run("plot", points=[[1, 2]]) == ("[(1, 2)] None", False)
  assert run("wait", seconds=1) == ('{"waited": 1}', False)


def test_arguments_have_the_types_of_the_hints():
  red = "<Color.RED: 'red'>"
  assert run("paint", color="red").text == f"[{red}, (0, 0.0), None, 0]"
  arguments = {"color": "red", "at": [1, 2], "by_row": {"3": "red"}, "rest": [[4, 5]]}
  assert run("paint", **arguments).text == f"[{red}, (1, 2), {{3: {red}}}, [(4, 5)]]"


def test_a_written_argument_means_what_the_schema_says():
  written = lambda **arguments: {name: Written(text) for name, text in arguments.items()}
  assert run("search", **written(query="3", top_k="2", sort="date")) == run(
    "search", query="3", top_k=2, sort="date"
  )
  assert run("plot", **written(points="[[1, 2.5]]", labels='{"a": 1}')) == run(
    "plot", points=[[1, 2.5]], labels={"a": 1}
  )
  assert run("search", **written(query="a", top_k="two")).text.endswith('integer, got "two"')
  assert run("paint", **written(color="red", at="[1, 2]", rest="[]")) == run(
    "paint", color="red", at=[1, 2], rest=[]
  )


@pytest.mark.parametrize(
  ("name", "arguments", "error"),
  [
    ("serach", {}, "there is no tool 'serach', did you mean 'search'?"),
    ("xyz", {}, "there is no tool 'xyz'; the tools are: search, plot, wait, fail, paint"),
    ("search", {}, "search: the argument 'query' is missing"),
    ("search", {"qery": "a"}, "search: there is no argument 'qery', did you mean 'query'?"),
    ("search", {"query": 3}, "search: query must be of type string, got 3"),
    ("search", {"query": "a", "top_k": "2"}, 'search: top_k must be of type integer, got "2"'),
    ("search", {"query": "a", "top_k": True}, "search: top_k must be of type integer, got true"),
    ("search", {"query": "a", "top_k": 1.5}, "search: top_k must be of type integer, got 1.5"),
    ("search", {"query": "a", "sort": "x"}, 'search: sort must be one of "date", "score", got "x"'),
    ("plot", {"points": [[1, 2], [3]]}, "plot: points[1] must have 2 items, got 1"),
    ("plot", {"points": [[1, "a"]]}, 'plot: points[0][1] must be of type number, got "a"'),
    ("plot", {"points": [], "labels": {"a": "b"}}, "plot: labels['a'] must be of type integer"),
    ("paint", {"color": "green"}, 'paint: color must be one of "red", "blue", got "green"'),
    (
      "paint",
      {"color": "red", "by_row": {"a": "red"}},
      'paint: the keys of by_row must be numbers, got "a"',
    ),
    ("wait", {"seconds": -1}, "ValueError: the past is over"),
    ("fail", {"how": "x"}, "KeyError: 'x'"),
    ("fail", {"how": "exit"}, "SystemExit: 3"),
    ("fail", {"how": "str"}, "Silent"),
  ],
)
def test_the_model_reads_what_was_wrong(name, arguments, error):
  text, failed = run(name, **arguments)
  assert failed
  assert text.startswith(f"Error: {error}")
  assert len(text) <= 500


@pytest.mark.parametrize(
  ("value", "text"),
  [
    ("as it is\n", "as it is\n"),
    (None, "null"),
    (3.5, "3.5"),
    ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
    (b"\xffab", "\ufffdab"),
    ("\ud800", "?"),
    ({1}, "{1}"),
    (range(3), "range(0, 3)"),
  ],
)
def test_values_become_texts(value, text):
  assert as_text(value) == text


def test_a_value_that_contains_itself_has_a_text():
  value = []
  value.append(value)
  assert as_text(value) == "[[...]]"
  deep = functools.reduce(lambda inner, _: [inner], range(100_000), [])
  with pytest.raises(RecursionError):
    json.dumps(deep)
  with pytest.raises(RecursionError):
    as_text(deep)


class Callable:
  """Not a function."""

  def __call__(self, x: int):
    """Adds."""


def untyped(x):
  """Adds.

  Args:
    x: a number.
  """


def undocumented(x: int):
  """Adds."""


def silent(x: int):
  pass


def strange(x: Callable):
  """Adds.

  Args:
    x: a number.
  """


def starred(*numbers: int):
  """Adds.

  Args:
    numbers: the numbers.
  """


@pytest.mark.parametrize(
  ("function", "error"),
  [
    (untyped, "tool 'untyped' has no usable schema: Argument x is missing a type hint"),
    (undocumented, "the docstring has no description for the argument 'x'; give each"),
    (silent, "tool 'silent' has no usable schema: .* it has no docstring!"),
    (strange, "tool 'strange' has no usable schema: Couldn't convert the type hint"),
    (starred, r"tool 'starred' has the parameter '\*numbers', but models pass all arguments by"),
    (Callable(), "a tool is a function with a name, got <"),
    (functools.partial(search, "a"), r"a tool is a function with a name, got functools.partial"),
    (lambda x: x, "a tool is a function with a name"),
    (dict.fromkeys, "tool 'fromkeys'"),
  ],
)
def test_functions_that_cannot_be_tools(function, error):
  with pytest.raises(UserError, match=error) as caught:
    schema_of(function)
  assert "\n" not in str(caught.value)


def test_two_tools_of_one_name():
  with pytest.raises(UserError, match="two tools have the name 'search'; rename one of them"):
    Tools([search, search])


def test_methods_are_tools():
  class Shop:
    def __init__(self, price):
      self.price = price

    def buy(self, count: int) -> int:
      """Buys.

      Args:
        count: how many.
      """
      return self.price * count

  tools = Tools([Shop(3).buy])
  assert list(tools.schemas[0]["function"]["parameters"]["properties"]) == ["count"]
  assert tools.run(ToolCall("buy", {"count": 4})) == ("12", False)
