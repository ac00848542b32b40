"""What runs inside the sandbox: the judge of a program, and the program. It imports nothing of the project, which is not there.

Two processes share one sandbox. The judge reads the tests only after it has forked the other, which holds the program, has none of the
judge's pipes and cannot read its memory. A name of the program stands in the tests for a message: call it with these values, answer
with values. So a program can do nothing but answer: not skip a test, not reach an assert, and not write the verdict, which carries
a secret and leaves by a pipe that the program does not have. Exit codes and printed text mean nothing.

Values cross as copies: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, builtin types,
and Fraction, Decimal, date, time, datetime, timedelta, deque, OrderedDict, Counter, defaultdict. A list, dict, set or bytearray changed
by the call is changed in the tests too. Functions of the tests can be passed and are called back. Other objects of the program stay there
and answer as a Remote does: methods, attributes, items, iteration. Against the tests' own values they compare as the plain value that
they extend, or as unequal, so an `__eq__` that is always true, or a difference that is always 0, gains nothing.

What remains: a program may know the answers by heart, and where tests work with objects of its own classes (`stack.pop()`,
`Point(1, 2) == Point(1, 2)`) these classes answer. Identity (`result is argument`) is not kept across, the program's own exception
classes cannot be named in `except`, and a test that passes an object of a class of its own gets no verdict.
"""

from __future__ import annotations

import _operator as operator  # operator itself is Python, and not loaded at start
import builtins
import os
import sys


def encode(value: object, peer: Peer) -> bytes:
  """Words that say what follows, then all texts in one; what has no word of its own stays here and goes as a number."""
  words = []
  texts = []

  def put(x):
    kind = type(x)
    if x is None or kind is bool:
      words.append({None: "n", True: "t", False: "f"}[x])
    elif kind is int:
      words.append(f"i{x:x}")  # hexadecimal: linear in time, and without the limit of 4300 digits
    elif kind is float:
      words.append(f"d{x!r}")
    elif kind is str or kind is bytes or kind is bytearray:
      words.append(f"{'s' if kind is str else 'b' if kind is bytes else 'y'}{len(x)}")
      texts.append(x if kind is str else x.decode("latin-1"))
    elif kind in peer.SEVERAL:
      words.append(f"{peer.SEVERAL[kind]}{len(x)}")
      for y in x:
        put(y)
    elif kind is dict:
      words.append(f"m{len(x)}")
      for pair in x.items():
        put(pair)
    elif kind is Remote:
      words.append(f"q{x._remote_key}")
    elif kind is type and getattr(builtins, x.__name__, None) is x:
      words.append(f"T{x.__name__}")
    elif (
      kind.__name__ in peer.VALUES
      and getattr(sys.modules.get(peer.VALUES[kind.__name__][0]), kind.__name__, None) is kind
    ):
      words.append(f"V{kind.__name__}")
      put(peer.VALUES[kind.__name__][1](x))
    else:
      words.append(f"p{peer.export(x)}")

  put(value)
  head = " ".join(words)
  return f"{len(head)} {head}{''.join(texts)}".encode("utf-8", "surrogatepass")


def decode(data: bytes, peer: Peer) -> object:
  """The value of a message from a side that is not trusted: it makes data and Remotes, and raises for anything else."""
  size, _, text = data.decode("utf-8", "surrogatepass").partition(" ")
  words = iter(text[: int(size)].split(" "))
  place = int(size)
  several = {code: kind for kind, code in peer.SEVERAL.items()}

  def take():
    nonlocal place
    word = next(words)
    kind = word[0]
    rest = word[1:]
    if kind in "ntf":
      return {"n": None, "t": True, "f": False}[kind]
    if kind == "i":
      return int(rest, 16)
    if kind == "d":
      return float(rest)
    if kind in "sby":
      place += int(rest)
      piece = text[place - int(rest) : place]
      return piece if kind == "s" else (bytes if kind == "b" else bytearray)(piece, "latin-1")
    if kind in several:
      return several[kind]([take() for _ in range(int(rest))])
    if kind == "m":
      return dict([take() for _ in range(int(rest))])
    if kind == "q":
      return peer.mine[int(rest)]
    if kind == "p":
      return peer.remotes.setdefault(int(rest), Remote(peer, int(rest)))
    if kind == "T" and isinstance(getattr(builtins, rest), type):
      return getattr(builtins, rest)
    return getattr(__import__(peer.VALUES[rest][0]), rest)(
      *take()
    )  # "V"; KeyError for anything else

  return take()


