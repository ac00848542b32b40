"""Settings as fields of dataclasses that carry their default, their meaning and their bound.

A setting is declared once, where it is used:

    @dataclasses.dataclass(frozen=True)
    class Clip(Checked):
      eps_low: float = setting(0.2, "the ratio is clipped at 1 - eps_low.", SHARE)

The checks of values, the fields of the config, and the documentation read this declaration.
"""

from __future__ import annotations

import dataclasses
import numbers
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from gtpo_jax.runtime.errors import UserError

INFINITY = float("inf")
# Programs compute with float32 and int32. There, the reciprocal of the smallest number and the
# square of the largest are finite, also times 1e8.
SMALLEST = 1e-30
LARGEST = 1e15
LARGEST_INTEGER = 2**31 - 1
SHOWN_CHARS = 80  # of a value in a message


class Bound(NamedTuple):
  """The values that a setting may have."""

  accepts: Callable[[Any], bool]  # whether a value is one of them
  description: str  # completes "NAME must be ..."
  reason: str = ""  # why, for values that look reasonable; may be empty
  largest: int = LARGEST_INTEGER  # the largest integer


def number(test: Callable[[Any], bool], description: str, kind: type = numbers.Real) -> Bound:
  """Returns the bound of the numbers for which `test` is true; it must be false for NaN."""
  accepts = lambda x: isinstance(x, kind) and not isinstance(x, bool) and bool(test(x))
  return Bound(accepts, description)


def or_auto(bound: Bound) -> Bound:
  """Returns the bound of a setting that may also be "auto"."""
  return Bound(lambda x: x == AUTO or bound.accepts(x), f'{bound.description}, or "{AUTO}"')


def at_least(least: int, reason: str = "") -> Bound:
  """Returns the bound of the integers from `least`."""
  return number(lambda x: x >= least, f"at least {least}")._replace(reason=reason)


def one_of(names: Iterable[str]) -> Bound:
  """Returns the bound of some names, of which one may be empty."""
  choices = tuple(names)
  listed = [name for name in choices if name]
  description = ("one of " if len(listed) > 1 else "") + ", ".join(listed)
  or_empty = ", or empty" if "" in choices else ""
  return Bound(lambda x: isinstance(x, str) and x in choices, f"{description}{or_empty}")


FLAG = Bound(lambda x: isinstance(x, bool), "True or False")
SHARE = number(lambda x: 0 < x <= 1, "in (0, 1]")
BELOW_1 = number(lambda x: 0 <= x < 1, "in [0, 1)")
AT_LEAST_0 = number(lambda x: 0 <= x < INFINITY, "at least 0 and finite")
AUTO = "auto"  # what the memory of the devices, or their units, suggest
ABOVE_0 = number(lambda x: 0 < x < INFINITY, "above 0 and finite")
ABOVE_1 = number(lambda x: 1 < x < INFINITY, "above 1 and finite")
AT_LEAST_1 = number(lambda x: 1 <= x < INFINITY, "at least 1 and finite")
FINITE = number(lambda x: abs(x) < INFINITY, "finite")


def setting(default: Any, meaning: str = "", bound: Bound | None = None) -> Any:
  """Returns a field of a dataclass.

  Args:
    default: the default value.
    meaning: what the setting does, with its unit and, if it is published, its source. One or more
      sentences; the first begins with a small letter. Empty for the fields of the config, whose
      meanings are in the docstrings of their sections.
    bound: the values that the setting may have; None if its type says all.
  """
  return dataclasses.field(default=default, metadata={"meaning": meaning, "bound": bound})


def check_bounds(section: Any, prefix: str) -> None:
  """Checks the fields of a dataclass, and of the dataclasses in it, against their bounds.

  Numbers must also have a size that programs can compute with, whatever their bound.

  Args:
    section: the dataclass.
    prefix: what an error message puts in front of the name of a field, such as "algorithm.".
  """
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    name = f"{prefix}{field.name}"
    bound = field.metadata.get("bound")
    if dataclasses.is_dataclass(value):
      check_bounds(value, f"{name}.")
    elif problem := find_problem(value, bound):
      raise UserError(f"{name} {problem}")


def find_problem(value: Any, bound: Bound | None = None) -> str:
  """Returns why a setting may not have this value, "must be ..., got ..."; empty if it may."""
  if bound and not bound.accepts(value):
    reason = f": {bound.reason}" if bound.reason else ""
    return f"must be {bound.description}, got {value!r}{reason}"
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    return ""
  if isinstance(value, numbers.Integral):
    largest = bound.largest if bound else LARGEST_INTEGER
    return "" if -largest <= value <= largest else f"must be at most {largest}, got {value!r}"
  if value and not SMALLEST <= abs(value) <= LARGEST:  # also NaN
    return f"must be 0 or from {SMALLEST:g} to {LARGEST:g} in size, got {value!r}"
  (rounded,) = struct.unpack("f", struct.pack("f", value))
  if bound and not bound.accepts(rounded):
    return f"must be {bound.description}, got {value!r}, which is {rounded!r} in float32"
  return ""


class Condition(NamedTuple):
  """When a setting is read."""

  needed: str  # completes "NAME only has an effect with ..."
  holds: Callable[[Any], Any]  # whether the setting is read, by the section or config that has it


class UnreadError(UserError):
  """Raised for a setting that nothing reads.

  Attributes:
    name: its dotted name.
    needed: what makes it read.
  """

  def __init__(self, message: str, name: str, needed: str):
    super().__init__(message)
    self.name = name
    self.needed = needed


def refuse_unread(section: Any, conditions: Mapping[str, Condition], prefix: str = "") -> None:
  """Refuses the first setting that differs from its default although its condition does not hold.

  Args:
    section: a dataclass of settings, perhaps with further ones in it.
    conditions: by dotted name, for the settings that are not always read.
    prefix: what the message puts in front of a name.
  """
  for name, value, default in _changed(section):
    condition = conditions.get(name)
    if condition and not condition.holds(section):
      needed = condition.needed
      shown = repr(default) if len(repr(default)) <= SHOWN_CHARS else "its default"
      raise UnreadError(
        f"{prefix}{name} = {value!r:.{SHOWN_CHARS}} only has an effect with {needed}; use that, or "
        f"leave {name.rpartition('.')[2]} at {shown}",
        f"{prefix}{name}",
        needed,
      )


def _changed(
  section: Any, original: Any = None, prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
  """Yields name, value and default of every setting that differs from its default.

  The defaults of a section in another section are those of `original`.
  """
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    default = field.default if original is None else getattr(original, field.name)
    if dataclasses.is_dataclass(value):
      yield from _changed(value, default, f"{prefix}{field.name}.")
    elif value != default:
      yield f"{prefix}{field.name}", value, default


@dataclasses.dataclass(frozen=True)
class Checked:
  """A base of dataclasses whose values are checked against their bounds when they are made."""

  prefix: ClassVar[str] = ""  # what error messages put in front of the name of a field
  # by name, the conditions of fields that are not always read; they hold for the instance
  read_if: ClassVar[Mapping[str, Condition]] = {}

  def __post_init__(self):
    check_bounds(self, self.prefix)
    refuse_unread(self, self.read_if, self.prefix)

  def _check_order(self, low: str, high: str) -> None:
    """Raises UserError if the field `low` is above the field `high`."""
    lower = getattr(self, low)
    upper = getattr(self, high)
    if lower > upper:
      raise UserError(f"{self.prefix}{low} must be at most {high} = {upper}, got {lower}")
