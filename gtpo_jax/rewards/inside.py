"""The code that runs inside the sandbox: the judge of a program, and the program's own side.

It is sent inside as text and imports nothing of the project, which does not exist there.

Two processes share one sandbox. The judge reads the tests only after it has forked the program's
process, which has none of the judge's pipes and cannot read its memory. In the tests, a name of the
program is a proxy that sends messages: call it with these values, answer with values. So a program
can do nothing but answer. It cannot skip a test, reach an assert, or write the verdict, which
carries a secret and leaves through a pipe that the program does not have. Exit codes and printed
text prove nothing.

Values cross as copies: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set,
frozenset, dict, range, builtin types, and Fraction, Decimal, date, time, datetime, timedelta,
deque, OrderedDict, Counter, defaultdict. A list, dict, set or bytearray that the call changes is
changed in the tests too. Functions of the tests can be passed and are called back. Other objects of
the program stay on its side, and a Remote forwards their methods, attributes, items and iteration.
Compared with the tests' own values, they count as the plain value that they extend, or as unequal.
So an `__eq__` that is always true, or a difference that is always 0, gains nothing.

Limits of this scheme: a program may know the answers by heart. If tests work with objects of the
program's own classes (`stack.pop()`, `Point(1, 2) == Point(1, 2)`), these classes answer. Identity
(`result is argument`) is not preserved, the program's own exception classes cannot be named in
`except`, and a test that passes an object of its own class gets no verdict.
"""

from __future__ import annotations

import _operator as operator  # operator itself is Python code, and not loaded at start
import builtins
import os
import sys

# --- messages ---


def encode(value: object, peer: Peer) -> bytes:
  """Returns a message: a header of tags, then all texts concatenated.

  An object that has no tag of its own stays on this side and is sent as a number.
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
  """Returns the value of a message from the other side, which is not trusted.

  It creates only data and Remotes, and raises for any other message.
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
    module, _ = peer.VALUES[rest]  # code "V"; KeyError for any other
    return getattr(__import__(module), rest)(*take())

  return take()


