"""A small model for servers, and a server that runs in a thread."""

import asyncio
import contextlib
import threading

import jax
from shared_folders import create_once

from gtpo_jax.config import Config
from gtpo_jax.models import init_params, save
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.serving.http import listen, make_server

LOGIT_SCALE = 4  # of the random weights, so that distributions are peaked


def make_folder(folder):
  """Writes a Hugging Face folder with random weights and this package's tokenizer."""
  worker = RolloutWorker(Config())
  params = init_params(worker.model, jax.random.key(0))
  params = jax.tree.map(lambda x: x * LOGIT_SCALE, params)
  save(worker.model, params, worker.chat.tokenizer, folder, dtype="float32")


def small_folder(tmp_path_factory):
  """Returns such a folder, which all tests share."""
  create = lambda home: make_folder(home / "small")
  return create_once(tmp_path_factory, "served", create) / "small"


@contextlib.contextmanager
def in_a_thread(asgi, port=0, force=False):
  """Runs a server of an app on this machine, and yields its port; ends it with or without force."""
  listener = listen("127.0.0.1", port)
  server = make_server(asgi)
  thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
  thread.start()
  try:
    yield listener.getsockname()[1]
  finally:
    server.should_exit = True
    server.force_exit = force
    thread.join()
    listener.close()
