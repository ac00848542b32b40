"""A server on this machine for tests: the app of `gtpo serve` in a thread, with a small model."""

import contextlib

from served import in_a_thread

from gtpo_jax.cli.serve import ServeOptions, open_service
from gtpo_jax.rollout.policies import ServingLimits
from gtpo_jax.serving.app import App


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
  app = App(opened.service, opened.generator, token, only_loopback=not token)
  try:
    with in_a_thread(app.asgi) as port:
      live = Live(opened, port)
      with live.clients:
        yield live
  finally:
    opened.generator.close()
