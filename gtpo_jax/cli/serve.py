"""Opens a policy and serves it until the process is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import uvicorn

from gtpo_jax.rollout.policies import ServingLimits, find_served
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.signals import SIGNALS, OneShot
from gtpo_jax.serving.app import App
from gtpo_jax.serving.generator import Generator
from gtpo_jax.serving.http import is_loopback, listen, make_server
from gtpo_jax.serving.service import Service

TOKEN_VARIABLE = "GTPO_SERVE_TOKEN"


class ServeOptions(NamedTuple):
  """What is served, and where."""

  model: Path  # the workdir of a run, a Hugging Face folder, or a hub id
  step: int | None = None  # the checkpoint of a run; None for the newest, 0 for the base model
  host: str = "127.0.0.1"  # the address
  port: int = 8000  # 0 for a free one
  name: str = ""  # what clients call the model; "" for the name of its folder
  queue: int = 1024  # the completions that may wait
  limits: ServingLimits = ServingLimits()  # what is computed at once, and how


class Opened(NamedTuple):
  """A policy that is ready to be served."""

  name: str
  worker: RolloutWorker
  generator: Generator
  service: Service


def open_service(options: ServeOptions) -> Opened:
  """Reads a policy, and starts its generator.

  Raises:
    UserError: there is no such policy, or an option does not fit it.
  """
  worker, _, read = find_served(options.model, options.step, options.limits)
  name = options.name or model_name(str(options.model))
  worker.chat.tokenizer.name_or_path = name  # messages contain it
  params, _ = read()
  policy = worker.policy(params)
  jax.block_until_ready(policy.params)
  del params
  generator = Generator(policy.engine, policy.params, options.queue)
  return Opened(name, worker, generator, Service(name, worker.chat, policy.engine, generator))


def model_name(model: str) -> str:
  """Returns the name of a folder here or in an object store; a hub id is its own name."""
  if Path(model).exists():
    return Path(os.path.abspath(model)).name  # of a link, its own name
  return model.rstrip("/").rpartition("/")[2] if "://" in model else model


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
  """Serves until SIGINT or SIGTERM; pending answers get `STOP_S` seconds, or until a second one."""
  token = os.environ.get(TOKEN_VARIABLE, "")
  needed = f"{TOKEN_VARIABLE} to a secret that clients must send"
  with open_address(options.host, options.port, token, needed) as (listener, address):
    opened = open_service(options)
    generator = opened.generator
    only_loopback = is_loopback(options.host) and not token
    app = App(opened.service, generator, token, only_loopback=only_loopback)
    engine = opened.worker.engine
    say(
      f"computing in {engine.model.config.compute_dtype}; {generator.slots} slots, prompts of up "
      f"to {engine.max_prompt_tokens} tokens and answers of up to {engine.max_tokens}"
    )
    say(f"{opened.name!r} at http://{address}/v1 (Ctrl-C stops)")
    asyncio.run(run_server(make_server(app.asgi), listener))
    generator.close()


@contextlib.contextmanager
def open_address(
  host: str, port: int, secret: str, needed: str
) -> Iterator[tuple[socket.socket, str]]:
  """Opens an address, which others may reach only with a secret; yields the socket and HOST:PORT.

  The port 0 takes a free one; without a secret, an address that others reach is refused with a
  message of what is `needed`.
  """
  if not is_loopback(host) and not secret:
    raise UserError(f"--host={host} is open to others; set {needed}, or serve on 127.0.0.1")
  with contextlib.closing(listen(host, port)) as listener:
    shown = f"[{host}]" if ":" in host else host
    yield listener, f"{shown}:{listener.getsockname()[1]}"


async def run_server(server: uvicorn.Server, listener: socket.socket) -> None:
  """Serves until SIGINT or SIGTERM; a second one ends the process."""
  loop = asyncio.get_running_loop()

  def stop() -> None:
    server.should_exit = True
    handlers.acted()

  for number in SIGNALS:
    loop.add_signal_handler(number, stop)
  handlers = OneShot(SIGNALS)
  await server.serve(sockets=[listener])
