"""A hub for datasets on 127.0.0.1, with as much of its protocol as the datasets library uses."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


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


def _handler(datasets):
  class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
      pass

    def reply(self, status, body, **headers):
      self.send_response(status)
      for name, value in {**headers, "Content-Length": len(body)}.items():
        self.send_header(name.replace("_", "-"), str(value))
      self.end_headers()
      if self.command != "HEAD":
        self.wfile.write(body)

    def reply_json(self, value):
      self.reply(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_GET(self):
      url = urlsplit(self.path)
      kind, *parts = unquote(url.path).strip("/").split("/")
      if kind == "api":
        parts = parts[1:]
      name = "/".join(parts[:2])
      files = datasets.get(name)
      if files is None:
        self.reply(404, b"{}", X_Error_Code="RepoNotFound")
      elif kind == "api" and "tree" in parts:
        folder = "".join(f"{part}/" for part in parts[4:])
        self.reply_json(_entries(files, folder, "recursive=true" in url.query.lower()))
      elif kind == "api":
        siblings = [{"rfilename": path} for path in files]
        self.reply_json({"id": name, "sha": COMMIT, "private": False, "siblings": siblings})
      else:
        self.reply_file(files.get("/".join(parts[4:])))

    do_HEAD = do_GET

    def do_POST(self):
      self.rfile.read(int(self.headers["Content-Length"]))
      self.reply_json([])

    def reply_file(self, content):
      if content is None:
        self.reply(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        return
      headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X_Repo_Commit": COMMIT}
      wanted = self.headers.get("Range")
      if wanted is None:
        self.reply(200, content, **headers)
        return
      first, last = wanted.removeprefix("bytes=").split("-")
      part = content[int(first) : int(last) + 1 if last else None]
      end = int(first) + len(part) - 1
      content_range = f"bytes {first}-{end}/{len(content)}"
      self.reply(206, part, Content_Range=content_range, **headers)

  return Handler


@contextlib.contextmanager
def hub(datasets):
  """Serves {"owner/name": {path: content}}; yields the address for HF_ENDPOINT."""
  server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(datasets))
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    yield f"http://127.0.0.1:{server.server_port}"
  finally:
    server.shutdown()
    server.server_close()