class Peer:
  """One end of two pipes: asks the other side, and answers what it is asked while it waits."""

  SEVERAL = {list: "l", tuple: "u", set: "e", frozenset: "z"}  # noqa: RUF012
  VALUES = {  # noqa: RUF012 (name: module, what it is made of)
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
    self.mine = {}
    self.numbers = {}
    self.remotes = {}
    self.over = self.unfit = ""  # why the other side is gone; why these tests cannot be run here

  def export(self, x) -> int:
    """The number under which the other side may name x."""
    if id(x) not in self.numbers:
      if not self.exportable(x):
        self.unfit = f"the tests pass an object of {type(x).__name__}"
        raise TypeError(self.unfit)
      self.numbers[id(x)] = len(self.mine)
      self.mine[len(self.mine)] = x  # kept, so that its id stays its own
    return self.numbers[id(x)]

  def send(self, *message) -> None:
    """Writes a message whole."""
    data = encode(message, self)
    view = memoryview(b"%016x" % len(data) + data)
    while view:
      view = view[os.write(self.write, view[: 2**20]) :]

  def exactly(self, size: int) -> bytes:
    """The next bytes; EOFError where the other side has gone."""
    data = bytearray()
    while len(data) < size:
      piece = os.read(self.read, min(size - len(data), 2**20))
      if not piece:
        self.over = "the program ended itself"
        raise EOFError(self.over)
      data += piece
    return bytes(data)

  def receive(self):
    """The next message."""
    return decode(self.exactly(int(self.exactly(16), 16)), self)

  def ask(self, *question):
    """The other side's answer, or what it raised."""
    try:
      self.send("ask", *question)
    except OSError:  # nobody reads any more
      self.over = "the program ended itself"
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
      self.send(
        "raised",
        [kind.__name__ for kind in type(error).__mro__],
        error.args if plain else (str(error),),
      )

  @staticmethod
  def error(names: list, arguments: tuple):
    """The exception again; one of the program's own as an unknown child of the built-in that it extends."""
    base = next(
      kind
      for kind in (getattr(builtins, str(name), None) for name in names)
      if isinstance(kind, type) and issubclass(kind, BaseException)
    )
    kind = base if base.__name__ == names[0] else type(str(names[0]), (base,), {})
    try:
      return kind(*arguments)
    except TypeError:  # UnicodeDecodeError and its like need more
      return Exception(*arguments)


def operators(remote: type) -> type:
  """Gives Remote its operators; see the module's docstring for what they keep from the program."""

  def comparison(name):
    def compare(self, other):
      if type(other) is Remote:
        return self._remote_peer.ask(name, self, other)
      plain = self._remote_peer.ask("plain", self)
      if plain is None or type(plain) is Remote:
        return name == "ne" if name in ("eq", "ne") else NotImplemented
      return getattr(operator, name)(plain, other)

    return compare

  def binary(name, swap):
    def operate(self, other):
      mixed = type(other) is not Remote
      plain = self._remote_peer.ask("plain", self) if mixed else None
      if plain is not None and type(plain) is not Remote:
        return getattr(operator, name)(*((other, plain) if swap else (plain, other)))
      return settled(
        self,
        self._remote_peer.ask(name, *((other, self) if swap else (self, other))),
        mixed or other._remote_mixed,
      )

    return operate

  def unary(name):
    return lambda self, *more: settled(self, self._remote_peer.ask(name, self, *more), False)

  def settled(self, result, mixed):
    """Lets no number out that the program made from the tests' own values: it could make a difference 0 whatever they are."""
    if not (mixed or self._remote_mixed):
      return result
    if type(result) is not Remote:
      raise TypeError("the program's object gives no plain value from the tests' own")
    object.__setattr__(result, "_remote_mixed", True)
    return result

  for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(remote, f"__{name}__", comparison(name))
  for name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "lshift",
    "rshift",
    "and_",
    "or_",
    "xor",
  ):
    setattr(remote, f"__{name.strip('_')}__", binary(name, False))
    setattr(remote, f"__r{name.strip('_')}__", binary(name, True))
  for name in (
    "neg",
    "pos",
    "invert",
    "abs",
    "int",
    "float",
    "complex",
    "round",
    "index",
    "bool",
    "len",
    "hash",
    "str",
    "repr",
    "getitem",
    "setitem",
    "delitem",
    "next",
    "setattr",
    "delattr",
  ):
    setattr(remote, f"__{name}__", unary(name))
  return remote


@operators
class Remote:
  """An object of the other side."""

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
    plain = self._remote_peer.ask("plain", self)
    return (
      item in plain
      if plain is not None and type(plain) is not Remote
      else any(x == item for x in self)
    )

  def __instancecheck__(self, x):
    return self._remote_peer.ask("isinstance", x, self)

  def __reduce_ex__(self, protocol):
    raise TypeError("an object of the program cannot be copied here")


