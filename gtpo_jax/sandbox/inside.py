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
in the judge. Other objects of the program stay in its process, and a `Remote` in the tests forwards
their methods, attributes, items and iteration. Compared with a value of the tests, such an object
counts as the plain value that its class extends (a subclass of int as an int), or as unequal. A
program gains nothing from an `__eq__` that is always true, or from a difference that is always 0.

Limits of this scheme: A program may have memorized the answers. Tests of objects of the program's
own classes (`stack.pop()`, `Point(1, 2) == Point(1, 2)`) trust these classes. Identity (`result is
argument`) is not preserved. `except` clauses of the tests cannot name the program's own exception
classes. A test that passes an object of its own class gets no verdict.
"""

from __future__ import annotations

import _operator as operator  # operator itself is Python code, and not loaded at start
import builtins
import os
import sys

# --- messages ---


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
    "defaultdict": ("collections", lambda x: (x.default_factory, dict(x))),
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

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
BINARY = str.split("add sub mul truediv floordiv mod pow matmul lshift rshift and_ or_ xor")
UNARY = str.split(
  "neg pos invert abs int float complex round index bool len hash str repr getitem setitem delitem "
  "next setattr delattr"
)


def plain_value(remote: Remote) -> object:
  """Returns the remote object as the plain type that its class extends; None if there is none."""
  value = remote._remote_peer.ask("plain", remote)
  return None if type(value) is Remote else value


def operators(remote: type) -> type:
  """Adds the operators to `Remote`. The module's docstring describes how they compare objects."""

  def comparison(name):
    def compare(self, other):
      if type(other) is Remote:
        return self._remote_peer.ask(name, self, other)
      plain = plain_value(self)
      if plain is None:
        return name == "ne" if name in ("eq", "ne") else NotImplemented
      return getattr(operator, name)(plain, other)

    return compare

  def binary(name, swap):
    def operate(self, other):
      mixed = type(other) is not Remote
      plain = plain_value(self) if mixed else None
      if plain is not None:
        operands = (other, plain) if swap else (plain, other)
        return getattr(operator, name)(*operands)
      operands = (other, self) if swap else (self, other)
      result = self._remote_peer.ask(name, *operands)
      return checked(self, result, mixed or other._remote_mixed)

    return operate

  def unary(name):
    return lambda self, *more: checked(self, self._remote_peer.ask(name, self, *more), False)

  def checked(self, result, mixed):
    """Rejects plain values that the program computed from a value of the tests.

    Such a value proves nothing: the program could return 0 as the difference of any two values.
    """
    if not (mixed or self._remote_mixed):
      return result
    if type(result) is not Remote:
      raise TypeError("the program's operators must not turn values of the tests into plain values")
    object.__setattr__(result, "_remote_mixed", True)
    return result

  for name in COMPARISONS:
    setattr(remote, f"__{name}__", comparison(name))
  for name in BINARY:
    setattr(remote, f"__{name.strip('_')}__", binary(name, False))
    setattr(remote, f"__r{name.strip('_')}__", binary(name, True))
  for name in UNARY:
    setattr(remote, f"__{name}__", unary(name))
  return remote


@operators
class Remote:
  """A proxy for an object in the other process."""

  __slots__ = ("_remote_key", "_remote_mixed", "_remote_peer")

  def __init__(self, peer, key):
    for name, value in (("peer", peer), ("key", key), ("mixed", False)):
      object.__setattr__(self, f"_remote_{name}", value)

  def __getattr__(self, name):
    if name.startswith("__") and name not in ("__name__", "__doc__"):
      raise AttributeError(name)
    return self._remote_peer.ask("getattr", self, name)

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

  def __contains__(self, item):
    plain = plain_value(self)
    return any(x == item for x in self) if plain is None else item in plain

  def __instancecheck__(self, x):
    return self._remote_peer.ask("isinstance", x, self)

  def __reduce_ex__(self, protocol):
    raise TypeError("an object of the program cannot be copied here")


# --- the program's side ---

PLAIN_TYPES = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset)


def serve(peer: Peer, op: str, *args) -> object:
  """Answers a question of the judge. It runs in the program's process, so no answer is trusted.

  It calls the program's code without helpers, which would use up frames of its recursion limit.
  """
  if op == "call":
    function, given, named = args
    before = [encode(x, peer) if type(x) in (list, dict, set, bytearray) else None for x in given]
    value = function(*given, **named)
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
  if op == "plain":
    kind = next((kind for kind in PLAIN_TYPES if isinstance(args[0], kind)), None)
    return kind and kind(args[0])
  return getattr(operator if hasattr(operator, op) else builtins, op)(*args)


def close_others(pipes: tuple) -> None:
  """Closes all descriptors above stderr except `pipes`, which must be in ascending order."""
  for low, high in zip((2, *pipes), (*pipes, 65536), strict=True):
    os.closerange(low + 1, high)


# --- the judge's side ---


def names_in(code) -> set:
  """Returns all names that a code object and the functions in it look up."""
  return set(code.co_names).union(*(names_in(x) for x in code.co_consts if type(x) is type(code)))


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
    names = names_in(code) - set(space)
    # The tests never use the program's versions of builtins, such as `sorted` or `all`, which could
    # be fakes. The exception is an MBPP problem in which the only name is `sum`, the entry point.
    names = {name for name in names if not hasattr(builtins, name)} or names
    values, modules = peer.ask("names", sorted(names))
    space.update({name: value for name, value in values.items() if name in names})
    for name in modules:  # the tests get their own copy of a module
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

  Args:
    report: descriptor of the pipe for the verdict.
    payload: descriptor of the file whose private part starts at `private_at`.
    private_at: offset in bytes.
    program: text of the program.
    by_tests: whether tests call the program; if not, it runs as `__main__`.
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
