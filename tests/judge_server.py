"""An OpenAI-compatible server on this machine, which answers as a test says."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import GeneratorType

LONG = 1000  # bytes that a body in parts claims to have
CLOSE = object()  # an answer: close the connection without a response


def completion(text, tokens=7, finish_reason="stop"):
  """The response with a judge's reply."""
  choice = {"index": 0, "message": {"role": "assistant", "content": text}}
  return {
    "choices": [{**choice, "finish_reason": finish_reason}],
    "usage": {"total_tokens": tokens},
  }


class Server:
  """A server in threads.

  `answer(message, count)` returns what a request gets: a text for a judge's reply, a dict for a
  response, bytes for a body, (status, dict or bytes, headers), or CLOSE; a generator of bytes is a
  body that comes in parts. `count` is how often the
  message was sent so far. It may sleep.

  Attributes:
    url: the base URL.
    bodies: the requests, in order.
    headers: their headers.
    most: the largest number of requests that were under way at once.
  """

  def __init__(self, answer):
    self.answer = answer
    self.bodies = []
    self.headers = []
    self.most = 0
    self._now = 0
    self._lock = threading.Lock()
    server = self

    class Handler(BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def do_POST(self):
        with server.counted():
          body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
          with server._lock:
            message = body["messages"][-1]["content"]
            count = sum(x["messages"][-1]["content"] == message for x in server.bodies)
            server.bodies.append(body)
            headers = {name.title(): value for name, value in self.headers.items()}
            server.headers.append((self.path, headers))
          reply = server.answer(message, count)
        # The client may send its next request before this thread runs again.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
          self.respond(reply)

      def respond(self, answer):
        if answer is CLOSE:
          self.close_connection = True
          return
        answer = completion(answer) if isinstance(answer, str) else answer
        status, content, headers = answer if isinstance(answer, tuple) else (200, answer, {})
        if not isinstance(content, bytes | GeneratorType):
          content = json.dumps(content).encode()
        parts = [content] if isinstance(content, bytes) else content
        length = len(content) if isinstance(content, bytes) else LONG
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
          self.send_header(name, value)
        self.end_headers()
        for part in parts:
          self.wfile.write(part)

      def log_message(self, *args):
        pass

    class Listener(ThreadingHTTPServer):
      daemon_threads = True
      request_queue_size = 128  # connections that wait to be accepted

    self._http = Listener(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
    threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

  @contextlib.contextmanager
  def counted(self):
    """Counts a request while it is under way."""
    with self._lock:
      self._now += 1
      self.most = max(self.most, self._now)
    try:
      yield
    finally:
      with self._lock:
        self._now -= 1

  @property
  def messages(self):
    """The messages to the judge so far."""
    return [body["messages"][-1]["content"] for body in self.bodies]

  def close(self):
    self._http.shutdown()
    self._http.server_close()


@contextlib.contextmanager
def serving(answer):
  server = Server(answer)
  try:
    yield server
  finally:
    server.close()


def after(seconds, answer):
  """An answer that comes late."""
  time.sleep(seconds)
  return answer
