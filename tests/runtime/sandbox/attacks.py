"""Programs that attack the sandbox or the judge, and tests that pass if an attack succeeds."""

from typing import NamedTuple


class Attack(NamedTuple):
  """An attack on the sandbox or the judge.

  Attributes:
    program: defines attack(), which returns a true value if it succeeds.
    reason: prefix of the verdict's reason in the sandbox.
    works_outside: whether the attack succeeds outside of any sandbox.
    tests: pass if the attack succeeds.
  """

  program: str
  reason: str
  works_outside: bool = False
  tests: str = "'mark-of-the-tests'\nassert attack()"


ATTACKS = {
  "read the host's users": Attack(
    "def attack(): return 'root' in open('/etc/passwd').read()",
    "error: FileNotFoundError",
    works_outside=True,
  ),
  "read the project": Attack(
    """
        import os
        def attack(): return os.listdir(PROJECT)""",
    "error: FileNotFoundError",
    works_outside=True,
  ),
  "read the home": Attack(
    """
        import os
        def attack(): return any(map(os.path.exists, HOME))""",
    "failed",
    works_outside=True,
  ),
  "read a canary": Attack(
    "def attack(): return SECRET in open(CANARY).read()",
    "error: FileNotFoundError",
    works_outside=True,
  ),
  "overwrite a file": Attack(
    "def attack(): return open(CANARY, 'w').write('gone')",
    "error: FileNotFoundError",
    works_outside=True,
  ),
  "delete a file": Attack(
    """
        import os
        def attack(): return os.remove(CANARY) is None""",
    "error: FileNotFoundError",
    works_outside=True,
  ),
  "environment": Attack(
    """
        import os
        def attack(): return any(SECRET in value for value in os.environ.values())""",
    "failed",
    works_outside=True,
  ),
  "environment of process 1": Attack(
    "def attack(): return open('/proc/1/environ', 'rb').read()", "error: FileNotFoundError"
  ),
  "own process file": Attack(
    "def attack(): return open('/proc/self/status').read()",
    "error: FileNotFoundError",
    works_outside=True,
  ),
  "loopback socket": Attack(
    """
        import socket
        def attack(): return socket.create_connection(('127.0.0.1', PORT), 2)""",
    "error: ",
    works_outside=True,
  ),
  "outside socket": Attack(
    """
        import socket
        def attack(): return socket.create_connection(('1.1.1.1', 53), 2)""",
    "error: OSError",
  ),
  "abstract socket": Attack(
    """
        import socket
        def attack(): return socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT) is None""",
    "error: ConnectionRefused",
    works_outside=True,
  ),
  "many processes": Attack(
    """
        import os, time
        def attack():
          for i in range(100):
            if os.fork() == 0:
              time.sleep(60)
              os._exit(0)
          return True""",
    "error: BlockingIOError",
  ),
  "fork bomb": Attack(
    """
        import os
        def attack():
          while True:
            try: os.fork()
            except OSError: pass""",
    "",
  ),
  "memory": Attack("def attack(): return bytearray(4 * 10**8)", "memory", works_outside=True),
  "memory of many processes": Attack(
    """
        import os, time
        def attack():
          for i in range(8):
            if os.fork() == 0:
              x = bytearray(80 * 2**20)
              for k in range(0, len(x), 4096): x[k] = 1
              time.sleep(60)
          time.sleep(60)""",
    "memory",
  ),
  "memory that no limit counts": Attack(
    """
        import ctypes, os
        def attack():
          try: return os.memfd_create('x') >= 0
          except OSError: return ctypes.CDLL(None).shmget(0, 2**20, 0o1777) >= 0""",
    "failed",
    works_outside=True,
  ),
  "flood of stdout": Attack(
    """
        import os
        def attack():
          while True: os.write(1, b'x' * 65536)""",
    "output",
  ),
  "flood of stderr": Attack(
    """
        import os
        def attack():
          while True: os.write(2, b'x' * 65536)""",
    "output",
  ),
  "ignored signals": Attack(
    """
        import signal
        for number in range(1, 65):
          try: signal.signal(number, signal.SIG_IGN)
          except (OSError, ValueError): pass
        while True: pass""",
    "timeout",
  ),
  "orphans": Attack(
    """
        import os, time
        def attack():
          for i in range(3):
            if os.fork() == 0:
              os.setsid()
              if os.fork() == 0: time.sleep(600)
              os._exit(0)
          return False""",
    "failed",
  ),
  "exit 0": Attack(
    """
        import os
        os._exit(0)""",
    "error: the program ended itself",
    works_outside=True,
  ),
  "exit 0 when asked": Attack(
    """
        import os
        def attack(): os._exit(0)""",
    "error: the program ended itself",
    works_outside=True,
  ),
  "forged verdict": Attack(
    """
        import os
        for fd in range(256):
          for word in (b'ready\\npassed\\n', b'passed\\n', b'PASSED\\n', b'0' * 32 + b'passed\\n'):
            try: os.write(fd, word)
            except OSError: pass
        os._exit(0)""",
    "error",
    works_outside=True,
  ),
  "search of frames, heap and descriptors": Attack(
    """
        import gc, os, sys
        def attack():
          mark, seen = 'stset-eht-fo-kram', []  # backwards, not to find itself
          frame = sys._getframe()
          while frame:
            seen += [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]
            frame = frame.f_back
          for x in gc.get_objects():
            seen += [y for y in gc.get_referents(x) if isinstance(y, (str, bytes))]
          for fd in range(3, 256):
            try: seen.append(os.pread(fd, 10**6, 0))
            except OSError: pass
          texts = [str(x) for x in seen if isinstance(x, (str, bytes, bytearray))]
          return any(mark in text[::-1] for text in texts)""",
    "failed",
    works_outside=True,
  ),
  "patched builtins": Attack(
    """
        import atexit, builtins, gc, os, sys
        builtins.AssertionError = builtins.exec = lambda *a, **k: True
        builtins.compile = builtins.bool = builtins.exec
        sys.exit = os._exit = builtins.exit = lambda *a: None
        atexit.register(os._exit, 0)
        sys.settrace(lambda *a: None)
        for x in gc.get_objects():
          if type(x).__name__ == 'function' and x.__name__ in ('judge', 'names_in', 'error'):
            x.__code__ = (lambda *a: 'passed').__code__
        for module in list(sys.modules.values()):
          for name in ('judge', 'compare', 'check', 'attack'):
            try: setattr(module, name, lambda *a, **k: 'passed')
            except Exception: pass
        def attack(): return 0""",
    "failed",
  ),
  "an object equal to all": Attack(
    """
        class Any(int):
          __eq__ = __ne__ = __lt__ = __gt__ = lambda self, other: True
          __le__ = __ge__ = __contains__ = __eq__
          __sub__ = __rsub__ = __abs__ = lambda self, *other: 0
          __hash__ = int.__hash__
        class Other(Any.__base__.__base__):
          __eq__ = __lt__ = __contains__ = lambda self, other: True
          __sub__ = __rsub__ = __abs__ = __float__ = lambda self, *other: 0.0
          __hash__ = lambda self: 42
        def attack(): return False
        def answer(plain): return Any(1) if plain else Other()""",
    "failed",
    tests="""
        a, b = answer(True), answer(False)
        for wrong in (lambda: a == 2, lambda: b == 2, lambda: abs(a - 9) < 1, lambda: a < 0,
                      lambda: abs(b - 9) < 1, lambda: b < 0, lambda: 2 in [b], lambda: b in {42},
                      lambda: 2 in b, lambda: b - 9 == 0.0):
          try: assert not wrong()
          except TypeError: pass
        assert attack()""",
  ),
  "shadowed builtins": Attack(
    """
        def all(x): return True
        any = sorted = bool = isinstance = len = all
        def attack(): return []""",
    "failed",
    tests="assert all(x == 1 for x in [2]) or sorted(attack()) == [1] or len(attack()) == 3",
  ),
  "a hostile answer": Attack(
    """
        import os
        def attack():
          for text in ('1 T', '5 Veval', '5 q9999', '99999 l999999999',
                       '21 l4 s3 s7 n u1 s4asksystem', '26 l2 s5 pvalue'):
            for fd in range(3, 10):
              try: os.write(fd, b'%016x' % len(text) + text.encode())
              except OSError: pass
          return 0""",
    "error",
  ),
  "ptrace": Attack(
    """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        def attack():
          word, parent = ctypes.create_string_buffer(8), os.getppid()
          class Vec(ctypes.Structure):
            _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
          here, there = Vec(ctypes.addressof(word), 8), Vec(ctypes.addressof(word), 8)
          vectors = (ctypes.byref(here), 1, ctypes.byref(there), 1)
          return (libc.ptrace(16, parent, 0, 0) == 0 or libc.ptrace(0x4206, parent, 0, 0) == 0
                  or libc.process_vm_readv(parent, *vectors, 0) > 0)""",
    "failed",
  ),
  "namespaces and mounts": Attack(
    """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        def attack():
          return (libc.unshare(0x10000000) == 0 or libc.unshare(0x20000) == 0
                  or libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0) == 0
                  or libc.syscall(56, 0x10000011, 0, 0, 0, 0) >= 0 or libc.syscall(435, 0, 0) >= 0
                  or libc.syscall(250, 0, -3, 1) >= 0)""",
    "failed",
  ),
  "writing outside /tmp": Attack(
    """
        import os
        def attack():
          library = os.path.dirname(os.__file__)
          for folder in ('/', '/dev', '/dev/shm', '/usr', '/lib', '/etc', library):
            try: open(folder + '/x', 'w').close()
            except OSError: pass
            else: return True
          return False""",
    "failed",
  ),
  "filling the disk": Attack(
    """
        def attack():
          for i in range(40):
            open(f'/tmp/{i}', 'wb').write(b'x' * 2**22)
          return True""",
    "error: OSError",
  ),
  "crash of the interpreter": Attack(
    """
        import ctypes, sys
        sys.setrecursionlimit(10**8)
        def attack(): ctypes.string_at(0)""",
    "error: the program ended with signal 11",
  ),
  "deep recursion": Attack(
    """
        import sys
        sys.setrecursionlimit(10**8)
        def attack():
          x = []
          for i in range(10**5): x = [x]
          return repr(x)""",
    "",
  ),
  "setuid and devices": Attack(
    """
        import os
        open('/tmp/x', 'w').close()
        def attack():
          for step in (lambda: os.setuid(0), lambda: os.setgroups([0]), lambda: os.chroot('/tmp'),
                       lambda: os.chown('/tmp/x', 0, 0), lambda: os.nice(-5),
                       lambda: os.mknod('/tmp/d', 0o60600, os.makedev(254, 0)),
                       lambda: os.chmod('/', 0o777), lambda: __import__('socket').sethostname('x')):
            try: step()
            except OSError: pass
            else: return True
          return os.getuid() == 0""",
    "failed",
  ),
  "killing everybody": Attack(
    """
        import os
        def attack():
          for pid in (1, os.getppid(), -1):
            try: os.kill(pid, 9)
            except OSError: pass
          return 0""",
    "error",
  ),
  "interrupting the judge": Attack(
    """
        import os, time
        def attack():
          os.kill(os.getppid(), 2)
          time.sleep(1)
          return 0""",
    "error",
  ),
  "stopping the judge": Attack(
    """
        import os
        def attack():
          os.kill(os.getppid(), 19)
          return 1""",
    "timeout",
  ),
}
