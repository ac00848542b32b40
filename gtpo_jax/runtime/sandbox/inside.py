"""The code that runs in the sandbox, in two processes: the judge and the program.

It is compiled outside. It imports nothing from this package, which the sandbox does not contain.

The judge runs the tests. It reads them only after it has forked the program's process, which keeps
only its own ends of the two message pipes and cannot read the judge's memory. In the tests, every
name of the program is a proxy: a call sends the arguments to the program's process, and the reply
contains the result. A program can only reply: it cannot skip a test, reach an assert, or write the
verdict, which contains a secret and is sent through a pipe that the program does not have. If
tests call the program, its exit code and printed text cannot make it pass.

Values are passed as copies: None, bool, int, float, complex, str, bytes, bytearray, list, tuple,
set, frozenset, dict, range, builtin types, and Fraction, Decimal, date, time, datetime, timedelta,
deque, OrderedDict, Counter, defaultdict. If a call changes a list, dict, set or bytearray, the
tests see the change. The tests can pass functions of their own; when the program calls one, it runs
in the judge. An object whose class extends a plain type is copied as a value of that type, such as
a subclass of float as a float, unless the tests have constructed it. Other objects of the program
stay in its process, and a `Remote` in the tests can only be called, iterated, and asked for its
attributes. It has no operators, length, items, text or truth, so that a program gains nothing from
an `__eq__` that is always true or a difference that is always 0: what a test compares is a plain
value, or the test fails. If the tests use a name as a module, such as `math.isclose`, it is the
module of the library.

Limits of this scheme: A program may have memorized the answers. Tests of objects of the program's
own classes trust what their methods return (`stack.pop()`). Identity (`result is argument`) is not
preserved. `except` clauses of the tests cannot name the program's own exception classes. A test
that passes an object of its own class gets no verdict.
"""

from __future__ import annotations

import _operator as operator  # operator itself is Python code, and not loaded at start
import builtins
import os
import sys

# --- messages ---

# How a value of a class that extends a plain type is copied, whatever methods the class overrides.
PLAIN = {
  int: int.__int__,
  float: float.__float__,
  complex: complex.__complex__,
  str: str.__str__,
  bytes: lambda x: bytes.__getitem__(x, slice(None)),
  tuple: lambda x: tuple(tuple.__iter__(x)),
  list: lambda x: list(list.__iter__(x)),
  dict: lambda x: dict(dict.items(x)),
  set: lambda x: set(set.__iter__(x)),
  frozenset: lambda x: frozenset(frozenset.__iter__(x)),
}


def encode(value: object, peer: Peer) -> bytes:
  """Encodes a value as a message: a header of type tags, then all texts concatenated.

  An object of a type without a tag stays in this process. The message refers to it by a number.
  """
  tags = []
  texts = []

  def put(x):
    kind = type(x)
    if x is None or kind is bool:
      tags.append({None: "n", True: "t", False: "f"}[x])
    elif kind is int:
      tags.append(f"i{x:x}")  # hexadecimal: linear time, and no limit of 4300 digits
    elif kind is float:
      tags.append(f"d{x!r}")
    elif kind is str or kind is bytes or kind is bytearray:
      tags.append(f"{'s' if kind is str else 'b' if kind is bytes else 'y'}{len(x)}")
      texts.append(x if kind is str else x.decode("latin-1"))
    elif kind in peer.COLLECTIONS:
      tags.append(f"{peer.COLLECTIONS[kind]}{len(x)}")
      for item in x:
        put(item)
    elif kind is dict:
      tags.append(f"m{len(x)}")
      for pair in x.items():
        put(pair)
    elif kind is Remote:
      tags.append(f"q{x._remote_key}")
    elif kind is type and getattr(builtins, x.__name__, None) is x:
      tags.append(f"T{x.__name__}")
    elif is_library_value(kind):
      _, arguments_of = peer.VALUES[kind.__name__]
      tags.append(f"V{kind.__name__}")
      put(arguments_of(x))
    elif id(x) not in peer.keys and (base := next((x for x in PLAIN if issubclass(kind, x)), None)):
      put(PLAIN[base](x))
    else:
      tags.append(f"p{peer.export(x)}")

  def is_library_value(kind):
    if kind.__name__ not in peer.VALUES:
      return False
    module, _ = peer.VALUES[kind.__name__]
    return getattr(sys.modules.get(module), kind.__name__, None) is kind

  put(value)
  header = " ".join(tags)
  return f"{len(header)} {header}{''.join(texts)}".encode("utf-8", "surrogatepass")


