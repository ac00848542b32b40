"""Requests of the protocol by hand."""

import contextlib
import http.client
import json
from urllib.parse import urlsplit

import numpy as np

from gtpo_jax.tinker.schema import CLASSES, FLOAT32, INT64

POLLS = 6  # for a result, each of at most half a minute


def send(url, method, path, body=b"", kind="application/json", **headers):
  headers = {"Content-Type": kind, "X-API-Key": "tml-a", **headers}
  opened = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
  with contextlib.closing(opened) as connection:
    connection.request(method, f"/api/v1/{path}", body, headers)
    with connection.getresponse() as answer:
      return answer.status, answer.read()


def post(url, path, /, **fields):
  status, data = send(url, "POST", path, json.dumps(fields).encode())
  return status, json.loads(data or b"null")


def result(url, name):
  """The result of a request, once there is one."""
  for _ in range(POLLS):
    status, data = send(url, "POST", "retrieve_future", json.dumps({"request_id": name}).encode())
    if status != 408:
      return status, data
  raise AssertionError(f"{name} has no result")


def gradient_request(model, seq, weight=1.0, length=6):
  """A request of cross_entropy with one sequence."""
  message = CLASSES["ForwardBackwardRequest"](model_id=model, seq_id=seq, loss_fn="cross_entropy")
  datum = message.data.add()
  datum.model_input.add().encoded_text.tokens = np.arange(3, 3 + length, dtype=np.int32).tobytes()
  targets = datum.loss_fn_inputs["target_tokens"]
  targets.dtype = INT64
  targets.dense = np.arange(4, 4 + length).tobytes()
  weights = datum.loss_fn_inputs["weights"]
  weights.dtype = FLOAT32
  weights.dense = np.full(length, weight, np.float32).tobytes()
  return message.SerializeToString()


def create(url, rank=2, number=0, session=None):
  session = session or post(url, "create_session", sdk_version="0.38.0")[1]["session_id"]
  lora = {"rank": rank, "seed": 5}
  fields = {"session_id": session, "model_seq_id": number, "base_model": "tiny"}
  status, answer = post(url, "create_model", **fields, lora_config=lora)
  assert status == 200
  return session, json.loads(result(url, answer["request_id"])[1])["model_id"]


def backward(url, model, seq, **settings):
  body = gradient_request(model, seq, **settings)
  status, data = send(url, "POST", "forward_backward", body, "application/x-protobuf")
  assert status == 200, data
  return json.loads(data)["request_id"]


def step(url, model, seq):
  status, answer = post(
    url, "optim_step", model_id=model, seq_id=seq, adam_params={"learning_rate": 0.01}
  )
  assert status == 200
  return json.loads(result(url, answer["request_id"])[1])["metrics"]["grad_norm:mean"]
