"""Starts Python programs from a process that has imported what `gtpo` imports, which saves seconds.

`python()` returns the beginning of a command: a small client that passes its arguments, variables,
folder and streams to the process with the imports. That process forks for each program. The client
passes signals on, and ends as the program does, with its exit status or by its signal; if the
client is killed, so is the program.

The client runs the program itself if it would import something else: other variables than those of
`command_line.environment`, another user or file system, or a closed stream.
"""

import atexit
import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile

SOCKET = "GTPO_TEST_PRELOADED"
# Modules read variables that begin so when they are imported.
READ_AT_IMPORT = ("JAX_", "PYTHON", "HF_", "XDG_", "MPL", "TF_", "TRANSFORMERS_", "HOME", "LC_")
READ_LATER = (
  "JAX_COORDINATOR_ADDRESS",
  "JAX_NUM_CPU_DEVICES",
  "JAX_NUM_PROCESSES",
  "JAX_PROCESS_ID",
  "PYTHONPATH",
)
MODULES = (
  "gtpo_jax.cli.commands",
  "gtpo_jax.loop",
  "grain",
  "matplotlib.backends.backend_agg",
  "openai",
  "rich.console",
  "starlette.applications",
  "tensorboardX",
  "uvicorn.main",
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def python():
  """Returns the beginning of a command that runs Python: a file, `-m` or `-c` follows."""
  if not hasattr(os, "pidfd_open"):
    return [sys.executable]
  if SOCKET not in os.environ:
    from command_line import environment

    path = os.path.join(tempfile.mkdtemp(prefix="preloaded_"), "socket")
    with socket.socket(socket.AF_UNIX) as listener:
      listener.bind(path)
      listener.listen(16)
      number = listener.fileno()
      start = [sys.executable, __file__, "--serve", str(number)]
      # It ends when this process does, which holds the other end of its standard input.
      server = subprocess.Popen(start, env=environment(), stdin=subprocess.PIPE, pass_fds=[number])
    atexit.register(server.communicate)  # closes the input and waits
    os.environ[SOCKET] = path
  return [sys.executable, "-I", "-S", __file__]


def surroundings(variables):
  """Returns what the imports and the rights of a program depend on."""
  names = [name for name in variables if name.startswith(READ_AT_IMPORT)]
  return {
    "variables": {name: variables[name] for name in sorted(names) if name not in READ_LATER},
    "torch": "without_torch" not in variables.get("PYTHONPATH", ""),
    "user": [os.getuid(), os.getgid()],
    "files": [os.readlink("/proc/self/ns/mnt"), *resource.getrlimit(resource.RLIMIT_NOFILE)],
  }


def run(arguments):
  """The client: runs a program, and ends as it does."""
  request = {"arguments": arguments, "folder": os.getcwd(), "variables": dict(os.environ)}
  request["surroundings"] = surroundings(os.environ)
  message = json.dumps(request).encode()
  server = socket.socket(socket.AF_UNIX)
  answer = b""
  with contextlib.suppress(OSError, KeyError):  # the process has ended, or a stream is closed
    server.connect(os.environ[SOCKET])
    socket.send_fds(server, [struct.pack("I", len(message))], [0, 1, 2])
    for number in SIGNALS:
      signal.signal(number, lambda number, _: server.send(bytes([number])))
    server.sendall(message)
    answer = server.recv(9)
  if not answer:
    os.execv(sys.executable, [sys.executable, *arguments])
  status = int(answer)
  if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
  os._exit(status)


def serve(listener):
  """Imports, then forks for each program; returns the request of a program in its process."""
  own = surroundings(os.environ)
  preload()
  waiting = selectors.DefaultSelector()
  waiting.register(0, selectors.EVENT_READ)
  waiting.register(listener, selectors.EVENT_READ, listener)
  while True:
    for key, _ in waiting.select():
      if key.data is None:  # the tests have ended
        os._exit(0)
      if key.data is listener:
        client, _ = listener.accept()
        header, streams, *_ = socket.recv_fds(client, 4, 3)
        request = json.loads(received(client, struct.unpack("I", header)[0]))
        same = request["surroundings"] == own
        program = os.fork() if same else 0
        if same and not program:
          waiting.close()
          listener.close()
          client.close()
          for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
          return request
        for stream in streams:
          os.close(stream)
        if program:
          waiting.register(client, selectors.EVENT_READ, (program, None))
          waiting.register(os.pidfd_open(program), selectors.EVENT_READ, (program, client))
        else:
          client.close()
      elif key.data[1] is None:  # a signal, or the client was killed
        data = key.fileobj.recv(1)
        os.kill(key.data[0], data[0] if data else signal.SIGKILL)
        if not data:
          waiting.unregister(key.fileobj)
      else:
        program, client = key.data
        _, status = os.waitpid(program, 0)
        with contextlib.suppress(OSError):
          client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        with contextlib.suppress(KeyError):
          waiting.unregister(client)
        client.close()
        waiting.unregister(key.fileobj)
        os.close(key.fileobj)


def received(client, length):
  data = b""
  while len(data) < length:
    data += client.recv(length - len(data))
  return data


def preload():
  """Imports what a run of `gtpo train` imports. No module starts JAX's devices."""
  import gc
  import importlib
  import io

  from gtpo_jax.runtime.startup import prepare_jax

  prepare_jax()
  for name in MODULES:
    importlib.import_module(name)
  from matplotlib.figure import Figure

  from gtpo_jax.data.chat import load_chat

  # Both import more when they are first used.
  load_chat()
  Figure().savefig(io.BytesIO())
  gc.freeze()


def become(request):
  """Runs the program of a request in this process."""
  import runpy

  import jax

  kind, *others = request["arguments"]
  sys.stdin = open(0, closefd=False)  # noqa: SIM115
  sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
  sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
  os.chdir(request["folder"])
  own_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
  os.environ.clear()
  os.environ.update(request["variables"])
  jax.config.update("jax_num_cpu_devices", int(os.environ.get("JAX_NUM_CPU_DEVICES", 1)))
  paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
  first = os.path.dirname(os.path.abspath(kind)) if not kind.startswith("-") else ""
  sys.path[:] = [first, *paths, *(path for path in sys.path[1:] if path not in own_path)]
  if kind == "-m":
    sys.argv = others
    runpy.run_module(others[0], run_name="__main__", alter_sys=True)
  elif kind == "-c":
    sys.argv = ["-c", *others[1:]]
    exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})
  else:
    sys.argv = [kind, *others]
    runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
  if sys.argv[1] == "--serve":
    become(serve(socket.socket(fileno=int(sys.argv[2]))))
  else:
    run(sys.argv[1:])