def decode(data: bytes, peer: Peer) -> object:
  """Decodes a message from the other process, which is not trusted.

  The result consists of plain values and `Remote` proxies. Any other message raises an exception.
  """
  size, _, text = data.decode("utf-8", "surrogatepass").partition(" ")
  tags = iter(text[: int(size)].split(" "))
  position = int(size)
  collections = {code: kind for kind, code in peer.COLLECTIONS.items()}

  def take():
    nonlocal position
    tag = next(tags)
    code = tag[0]
    rest = tag[1:]
    if code in "ntf":
      return {"n": None, "t": True, "f": False}[code]
    if code == "i":
      return int(rest, 16)
    if code == "d":
      return float(rest)
    if code in "sby":
      position += int(rest)
      piece = text[position - int(rest) : position]
      return piece if code == "s" else (bytes if code == "b" else bytearray)(piece, "latin-1")
    if code in collections:
      return collections[code]([take() for _ in range(int(rest))])
    if code == "m":
      return dict([take() for _ in range(int(rest))])
    if code == "q":
      return peer.exported[int(rest)]
    if code == "p":
      return peer.remotes.setdefault(int(rest), Remote(peer, int(rest)))
    if code == "T" and isinstance(getattr(builtins, rest), type):
      return getattr(builtins, rest)
    module, _ = peer.VALUES[rest]  # code "V"; any other code raises KeyError
    return getattr(__import__(module), rest)(*take())

  return take()


