"""The application: all paths. Requests are written to the journal before they are acknowledged."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from gtpo_jax.serving.http import answering, starlette_app
from gtpo_jax.tinker.ledger.ledger import Ledger
from gtpo_jax.tinker.models import ServedBase
from gtpo_jax.tinker.routes.client_requests import key_of
from gtpo_jax.tinker.routes.sampling_routes import SamplingRoutes
from gtpo_jax.tinker.routes.session_routes import SessionRoutes
from gtpo_jax.tinker.routes.training_routes import TrainingRoutes
from gtpo_jax.tinker.routes.weights_routes import WeightsRoutes
from gtpo_jax.tinker.sampler import Sampler
from gtpo_jax.tinker.saved_weights import Store

PREFIX = "/api/v1/"


def tinker_app(
  base: ServedBase,
  ledger: Ledger,
  store: Store,
  sampler: Sampler,
  max_rank: int,
  queue: int,
  secret: str,
  only_loopback: bool,
) -> Starlette:
  """Returns the application that a server runs.

  Args:
    base: the model that others begin with.
    ledger: takes requests.
    store: has saved weights.
    sampler: of the ledger; it cancels samples.
    max_rank: the highest rank of adapters.
    queue: how many samples a client may have under way.
    secret: the key that clients must have; "" for any, each of which sees only its own.
    only_loopback: as in `answering`.
  """
  endpoints = [
    *SessionRoutes(base, ledger, queue).endpoints,
    *TrainingRoutes(base, ledger, store, max_rank).endpoints,
    *SamplingRoutes(base, ledger, store, sampler).endpoints,
    *WeightsRoutes(store).endpoints,
  ]
  answer = lambda x: answering(x, only_loopback, secret, sent=key_of)
  return starlette_app(
    [Route(PREFIX + x.path, answer(x.handler), methods=[x.method]) for x in endpoints]
  )
