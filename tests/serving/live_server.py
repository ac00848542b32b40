"""A server on this machine for tests: the app of `gtpo serve` in a thread, with a small model."""

import asyncio
import contextlib
import threading

import jax

from gtpo_jax.cli.serve import ServeOptions, open_service
from gtpo_jax.config import Config
from gtpo_jax.models import init_params, save
from gtpo_jax.rollout.policies import ServingLimits
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.serving.app import App
from gtpo_jax.serving.http import listen, make_server

LOGIT_SCALE = 4  # scales the random weights, so that distributions are peaked


def make_folder(folder):
  """Writes a Hugging Face folder with random weights and this package's tokenizer."""
  worker = RolloutWorker(Config())
  params = init_params(worker.model, jax.random.key(0))
  params = jax.tree.map(lambda x: x * LOGIT_SCALE, params)
  save(worker.model, params, worker.chat.tokenizer, folder, dtype="float32")
  return folder


class Live:
  """A server that runs.

  Attributes:
    url: its address.
    opened: what it serves.
    clients: the synchronous clients, which are closed before the server.
  """

  def __init__(self, opened, port):
    self.opened = opened
    self.clients = contextlib.ExitStack()
    self.url = f"http://127.0.0.1:{port}"
    self.model = opened.name

  def client(self, kind="OpenAI", **settings):
    """A client that does not repeat requests, closed with the server if it is not asynchronous."""
    import openai

    settings = {"api_key": "none", "max_retries": 0, "timeout": 120, **settings}
    client = getattr(openai, kind)(base_url=f"{self.url}/v1", **settings)
    if kind == "OpenAI":
      self.clients.enter_context(client)
    return client


@contextlib.contextmanager
def running(folder, token="", **options):
  """Runs a server."""
  limits = ServingLimits(64, 48, slots=16)
  limits = limits._replace(**{x: options.pop(x) for x in ServingLimits._fields if x in options})
  opened = open_service(ServeOptions(folder, **options, limits=limits))
  listener = listen("127.0.0.1", 0)
  app = App(opened.service, opened.generator, token, only_loopback=not token)
  server = make_server(app.asgi)
  thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
  thread.start()
  try:
    live = Live(opened, listener.getsockname()[1])
    with live.clients:
      yield live
  finally:
    server.should_exit = True
    thread.join()
    opened.generator.close()
    listener.close()