class Peer:
  """One end of two pipes: asks the other process, and answers its questions while it waits."""

  COLLECTIONS = {list: "l", tuple: "u", set: "e", frozenset: "z"}  # noqa: RUF012
  VALUES = {  # noqa: RUF012 (type name: module, constructor arguments of an equal value)
    "Fraction": ("fractions", lambda x: (x.numerator, x.denominator)),
    "Decimal": ("decimal", lambda x: (str(x),)),
    "complex": ("builtins", lambda x: (x.real, x.imag)),
    "range": ("builtins", lambda x: (x.start, x.stop, x.step)),
    "deque": ("collections", lambda x: (list(x), x.maxlen)),
    "OrderedDict": ("collections", lambda x: (list(x.items()),)),
    "Counter": ("collections", lambda x: (dict(x),)),
    "defaultdict": (
      "collections",
      lambda x: (x.default_factory if type(x.default_factory) is type else None, dict(x)),
    ),
    "date": ("datetime", lambda x: (x.year, x.month, x.day)),
    "timedelta": ("datetime", lambda x: (x.days, x.seconds, x.microseconds)),
    "time": ("datetime", lambda x: (x.hour, x.minute, x.second, x.microsecond)),
    "datetime": (
      "datetime",
      lambda x: (x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond),
    ),
  }

  def __init__(self, read: int, write: int, serve, exportable=lambda x: True):
    self.read = read
    self.write = write
    self.serve = serve
    self.exportable = exportable
    self.exported = {}  # key -> object that the other process may refer to
    self.keys = {}  # id of such an object -> its key
    self.remotes = {}  # key -> proxy for an object in the other process
    self.ended = ""  # why the other process ended; empty while it runs
    self.unsupported = ""  # why these tests cannot be run; empty if they can

  def export(self, x) -> int:
    """Returns the key by which the other process may refer to x."""
    if id(x) not in self.keys:
      if not self.exportable(x):
        self.unsupported = f"the tests pass an object of {type(x).__name__}"
        raise TypeError(self.unsupported)
      self.keys[id(x)] = len(self.exported)
      self.exported[len(self.exported)] = x  # keeps x alive, so that its id is not reused
    return self.keys[id(x)]

  def send(self, *message) -> None:
    """Sends a message."""
    data = encode(message, self)
    view = memoryview(b"%016x" % len(data) + data)
    while view:
      view = view[os.write(self.write, view[: 2**20]) :]

  def read_exactly(self, size: int) -> bytes:
    """Reads `size` bytes. Raises EOFError if the other process has ended."""
    data = bytearray()
    while len(data) < size:
      piece = os.read(self.read, min(size - len(data), 2**20))
      if not piece:
        self.ended = "the program ended itself"
        raise EOFError(self.ended)
      data += piece
    return bytes(data)

  def receive(self):
    """Reads and decodes the next message."""
    return decode(self.read_exactly(int(self.read_exactly(16), 16)), self)

  def ask(self, *question):
    """Sends a question and returns the answer, or raises what the other process raised."""
    try:
      self.send("ask", *question)
    except OSError:  # the pipe has no reader any more
      self.ended = "the program ended itself"
      raise
    while True:
      kind, *rest = self.receive()
      if kind == "ask":
        self.answer(*rest)
      elif kind == "value":
        return rest[0]
      else:
        raise self.error(*rest)

  def answer(self, *question) -> None:
    """Sends the answer to a question, or the exception that it raised."""
    try:
      self.send("value", self.serve(self, *question))
    except BaseException as error:
      plain = all(type(x) in (int, float, str, bool) for x in error.args)
      names = [kind.__name__ for kind in type(error).__mro__]
      self.send("raised", names, error.args if plain else (str(error),))

  @staticmethod
  def error(names: list, arguments: tuple):
    """Rebuilds an exception from the names of its classes, the most derived first.

    An exception class of the program becomes a new subclass of the built-in that it extends.
    """
    kinds = (getattr(builtins, str(name), None) for name in names)
    base = next(x for x in kinds if isinstance(x, type) and issubclass(x, BaseException))
    kind = base if base.__name__ == names[0] else type(str(names[0]), (base,), {})
    try:
      return kind(*arguments)
    except TypeError:  # UnicodeDecodeError, for example, needs more arguments
      return Exception(*arguments)


# --- objects in the other process ---

REFUSED = str.split(
  "eq ne lt le gt ge add sub mul truediv floordiv mod pow matmul divmod lshift rshift and or xor "
  "radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rdivmod rlshift rrshift rand ror rxor "
  "neg pos invert abs int float complex round trunc floor ceil index bool len contains reversed "
  "hash str repr format bytes getitem setitem delitem enter exit"
)


def without_operators(remote: type) -> type:
  """Lets each operator of a class raise TypeError."""

  def refuse(name):
    def operate(self, *others):
      raise TypeError(f"an object of the program is not a plain value, so it has no {name}")

    return operate

  for name in REFUSED:
    setattr(remote, f"__{name}__", refuse(name))
  return remote


@without_operators
class Remote:
  """A proxy for an object in the other process."""

  __slots__ = ("_remote_key", "_remote_peer")

  def __init__(self, peer, key):
    object.__setattr__(self, "_remote_peer", peer)
    object.__setattr__(self, "_remote_key", key)

  def __getattr__(self, name):
    if name.startswith("__") and name not in ("__name__", "__doc__"):
      raise AttributeError(name)
    return self._remote_peer.ask("getattr", self, name)

  def __setattr__(self, name, value):
    self._remote_peer.ask("setattr", self, name, value)

  def __call__(self, *given, **named):  # noqa: D102
    value, changed = self._remote_peer.ask("call", self, given, named)
    for i, new in changed.items():
      old = given[i]
      if type(old) is type(new) and type(old) in (list, bytearray):
        old[:] = new
      elif type(old) is type(new) and type(old) in (dict, set):
        old.clear()
        old.update(new)
    return value

  def __iter__(self):
    iterator = self._remote_peer.ask("iter", self)
    while True:
      try:
        yield self._remote_peer.ask("next", iterator)
      except StopIteration:
        return

  def __next__(self):
    return self._remote_peer.ask("next", self)

  def __instancecheck__(self, x):
    return self._remote_peer.ask("isinstance", x, self)

  def __reduce_ex__(self, protocol):
    raise TypeError("an object of the program cannot be copied here")


