"""A Google Cloud Storage emulator on 127.0.0.1, whose requests can be made to fail.

The objects and most of the protocol are those of the package gcp-storage-emulator. This adds what
its clients here rely on: threads, preconditions on generations, the header with the generation of a
download, and the offsets of a listing.
"""

import contextlib
import functools
import http.server
import json
import sys
import threading
from http import HTTPStatus

from gcp_storage_emulator import server
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.storage import Storage

BUCKET = "bucket"
CUT = "cut"  # a fault: the connection is closed without a response


class ObjectStore:
  """A running emulator with one bucket.

  Attributes:
    url: `gs://` URL of the bucket.
    environment: the variables that lead gcsfs, google-cloud-storage and TensorStore to it.
    fault: called with (method, path, query) before each request. It returns None to serve it, an
      HTTP status to fail it with, or CUT.
    requests: (method, object name, bytes received) of every request so far; START begins an upload.
  """

  def __init__(self):
    self.fault = lambda method, path, query: None
    self.requests = []
    self.storage = Storage(use_memory_fs=True, data_dir="/")
    self.storage._write_config_to_file = lambda: None  # everything stays in memory
    buckets.create_bucket(BUCKET, self.storage)
    self.storage.buckets[BUCKET]["softDeletePolicy"] = {"retentionDurationSeconds": "0"}
    self._lock = threading.RLock()
    handler = functools.partial(_Handler, self)
    self._server = _Server(("127.0.0.1", 0), handler)
    self._server.daemon_threads = True
    self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
    self._thread.start()
    host = f"http://127.0.0.1:{self._server.server_port}"
    self.url = f"gs://{BUCKET}"
    self.environment = {
      "STORAGE_EMULATOR_HOST": host,
      "TENSORSTORE_GCS_HTTP_URL": host,
      "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
      "GOOGLE_CLOUD_PROJECT": "project",
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks for credentials even of an emulator
    }

  def reset(self):
    """Removes all objects, and lets all requests succeed."""
    self.fault = lambda method, path, query: None
    self.requests = []
    with self._lock:
      for name in self.names():
        self.storage.delete_file(BUCKET, name)

  def uploads(self):
    """Returns the names of the objects written so far, in order."""
    return [name for method, name, _ in self.requests if method in ("POST", "PUT")]

  def names(self, prefix=""):
    """Returns the names of the objects with a prefix, in order."""
    with self._lock:
      stored = self.storage.objects.get(BUCKET, {})
      return sorted(name for name in stored if name.startswith(prefix))

  def read(self, name):
    """Returns the bytes of an object."""
    with self._lock:
      return self.storage.get_file(BUCKET, name)

  def close(self):
    """Stops the server."""
    self._server.shutdown()
    self._server.server_close()


@contextlib.contextmanager
def object_store():
  """Yields a running `ObjectStore`."""
  store = ObjectStore()
  try:
    yield store
  finally:
    store.close()


class _Server(http.server.ThreadingHTTPServer):
  def handle_error(self, request, client_address):
    """Ignores clients that close a connection early."""
    if not isinstance(sys.exception(), ConnectionError):
      super().handle_error(request, client_address)


class _Response(server.Response):
  """A response that leaves out what a failed precondition must not send."""

  def fail(self, status):
    self.status = HTTPStatus(status)
    self.json({"error": {"code": status, "message": self.status.phrase}})


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def __init__(self, store, *args):
    self._store = store
    self.storage = store.storage
    super().__init__(*args)

  def do_GET(self):
    self._serve("GET")

  do_HEAD = do_GET

  def do_POST(self):
    self._serve("POST")

  def do_PUT(self):
    self._serve("PUT")

  def do_DELETE(self):
    self._serve("DELETE")

  def do_PATCH(self):
    self._serve("PATCH")

  def log_message(self, *args):
    pass

  def _serve(self, method):
    request = server.Request(self, method)
    query = {name: values[0] for name, values in request.query.items()}
    length = int(self.headers.get("Content-Length") or 0)
    fault = self._store.fault(method, request.path, query)
    if fault == CUT:
      self.close_connection = True
      return
    response = _Response(self)
    if fault is not None:
      self.rfile.read(length)
      response.fail(fault)
      response.close()
      return
    request.data  # noqa: B018 (reads the body, outside the lock)
    starts = query.get("uploadType") == "resumable" and "upload_id" not in query
    kind = "START" if starts else method  # of an upload, which another request completes
    self._store.requests.append((kind, self._object(request, query), length))
    with self._store._lock:
      self._handle(request, response, method, query)
    response.close()

  def _handle(self, request, response, method, query):
    for regex, handlers in server.HANDLERS:
      match = server.re.fullmatch(regex, request.path)
      if match and method in handlers:
        break
    else:
      response.fail(501)
      return
    request.set_match(match)
    name = self._object(request, query)
    if not self._precondition(name, query):
      response.fail(412)
      return
    handlers[method](request, response, self.storage)
    generation = self._generation(name)
    if generation and query.get("alt") == "media":
      response["x-goog-generation"] = generation
      response["x-goog-stored-content-length"] = str(len(self.storage.get_file(BUCKET, name)))
    if request.path.endswith("/o") and method == "GET":
      _cut_listing(response, query)

  def _object(self, request, query):
    """Returns the name of the object that a request is about; None if it is about none."""
    if "name" in query:
      return query["name"]
    if isinstance(request.data, dict) and "meta" in request.data:  # a multipart upload
      return request.data["meta"].get("name")
    for regex, _ in server.HANDLERS:
      if match := server.re.fullmatch(regex, request.path):
        name = match.groupdict().get("object_id")
        return name and server.unquote(name)
    return None

  def _generation(self, name):
    stored = self.storage.objects.get(BUCKET, {}).get(name)
    return stored and stored["generation"]

  def _precondition(self, name, query):
    """Whether the object has the generation that the request asks for; 0: it does not exist."""
    if "ifGenerationMatch" in query:
      return (self._generation(name) or "0") == query["ifGenerationMatch"]
    if "ifGenerationNotMatch" in query:
      return (self._generation(name) or "0") != query["ifGenerationNotMatch"]
    return True


def _cut_listing(response, query):
  """Applies `startOffset` and `endOffset` to a listing."""
  if response.status != HTTPStatus.OK:
    return
  listing = json.loads(response._content)
  start = query.get("startOffset", "")
  end = query.get("endOffset")
  listing["items"] = sorted(
    (
      item for item in listing["items"] if item["name"] >= start and (not end or item["name"] < end)
    ),
    key=lambda item: item["name"],
  )
  listing["prefixes"] = sorted(listing["prefixes"])
  response.json(listing)