class Peer:
  """One end of two pipes: asks the other side, and answers its questions while it waits."""

  COLLECTIONS = {list: "l", tuple: "u", set: "e", frozenset: "z"}  # noqa: RUF012
  VALUES = {  # noqa: RUF012 (name: module, arguments that create an equal value)
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
    self.exported = {}  # by key: objects that the other side may name
    self.keys = {}  # by id: the keys of these objects
    self.remotes = {}  # by key: proxies of the other side's objects
    self.ended = ""  # why the other side is gone
    self.unsupported = ""  # why these tests cannot be run here

  def export(self, x) -> int:
    """Returns the key under which the other side may name x."""
    if id(x) not in self.keys:
      if not self.exportable(x):
        self.unsupported = f"the tests pass an object of {type(x).__name__}"
        raise TypeError(self.unsupported)
      self.keys[id(x)] = len(self.exported)
      self.exported[len(self.exported)] = x  # kept alive, so that its id stays its own
    return self.keys[id(x)]

  def send(self, *message) -> None:
    """Writes a complete message."""
    data = encode(message, self)
    view = memoryview(b"%016x" % len(data) + data)
    while view:
      view = view[os.write(self.write, view[: 2**20]) :]

  def read_exactly(self, size: int) -> bytes:
    """Returns the next bytes. Raises EOFError if the other side is gone."""
    data = bytearray()
    while len(data) < size:
      piece = os.read(self.read, min(size - len(data), 2**20))
      if not piece:
        self.ended = "the program ended itself"
        raise EOFError(self.ended)
      data += piece
    return bytes(data)

  def receive(self):
    """Returns the next message."""
    return decode(self.read_exactly(int(self.read_exactly(16), 16)), self)

  def ask(self, *question):
    """Returns the other side's answer, or raises what it raised."""
    try:
      self.send("ask", *question)
    except OSError:  # nobody reads the pipe any more
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
    """Sends back the value, or what was raised."""
    try:
      self.send("value", self.serve(self, *question))
    except BaseException as error:
      plain = all(type(x) in (int, float, str, bool) for x in error.args)
      names = [kind.__name__ for kind in type(error).__mro__]
      self.send("raised", names, error.args if plain else (str(error),))

  @staticmethod
  def error(names: list, arguments: tuple):
    """Returns the exception with these class names, the most derived first.

    An exception class of the program becomes a new subclass of the built-in that it extends.
    """
    kinds = (getattr(builtins, str(name), None) for name in names)
    base = next(x for x in kinds if isinstance(x, type) and issubclass(x, BaseException))
    kind = base if base.__name__ == names[0] else type(str(names[0]), (base,), {})
    try:
      return kind(*arguments)
    except TypeError:  # UnicodeDecodeError, for example, needs more arguments
      return Exception(*arguments)


# --- objects of the other side ---

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
BINARY = str.split("add sub mul truediv floordiv mod pow matmul lshift rshift and_ or_ xor")
UNARY = str.split(
  "neg pos invert abs int float complex round index bool len hash str repr getitem setitem delitem "
  "next setattr delattr"
)


def plain_value(remote: Remote) -> object:
  """Returns a copy of the plain value that the remote object extends, None if there is none."""
  value = remote._remote_peer.ask("plain", remote)
  return None if type(value) is Remote else value


def operators(remote: type) -> type:
  """Gives Remote its operators; the module's docstring says what they withhold from the program."""

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
    """Rejects plain values that the program computed from the tests' own values.

    Such a number proves nothing: the program could return a difference of 0 for any values.
    """
    if not (mixed or self._remote_mixed):
      return result
    if type(result) is not Remote:
      raise TypeError("the program's object gives no plain value from the tests' own")
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
  """A proxy of an object of the other side."""

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
  """Answers a question of the judge. Nothing depends on its honesty.

  The program's code is called from here directly: helpers would take frames of its recursion limit.
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
  """Closes every descriptor above stderr except these, which are in ascending order."""
  for low, high in zip((2, *pipes), (*pipes, 65536), strict=True):
    os.closerange(low + 1, high)


# --- the judge's side ---


def names_in(code) -> set:
  """Returns every name that compiled code and the functions in it look up."""
  return set(code.co_names).union(*(names_in(x) for x in code.co_consts if type(x) is type(code)))


def judge(peer: Peer, tests: str) -> str:
  """Runs the tests and returns the verdict.

  It is "passed" only if they end normally while the program is alive.
  """
  try:
    code = compile(tests, "<tests>", "exec", dont_inherit=True)
  except BaseException as error:
    return f"no verdict: the tests do not compile: {error}"
  error = None
  try:
    space = {"__name__": "tests", "__builtins__": builtins, "__program__": peer.ask("load")}
    names = names_in(code) - set(space)
    # Builtins are not taken from the program: its `sorted` or `all` would do the tests' work. MBPP
    # has an entry point named `sum`; there it is the only name.
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
  """Returns the reason for an exception: its kind and its first line, or the failed test line."""
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
  """Answers the only question a program may ask: to call a function that the tests passed to it."""
  if op != "call" or not any(function is x for x in peer.exported.values()):
    raise PermissionError(op)
  return function(*given, **named), {}


def is_function(x) -> bool:
  """Whether the tests may pass x to the program by reference."""
  return callable(x) and not isinstance(x, type)


def exit_reason(pid: int, peer: Peer, by_tests: bool) -> str:
  """Waits for the program's process and returns the verdict that its end implies."""
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
    by_tests: whether tests call the program; else it runs as `__main__`.
  """
  import marshal

  for name in ("typing", "collections", "re", "math"):
    if f"import {name}" in program or f"from {name}" in program:
      __import__(name)  # once for both processes
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
      return  # and ends as any Python process does
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