# --- the program's side ---


def serve(peer: Peer, op: str, *args) -> object:
  """Answers a question of the judge. It runs in the program's process, so no answer is trusted.

  It calls the program's code without helpers, which would use up frames of its recursion limit.
  """
  if op == "call":
    function, given, named = args
    before = [encode(x, peer) if type(x) in (list, dict, set, bytearray) else None for x in given]
    value = function(*given, **named)
    if type(function) is type and type(value) is function:
      peer.export(value)  # an object that the tests construct, such as a class that extends dict
    if sys.stdout:
      sys.stdout.flush()
    changed = {
      i: x for i, x in enumerate(given) if before[i] is not None and encode(x, peer) != before[i]
    }
    return value, changed
  if op == "load":
    program = sys.modules["program"] = type(sys)("program")
    builtins.exit = builtins.quit = sys.exit
    exec(compile(peer.program, "<program>", "exec", dont_inherit=True), program.__dict__)
    if sys.stdout:
      sys.stdout.flush()
    return program
  if op == "names":
    attributes = vars(sys.modules["program"])
    known = {name: attributes[name] for name in args[0] if name in attributes}
    modules = [name for name, x in known.items() if type(x) is type(sys)]
    return {name: x for name, x in known.items() if name not in modules}, modules
  return getattr(operator if hasattr(operator, op) else builtins, op)(*args)


def close_others(pipes: tuple) -> None:
  """Closes all descriptors above stderr except `pipes`, which must be in ascending order."""
  for low, high in zip((2, *pipes), (*pipes, 65536), strict=True):
    os.closerange(low + 1, high)


# --- the judge's side ---


# Functions and classes of libraries that tests may use without importing them, and their modules.
LIBRARY_NAMES = {
  name: module
  for module, names in (
    ("collections", "Counter OrderedDict defaultdict deque namedtuple"),
    ("itertools", "accumulate chain combinations islice permutations zip_longest"),
    ("functools", "cmp_to_key reduce"),
    ("copy", "deepcopy"),
    ("fractions", "Fraction"),
    ("decimal", "Decimal"),
  )
  for name in names.split()
}


def names_in(code) -> set:
  """Returns all names that a code object and the functions in it look up."""
  return set(code.co_names).union(*(names_in(x) for x in code.co_consts if type(x) is type(code)))


def modules_in(tests: str) -> set:
  """Returns the names of libraries that tests use as modules, as `math` in `math.isclose(...)`."""
  libraries = sys.stdlib_module_names | {"np", "numpy", "pd", "pandas", "scipy", "torch"}
  if not any(f"{name}." in tests for name in libraries):
    return set()
  import ast

  nodes = list(ast.walk(ast.parse(tests)))
  called = {x.func.id for x in nodes if type(x) is ast.Call and type(x.func) is ast.Name}
  bases = [x.value for x in nodes if type(x) is ast.Attribute]
  return {x.id for x in bases if type(x) is ast.Name and x.id in libraries} - called


