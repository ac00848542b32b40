"""A server on this machine for tests, with a tiny model, and the official client."""

import asyncio
import contextlib
import gc
import importlib.util
import os
import time

import numpy as np
import pytest
from served import in_a_thread

from gtpo_jax.cli.tinker import OpenedTinker, TinkerOptions
from gtpo_jax.rollout.policies import ServingLimits

KEY = "tml-test"
# The client leaves connections to the collector, and some of its names are to go.
CLIENT_WARNINGS = pytest.mark.filterwarnings(
  "ignore::FutureWarning",
  "ignore::ResourceWarning",
  "ignore::pytest.PytestUnraisableExceptionWarning",
)
SERVERS = []  # those that run


def need_client():
  """Skips a module without the client, and returns it."""
  os.environ["TINKER_API_KEY"] = KEY
  os.environ["TINKER_TELEMETRY"] = "0"
  if importlib.util.find_spec("tinker.types") is None:
    pytest.skip("the client is missing: pip install tinker", allow_module_level=True)
  import tinker

  return tinker


def options_for(model, workdir, **more):
  """TinkerOptions of a small server."""
  limits = ServingLimits(64, 32, "float32", slots=8)
  limits = limits._replace(**{x: more.pop(x) for x in ServingLimits._fields if x in more})
  return TinkerOptions(model, workdir, **{"name": "tiny", "models": 32, **more}, limits=limits)


@contextlib.contextmanager
def running(options, secret=""):
  """Runs a server; yields its address and what was opened."""
  opened = OpenedTinker(options, secret)
  port = options.port if options.port != 8000 else 0
  SERVERS.append(opened)
  try:
    with in_a_thread(opened.app, port, force=True) as port:
      yield f"http://127.0.0.1:{port}", opened
  finally:
    opened.close()
    SERVERS.remove(opened)
    if not SERVERS:
      abort_connections()


@contextlib.contextmanager
def connected(url, key=KEY):
  """A client, whose connections are closed at the end; it leaves some to the collector."""
  import tinker

  service = tinker.ServiceClient(base_url=url, api_key=key)
  try:
    yield service
  finally:
    holder = service.holder
    holder.run_coroutine_threadsafe(holder.aclose()).result(10)


def abort_connections():
  """Aborts what clients have left open, once no server runs."""
  for transport in gc.get_objects():
    if type(transport) is asyncio.selector_events._SelectorSocketTransport:
      with contextlib.suppress(RuntimeError, AttributeError):  # its loop has ended
        transport._loop.call_soon_threadsafe(transport.abort)
  time.sleep(0.1)


def supervised(client, tokens, weights):
  """A datum of cross_entropy: predicts the tokens after the first."""
  return client.types.Datum(
    model_input=client.types.ModelInput.from_ints(list(tokens[:-1])),
    loss_fn_inputs={
      "target_tokens": np.asarray(tokens[1:], np.int64),
      "weights": np.asarray(weights, np.float32),
    },
  )


def sampled(client, prompt, sequence, advantage):
  """A datum of a policy gradient: a prompt and what was sampled after it, with its origin."""
  before = len(prompt) - 1
  tokens = [*prompt, *sequence.tokens]
  datum = client.types.Datum(
    model_input=client.types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={
      "target_tokens": np.asarray(tokens[1:], np.int64),
      "logprobs": np.asarray([0.0] * before + list(sequence.logprobs), np.float32),
      "advantages": np.asarray([0.0] * before + [advantage] * len(sequence.tokens), np.float32),
    },
  )
  name = sequence.sequence_id
  of_prompt = lambda offset, length: client.PromptProvenanceSpan(
    sequence_id=name, offset=offset, length=length
  )
  of_sample = lambda length: client.SampledProvenanceSpan(sequence_id=name, length=length)
  read = [of_prompt(0, len(prompt)), of_sample(len(sequence.tokens) - 1)]
  return datum.with_provenance(read, [of_prompt(1, before), of_sample(len(sequence.tokens))])
