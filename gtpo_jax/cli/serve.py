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

from gtpo_jax.rollout.policies import find_policy, serving_config
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.signals import SIGNALS, OneShot
from gtpo_jax.serving.app import App
from gtpo_jax.serving.generator import Generator
from gtpo_jax.serving.http import is_loopback, listen, make_server
from gtpo_jax.serving.service import Service

TOKEN_VARIABLE = "GTPO_SERVE_TOKEN"


class ServeOptions(NamedTuple):
  """What is served, and where.

  Attributes:
    model: the workdir of a run, a Hugging Face folder, or a hub id.
    step: the checkpoint of a run; None for the newest, 0 for the base model.
    host: the address.
    port: 0 for a free one.
    name: what clients call the model; "" for the name of its folder.
    max_prompt_tokens: the longest prompt; None for the default.
    max_tokens: the longest completion; None for the default.
    compute_dtype: the format of activations; None for the run's own, or that of the platform.
    slots: the completions that run at once; 0 for the platform's default.
    queue: the completions that may wait.
  """

  model: Path
  step: int | None = None
  host: str = "127.0.0.1"
  port: int = 8000
  name: str = ""
  max_prompt_tokens: int | None = None
  max_tokens: int | None = None
  compute_dtype: str | None = None
  slots: int = 0
  queue: int = 1024


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
  config = serving_config(
    options.model,
    options.max_prompt_tokens,
    options.max_tokens,
    options.compute_dtype,
    options.slots,
  )
  worker, _, read = find_policy(options.model, options.step, config, stop=(), serves=True)
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
    return Path(model).resolve().name
  return model.rstrip("/").rpartition("/")[2] if "://" in model else model


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
  """Serves until SIGINT or SIGTERM; answers under way get `STOP_S` seconds, or until a second one.

  Args:
    options: what, and where.
    say: shows a line.

  Raises:
    UserError: the address cannot be used, or needs a token; or see `open_service`.
  """
  token = os.environ.get(TOKEN_VARIABLE, "")
  needed = f"{TOKEN_VARIABLE} to a secret that clients must send"
  with open_address(options.host, options.port, token, needed) as (listener, address):
    opened = open_service(options)
    generator = opened.generator
    only_loopback = is_loopback(options.host) and not token
    app = App(opened.service, generator, token, only_loopback=only_loopback)
    say(f"computing in {opened.worker.model.config.compute_dtype}; {generator.slots} slots")
    say(f"{opened.name!r} at http://{address}/v1 (Ctrl-C stops)")
    asyncio.run(run_server(make_server(app.asgi), listener))
    generator.close()


@contextlib.contextmanager
def open_address(
  host: str, port: int, secret: str, needed: str
) -> Iterator[tuple[socket.socket, str]]:
  """Opens an address, which others may reach only with a secret; yields the socket and HOST:PORT.

  Args:
    host: the address.
    port: 0 for any free one.
    secret: what clients must send; "" for nothing.
    needed: completes "set ...", if the secret is missing.

  Raises:
    UserError: the address cannot be used, or is open to others without a secret.
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