def judge(peer: Peer, tests: str) -> str:
  """Runs the tests and returns the verdict.

  The verdict is "passed" only if the tests end normally while the program is still running.
  """
  try:
    code = compile(tests, "<tests>", "exec", dont_inherit=True)
  except BaseException as error:
    return f"no verdict: the tests do not compile: {error}"
  error = None
  try:
    space = {"__name__": "tests", "__builtins__": builtins, "__program__": peer.ask("load")}
    modules = modules_in(tests)
    space.update({name: __import__(name) for name in modules & sys.stdlib_module_names})
    names = names_in(code) - set(space) - modules
    # The tests never use the program's versions of builtins and of well-known library functions,
    # such as `sorted` and `isclose`, which could be fakes. The exception is an MBPP problem whose
    # only name is `sum`, the entry point.
    import math

    homes = dict.fromkeys(vars(math), "math") | LIBRARY_NAMES
    own = [name for name in names if hasattr(builtins, name) or name in homes]
    names = names.difference(own) or names
    space.update({name: getattr(__import__(homes[name]), name) for name in own if name in homes})
    values, found = peer.ask("names", sorted(names))
    space.update({name: value for name, value in values.items() if name in names})
    for name in found:  # the tests get their own copy of a module
      if name in names & sys.stdlib_module_names:
        space[name] = __import__(name)
    exec(code, space)
  except BaseException as raised:
    error = raised
  if peer.unsupported:
    return f"no verdict: {peer.unsupported}"
  if peer.ended:
    return f"error: {peer.ended}"
  return describe(error, tests) if error is not None else "passed"


def describe(error: BaseException, tests: str) -> str:
  """Describes an exception by its type and first line, or by the line of the assert that failed."""
  try:
    detail = str(error).strip().partition("\n")[0]
  except BaseException:
    detail = ""
  line = 0
  trace = error.__traceback__
  while trace:
    line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "<tests>" else line
    trace = trace.tb_next
  if isinstance(error, AssertionError):
    return f"failed: {detail or (tests.split(chr(10))[max(line - 1, 0)]).strip()}"
  kind = "memory" if isinstance(error, MemoryError) else "error"
  return f"{kind}: {type(error).__name__}: {detail}"


def call_back(peer, op, function, given, named):
  """Calls a function that the tests passed to the program, the only thing a program may ask for."""
  if op != "call" or not any(function is x for x in peer.exported.values()):
    raise PermissionError(op)
  return function(*given, **named), {}


def is_function(x) -> bool:
  """Returns whether the tests may pass x to the program by reference."""
  return callable(x) and not isinstance(x, type)


def exit_reason(pid: int, peer: Peer, by_tests: bool) -> str:
  """Waits for the program's process to end and returns the verdict for its exit status."""
  status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
  if status == 0:
    return f"error: {peer.ended}" if by_tests else "passed"
  if status in (-24, -9):  # SIGXCPU and SIGKILL: the CPU limit
    return "timeout"
  how = "exit status" if status > 0 else "signal"
  return f"error: the program ended with {how} {abs(status)}"


def main(report: int, payload: int, private_at: int, program: str, by_tests: bool) -> None:
  """Forks the program's process, and only then reads the secret and the tests.

  The verdict goes to the pipe `report`; the private part of the file `payload` starts at
  `private_at`. Without tests that call it, the program runs as `__main__`.
  """
  import marshal

  for name in ("typing", "collections", "re", "math"):
    if f"import {name}" in program or f"from {name}" in program:
      __import__(name)  # before the fork, so once for both processes
  questions_out, questions_in = os.pipe()
  answers_out, answers_in = os.pipe()
  pid = os.fork()
  if not pid:
    close_others((questions_out, answers_in) if by_tests else ())
    sys.argv[:] = ["program"]
    if not by_tests:
      module = sys.modules["__main__"] = type(sys)("__main__")
      builtins.exit = builtins.quit = sys.exit
      exec(compile(program, "<program>", "exec", dont_inherit=True), module.__dict__)
      return  # the process then ends like any Python process
    peer = Peer(questions_out, answers_in, serve)
    peer.program = program
    try:
      while True:
        peer.answer(*peer.receive()[1:])
    except EOFError:  # the judge is done
      os._exit(0)
  os.close(questions_out)
  os.close(answers_in)
  private_bytes = os.fstat(payload).st_size - private_at
  secret, tests = marshal.loads(os.pread(payload, private_bytes, private_at))
  peer = Peer(answers_out, questions_in, call_back, is_function)
  verdict = judge(peer, tests) if by_tests else ""
  if peer.ended or not by_tests:
    verdict = exit_reason(pid, peer, by_tests)
  line = secret + " ".join(verdict.split())[:300] + "\n"
  os.write(report, line.encode("utf-8", "replace"))
  os._exit(0)
