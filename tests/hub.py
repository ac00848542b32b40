"""A hub on 127.0.0.1, with as much of its protocol as loading datasets and pushing models need."""

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
TOKEN = "hf_a_token_that_may_write"


def _entries(files, folder, recursive):
  """Returns the files and folders below a folder, as the hub lists them."""
  found = {}
  for path, content in files.items():
    if not path.startswith(folder):
      continue
    first, slash, _ = path[len(folder) :].partition("/")
    if slash:
      name = folder + first
      found[name] = {"type": "directory", "path": name, "size": 0, "oid": COMMIT}
    if recursive or not slash:
      oid = hashlib.sha1(content).hexdigest()
      found[path] = {"type": "file", "path": path, "size": len(content), "oid": oid}
  return list(found.values())


def _split(path):
  """Returns whether a path is of the API, the repository's name, and the rest."""
  parts = unquote(path).strip("/").split("/")
  is_api = parts[0] == "api"
  parts = parts[is_api:]
  dataset = parts[0] == "datasets"
  parts = parts[dataset or parts[0] == "models" :]
  return is_api, "datasets/" * dataset + "/".join(parts[:2]), parts[2:]


class Busy:
  """Answers of a busy hub.

  Args:
    times: how many requests it refuses; more are answered.
    status: 429 or 503.
    headers: of the answer, such as {"Retry-After": "1"}.
  """

  def __init__(self, times, status=429, headers=None):
    self.left = times
    self.status = status
    self.headers = headers or {}
    self.asked = []  # the time of each request, s
    self.served = []  # the paths of answered requests for files
    self._lock = threading.Lock()

  def refuses(self):
    with self._lock:
      self.asked.append(time.monotonic())
      self.left -= 1
      return self.left >= 0


def _handler(stored, cut, busy):
  class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
      pass

    def reply(self, status, body, half=False, **headers):
      self.send_response(status)
      for name, value in {**headers, "Content-Length": len(body)}.items():
        self.send_header(name.replace("_", "-"), str(value))
      self.end_headers()
      if self.command != "HEAD":
        self.wfile.write(body[: len(body) // 2] if half else body)
      self.close_connection = half

    def reply_json(self, value, status=200):
      self.reply(status, json.dumps(value).encode(), Content_Type="application/json")

    def do_GET(self):
      url = urlsplit(self.path)
      if busy and busy.refuses():
        self.reply(busy.status, b"{}", **busy.headers)
        return
      if busy and self.command == "GET":
        busy.served.append(url.path)
      is_api, name, rest = _split(url.path)
      files = stored.get(name)
      if files is None:
        self.reply(404, b"{}", X_Error_Code="RepoNotFound")
      elif is_api and rest[:1] == ["tree"]:
        folder = "".join(f"{part}/" for part in rest[2:])
        self.reply_json(_entries(files, folder, "recursive=true" in url.query.lower()))
      elif is_api:
        siblings = [{"rfilename": path} for path in files]
        self.reply_json({"id": name, "sha": COMMIT, "private": False, "siblings": siblings})
      else:
        self.reply_file(files.get("/".join(rest[2:])))

    do_HEAD = do_GET

    def do_POST(self):
      body = self.rfile.read(int(self.headers["Content-Length"]))
      _, name, rest = _split(self.path)
      if self.headers.get("Authorization") != f"Bearer {TOKEN}":
        self.reply_json({"error": "Invalid username or password."}, 401)
      elif name == "repos/create":
        values = json.loads(body)
        created = f"{values['organization']}/{values['name']}"
        stored.setdefault(created, {})
        self.reply_json({"url": f"http://{self.headers['Host']}/{created}"})
      elif name == "validate-yaml":
        found = re.findall(r'^base_model: "/.*', json.loads(body)["content"], re.MULTILINE)
        errors = [{"message": f"{line} is not valid"} for line in found]
        self.reply_json({"errors": errors, "warnings": []}, 400 if errors else 200)
      elif rest[0] == "preupload":
        paths = [file["path"] for file in json.loads(body)["files"]]
        files = [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]
        self.reply_json({"files": files})
      elif rest[0] == "commit":
        for line in map(json.loads, body.splitlines()):
          if line["key"] == "file":
            value = line["value"]
            stored[name][value["path"]] = base64.b64decode(value["content"])
        url = f"http://{self.headers['Host']}/{name}/commit/{COMMIT}"
        self.reply_json({"success": True, "commitUrl": url, "commitOid": COMMIT})
      else:
        self.reply_json([])

    def reply_file(self, content):
      if content is None:
        self.reply(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        return
      headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X_Repo_Commit": COMMIT}
      wanted = self.headers.get("Range")
      path = urlsplit(self.path).path.rpartition("/")[2]
      if path in cut and self.command == "GET":
        cut[path].append(wanted)
      if wanted is None:
        half = path in cut and self.command == "GET"
        self.reply(200, content, half, **headers)
        return
      first, last = wanted.removeprefix("bytes=").split("-")
      part = content[int(first) : int(last) + 1 if last else None]
      end = int(first) + len(part) - 1
      content_range = f"bytes {first}-{end}/{len(content)}"
      self.reply(206, part, Content_Range=content_range, **headers)

  return Handler


@contextlib.contextmanager
def hub(stored, cut=None, busy=None):
  """Serves {"owner/name" or "datasets/owner/name": {path: content}}; yields its address.

  Programs use it with the variables `HF_ENDPOINT`, and `HF_TOKEN` to push. Files named in `cut`,
  {name: []}, end in the middle if they are asked for from the start; the ranges that were asked for
  are appended to their lists. `busy` refuses requests.
  """
  server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(stored, cut or {}, busy))
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    yield f"http://127.0.0.1:{server.server_port}"
  finally:
    server.shutdown()
    server.server_close()
