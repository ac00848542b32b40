"""Messages between the judge and the program."""

import string
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_jax.runtime.sandbox.inside import Peer, Remote, decode, encode


class Wire:
  """Both ends of the connection. An exported object gets a number as its key."""

  COLLECTIONS = Peer.COLLECTIONS
  VALUES = Peer.VALUES

  def __init__(self):
    self.exported = {}
    self.remotes = {}

  def export(self, x):
    self.exported[len(self.exported)] = x
    return len(self.exported) - 1


def same(a, b):
  if type(a) is not type(b):
    return False
  if isinstance(a, list | tuple):
    return len(a) == len(b) and all(map(same, a, b))
  return a == b or a != a  # NaN


SCALARS = [
  st.none(),
  st.booleans(),
  st.integers(),
  st.floats(),
  st.text(st.characters()),
  st.binary(),
  st.fractions(),
  st.decimals(allow_nan=False),
]


def collections_of(values):
  dicts = st.dictionaries(st.text(), st.integers())
  return st.lists(values) | st.tuples(values, values) | dicts | st.frozensets(st.integers())


@settings(deadline=None)
@given(st.recursive(st.one_of(SCALARS), collections_of, max_leaves=20))
def test_values_cross_unchanged(value):
  wire = Wire()
  assert same(decode(encode(value, wire), wire), value)


DATA_TYPES = (
  *(type(None), bool, int, float, complex, str, bytes, bytearray),
  *(list, tuple, set, frozenset, dict, range, type, Remote, Fraction),
)


@settings(deadline=None)
@given(st.binary() | st.text(string.printable).map(lambda text: f"{len(text)} {text}".encode()))
def test_no_message_creates_anything_but_data(message):
  wire = Wire()
  try:
    value = decode(message, wire)
  except Exception:
    return
  kind = type(value)
  assert kind in DATA_TYPES or kind.__module__ in ("decimal", "collections", "datetime")