def serve(peer: Peer, op: str, *args) -> object:
  """The program's side: does what it is asked. Nothing depends on its honesty."""
  if op == "call":
    function, given, named = args
    before = [encode(x, peer) if type(x) in (list, dict, set, bytearray) else None for x in given]
    value = function(*given, **named)
    if sys.stdout:
      sys.stdout.flush()
    return value, {
      i: x for i, x in enumerate(given) if before[i] is not None and encode(x, peer) != before[i]
    }
  if op == "load":
    program = sys.modules["program"] = type(sys)("program")
    builtins.exit = builtins.quit = sys.exit
    exec(compile(peer.program, "<program>", "exec", dont_inherit=True), program.__dict__)
    if sys.stdout:
      sys.stdout.flush()
    return program
  if op == "names":
    found = {
      name: vars(sys.modules["program"])[name]
      for name in args[0]
      if name in vars(sys.modules["program"])
    }
    return {name: x for name, x in found.items() if type(x) is not type(sys)}, [
      name for name, x in found.items() if type(x) is type(sys)
    ]
  if op == "plain":
    kind = next(
      (
        kind
        for kind in (int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
        if isinstance(args[0], kind)
      ),
      None,
    )
    return kind and kind(args[0])
  return getattr(operator if hasattr(operator, op) else builtins, op)(*args)


def names_in(code) -> set:
  """Every name that compiled code and the functions in it look up."""
  return set(code.co_names).union(*(names_in(x) for x in code.co_consts if type(x) is type(code)))


def judge(peer: Peer, tests: str) -> str:
  """The judge's side: runs the tests. Their normal end, with the program alive, is the one way to "passed"."""
  try:
    code = compile(tests, "<tests>", "exec", dont_inherit=True)
  except BaseException as error:
    return f"no verdict: the tests do not compile: {error}"
  error = None
  try:
    space = {"__name__": "tests", "__builtins__": builtins, "__program__": peer.ask("load")}
    names = names_in(code) - set(space)
    # Else a program's `sorted` or `all` would do the tests' work. (MBPP has an entry point named `sum`: it is then the only name.)
    names = {name for name in names if not hasattr(builtins, name)} or names
    values, modules = peer.ask("names", sorted(names))
    space.update({name: value for name, value in values.items() if name in names})
    space.update(
      {name: __import__(name) for name in modules if name in names & sys.stdlib_module_names}
    )  # the tests' own copy
    exec(code, space)
  except BaseException as raised:
    error = raised
  if peer.unfit:
    return f"no verdict: {peer.unfit}"
  if peer.over or error is None:
    return f"error: {peer.over}" if peer.over else "passed"
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
  return (
    f"{'memory' if isinstance(error, MemoryError) else 'error'}: {type(error).__name__}: {detail}"
  )


def main(report: int, payload: int, private_at: int, program: str, by_tests: bool) -> None:
  """Forks the program's process, and only then reads the secret and the tests."""
  import marshal

  for name in ("typing", "collections", "re", "math"):
    if f"import {name}" in program or f"from {name}" in program:  # loaded once for both
      __import__(name)
  (asked, ask) = os.pipe()
  (answered, answer) = os.pipe()
  pid = os.fork()
  if not pid:
    keep = (asked, answer) if by_tests else ()
    for low, high in zip((2, *keep), (*keep, 65536), strict=True):
      os.closerange(low + 1, high)
    sys.argv[:] = ["program"]
    if not by_tests:
      module = sys.modules["__main__"] = type(sys)("__main__")
      builtins.exit = builtins.quit = sys.exit
      return exec(
        compile(program, "<program>", "exec", dont_inherit=True), module.__dict__
      )  # and out, as any Python ends
    peer = Peer(asked, answer, serve)
    peer.program = program
    try:
      while True:
        peer.answer(*peer.receive()[1:])
    except EOFError:  # the judge is done
      os._exit(0)
  os.close(asked)
  os.close(answer)
  secret, tests = marshal.loads(
    os.pread(payload, os.fstat(payload).st_size - private_at, private_at)
  )

  def call_back(
    peer, op, function, given, named
  ):  # the one thing a program may ask: a function that the tests gave it
    if op != "call" or not any(function is x for x in peer.mine.values()):
      raise PermissionError(op)
    return function(*given, **named), {}

  peer = Peer(answered, ask, call_back, lambda x: callable(x) and not isinstance(x, type))
  word = judge(peer, tests) if by_tests else ""
  if peer.over or not by_tests:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    words = {0: "passed" if not by_tests else f"error: {peer.over}", -24: "timeout", -9: "timeout"}
    word = words.get(
      status,
      f"error: the program ended with {'exit status' if status > 0 else 'signal'} {abs(status)}",
    )
  os.write(report, (secret + " ".join(word.split())[:300] + "\n").encode("utf-8", "replace"))
  os._exit(0)
