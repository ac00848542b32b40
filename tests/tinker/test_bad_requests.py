"""Requests that are refused in one line, which names their mistake; the next one is answered."""

import json

import numpy as np
import pytest
from live import options_for, running
from protocol import create, gradient_request, post, result, send, step

from gtpo_jax.tinker import app
from gtpo_jax.tinker.schema import BFLOAT16, CLASSES, FLOAT32, INT64

NAN, INF = float("nan"), float("inf")
HALF = "\ud800"  # of a surrogate pair
RATE = {"learning_rate": 0.01}


def nested(depth):
  value = {}
  for _ in range(depth):
    value = {"a": value}
  return value


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
  with running(options_for(model, tmp_path_factory.mktemp("workdir"))) as (url, _):
    yield url


@pytest.fixture
def trained(url):
  """A session, its model, and the number of the model's next request, in a list."""
  session, model = create(url)
  return session, model, [1]


def is_refused(url, path, body, message, kind="application/json", status=400):
  found, data = send(url, "POST", path, body, kind)
  row = (path, body[:200], found, data)
  assert found == status, row
  told = json.loads(data)["error"]["message"]
  assert message in told and "\n" not in told and len(told) < 600, row
  return told


def check_numbered(url, trained, path, make, message, status=400):
  """A request with a number is refused, also where its result is asked for."""
  _, model, seq = trained
  body, kind = make(model, seq[0])
  told = is_refused(url, path, body, message, kind, status)
  found, data = send(
    url, "POST", "retrieve_future", json.dumps({"request_id": f"{model}:{seq[0]}"}).encode()
  )
  assert found == 200 and json.loads(data) == {"error": told, "category": "user"}, (path, data)
  seq[0] += 1


STEPS = [
  ({"adam_params": None}, "adam_params is missing"),
  ({"adam_params": []}, "adam_params must be"),
  ({"adam_params": False}, "adam_params must be"),
  ({"adam_params": "fast"}, "adam_params must be"),
  ({"adam_params": RATE, "learning_rate": 0.1}, "unknown field"),
  ({"adam_param": RATE}, "adam_params is missing"),
  ({"adam_params": {"learning_rat": 0.1}}, "learning_rate"),
  ({"adam_params": {"lr": 0.1}}, "unknown field"),
  ({"adam_params": {"beta1": 1}}, "adam_params.beta1 must be less than"),
  ({"adam_params": {"beta1": 1.0}}, "adam_params.beta1 must be less than"),
  ({"adam_params": {"beta2": 1.0}}, "adam_params.beta2"),
  ({"adam_params": {"beta2": 0.99999999999}}, "adam_params.beta2"),
  ({"adam_params": {"beta1": -0.1}}, "adam_params.beta1"),
  ({"adam_params": {"eps": 0}}, "adam_params.eps"),
  ({"adam_params": {"eps": 1e-50}}, "adam_params.eps"),
  ({"adam_params": {"eps": -1e-8}}, "adam_params.eps"),
  ({"adam_params": {"learning_rate": NAN}}, "learning_rate must be a finite number"),
  ({"adam_params": {"learning_rate": INF}}, "learning_rate must be a finite number"),
  ({"adam_params": {"learning_rate": -1}}, "learning_rate"),
  ({"adam_params": {"learning_rate": 1e39}}, "learning_rate"),
  ({"adam_params": {"learning_rate": "0.1"}}, "learning_rate must be a valid number"),
  ({"adam_params": {"learning_rate": True}}, "learning_rate must be a valid number"),
  ({"adam_params": {"learning_rate": None}}, "learning_rate must be a valid number"),
  ({"adam_params": {"learning_rate": [0.1]}}, "learning_rate must be a valid number"),
  ({"adam_params": {"weight_decay": -1}}, "weight_decay"),
  ({"adam_params": {"grad_clip_norm": "no"}}, "grad_clip_norm"),
  ({"adam_params": RATE, "optimizer_params": {}}, "optimizer_params are not supported"),
  ({"adam_params": RATE, "type": "step"}, "type must be 'optim_step'"),
]
SAVES = [
  ({"path": ["a"]}, "path must be a valid string"),
  ({"path": {"a": 1}}, "path must be a valid string"),
  ({"path": 5}, "path must be a valid string"),
  ({"path": ""}, "path must be a name"),
  ({"path": "../x"}, "path must be a name"),
  ({"path": "a/b"}, "path must be a name"),
  ({"path": "."}, "path must be a name"),
  ({"path": "~1"}, "path must be a name"),
  ({"path": "a\0"}, "path must be a name"),
  ({"path": "a\n"}, "path must be a name"),
  ({"path": "a" * 200}, "path must be a name"),
  ({"path": HALF}, "not valid JSON"),
  ({"path": "x", "ttl_seconds": 0}, "ttl_seconds"),
  ({"path": "x", "ttl_seconds": -1}, "ttl_seconds"),
  ({"path": "x", "ttl_seconds": 1.5}, "ttl_seconds"),
  ({"path": "x", "ttl_seconds": True}, "ttl_seconds"),
  ({"path": "x", "ttl_seconds": "9"}, "ttl_seconds"),
  ({"path": "x", "ttl_seconds": 10**12}, "ttl_seconds"),
  ({"path": "x", "ttl_seconds": NAN}, "ttl_seconds"),
  ({"path": "x", "overwrite": "yes"}, "overwrite must be a valid boolean"),
  ({"path": "x", "overwrite": 1}, "overwrite must be a valid boolean"),
  ({"path": "x", "overwrit": True}, "did you mean 'overwrite'"),
  ({"path": "x", "user_metadata": {"a": 1}}, "user_metadata"),
  ({"path": "x", "user_metadata": {"a": {"b": "c"}}}, "user_metadata"),
  ({"path": "x", "user_metadata": ["a"]}, "user_metadata"),
  ({"path": "x", "user_metadata": {"a": HALF}}, "not valid JSON"),
  ({"path": "x", "user_metadata": {HALF: "a"}}, "not valid JSON"),
  ({"path": "x", "public": True}, "unknown field"),
]
SAVES_FOR_SAMPLER = [
  *SAVES,
  ({"kind": "live"}, "kind must be 'snapshot' or 'inflight'"),
  ({"sampling_session_seq_id": -1}, "sampling_session_seq_id"),
  ({"sampling_session_seq_id": 2**70}, "sampling_session_seq_id"),
  ({"sampling_session_seq_id": "0"}, "sampling_session_seq_id"),
]
LOADS = [
  ({}, 400, "path is missing"),
  ({"path": "tinker://a/weights/b", "optimizer": True}, 404, "there are no weights"),
  ({"path": "tinker://a/weights/../b", "optimizer": True}, 404, "there are no weights"),
  ({"path": "/etc/passwd", "optimizer": True}, 404, "there are no weights"),
  ({"path": "", "optimizer": True}, 404, "there are no weights"),
  ({"path": "tinker://a/weights/\0", "optimizer": True}, 404, "there are no weights"),
  ({"path": "tinker://a/weights/b"}, 400, "optimizer is missing"),
  ({"path": "tinker://a/weights/b", "optimizer": "no"}, 400, "optimizer must be a valid boolean"),
  ({"path": ["tinker://a/weights/b"], "optimizer": True}, 400, "path must be a valid string"),
  ({"path": HALF, "optimizer": True}, 400, "not valid JSON"),
  ({"path": "a", "optimizer": True, "weights_access_token": "t"}, 400, "is not supported"),
  ({"path": "a", "optimizer": True, "base_model": "other"}, 400, "this server has 'tiny'"),
  ({"path": "a", "optimizer": True, "session_id": "x"}, 400, "needs either model_id"),
  ({"path": "a", "optimizer": True, "model_seq_id": 3}, 400, "needs either model_id"),
  ({"path": "a", "optimizer": True, "user_metadata": {"a": 1}}, 400, "user_metadata"),
  ({"path": "a", "optimizer": True, "mood": 1}, 400, "unknown field"),
]


def test_json_requests_of_a_model(url, trained):
  tables = {
    "optim_step": STEPS,
    "save_weights": SAVES,
    "save_weights_for_sampler": SAVES_FOR_SAMPLER,
  }
  rows = [(path, x, 400, m) for path, table in tables.items() for x, m in table]
  for path, fields, status, message in rows + [("load_weights", *row) for row in LOADS]:
    make = lambda model, seq, fields=fields: (
      json.dumps({"model_id": model, "seq_id": seq, **fields}).encode(),
      "application/json",
    )
    check_numbered(url, trained, path, make, message, status)
  _, model, seq = trained
  assert step(url, model, seq[0]) == 0  # they have left no gradient
  seq[0] += 1


def test_bodies_that_are_no_json(url, trained):
  head = lambda model, seq: b'{"model_id": "%s", "seq_id": %d' % (model.encode(), seq)
  for rest, message in [
    (b"", "not valid JSON"),
    (b', "adam_params": {', "not valid JSON"),
    (b', "adam_params": ' + b'{"a": ' * 20_000 + b"}" * 20_001, "not valid JSON"),
    (b', "path": "\xff"}', "JSON"),
  ]:
    make = lambda model, seq, rest=rest: (head(model, seq) + rest, "application/json")
    check_numbered(url, trained, "optim_step", make, message)
  _, model, seq = trained
  assert step(url, model, seq[0]) == 0
  seq[0] += 1


def message_with(change):
  """A request to learn whose message was changed."""

  def make(model, seq):
    message = CLASSES["ForwardBackwardRequest"].FromString(gradient_request(model, seq))
    change(message)
    return message.SerializeToString(), "application/x-protobuf"

  return make


def tensor(message, name, values, dtype=FLOAT32, shape=()):
  inputs = message.data[0].loss_fn_inputs[name]
  inputs.dtype = dtype
  inputs.dense = np.asarray(values).tobytes()
  inputs.shape[:] = shape


def policy_gradient(message, loss="importance_sampling", **config):
  message.loss_fn = loss
  del message.data[0].loss_fn_inputs["weights"]
  for name in ("logprobs", "advantages"):
    tensor(message, name, np.full(6, 0.5, np.float32))
  for name, value in config.items():
    if isinstance(value, str):
      message.loss_fn_config_v2[name].text = value
    else:
      message.loss_fn_config[name] = value


def credit(**settings):
  return lambda x: policy_gradient(x, credit="gtpo", **settings)


SIX = np.ones(6, np.float32)
GRADIENTS = [
  (lambda x: x.ClearField("data"), "data is empty"),
  (lambda x: setattr(x, "loss_fn", "cross_entrop"), "did you mean 'cross_entropy'"),
  (lambda x: setattr(x, "loss_fn", "stable_reinforce"), "not public"),
  (lambda x: tensor(x, "mask", SIX), "does not read mask"),
  (lambda x: tensor(x, "advantages", SIX), "does not read advantages"),
  (lambda x: tensor(x, "logprobs", SIX), "does not read logprobs"),
  (lambda x: tensor(x, "weight", SIX), "does not read weight"),
  (lambda x: (policy_gradient(x), tensor(x, "weights", SIX)), "does not read weights"),
  (lambda x: (policy_gradient(x), tensor(x, "mask", SIX)), "does not read mask"),
  (
    lambda x: (policy_gradient(x), tensor(x, "sequence_ratio_mask", SIX)),
    "does not read sequence_ratio_mask",
  ),
  (lambda x: setattr(x, "loss_fn", "ppo"), "ppo needs logprobs, advantages"),
  (lambda x: x.data[0].loss_fn_inputs.pop("weights"), "needs weights"),
  (lambda x: x.data[0].loss_fn_inputs.pop("target_tokens"), "target_tokens is missing"),
  (lambda x: tensor(x, "weights", SIX, shape=[7]), "6 values for the shape [7]"),
  (lambda x: tensor(x, "weights", SIX, shape=[-1]), "6 values for the shape [-1]"),
  (lambda x: tensor(x, "weights", SIX, shape=[2, 3]), "2 axes"),
  (lambda x: tensor(x, "weights", SIX[:5]), "5 values for the 6 tokens"),
  (lambda x: tensor(x, "weights", SIX * NAN), "not finite"),
  (lambda x: tensor(x, "weights", SIX * INF), "not finite"),
  (lambda x: tensor(x, "weights", np.full(6, 0x7F80, np.uint16), BFLOAT16), "not finite"),
  (lambda x: tensor(x, "weights", SIX, dtype=9), "unknown dtype 9"),
  (lambda x: setattr(x.data[0].loss_fn_inputs["weights"], "dense", b"abc"), "no whole number"),
  (lambda x: tensor(x, "target_tokens", SIX), "target_tokens must be integers"),
  (lambda x: tensor(x, "target_tokens", np.full(6, -1), INT64), "the token id -1"),
  (lambda x: tensor(x, "target_tokens", np.full(6, 2**40), INT64), "ids are from 0"),
  (lambda x: setattr(x.data[0].model_input[0].encoded_text, "tokens", b"ab"), "no whole number"),
  (
    lambda x: setattr(
      x.data[0].model_input[0].encoded_text, "tokens", np.full(6, 10**6, np.int32).tobytes()
    ),
    "the token id 1000000",
  ),
  (
    lambda x: setattr(x.data[0].model_input[0].encoded_text, "tokens", bytes(4 * 2**20 + 4)),
    "1048577 tokens, but there must be",
  ),
  (lambda x: setattr(x.data[0].model_input[0].image, "data", b"a"), "images are not supported"),
  (lambda x: x.loss_fn_config.update({"clip": 1.0}), "has no setting"),
  (lambda x: policy_gradient(x, "ppo", clip_low_threshold=-1.0), "from 0 to"),
  (lambda x: policy_gradient(x, "ppo", clip_high_threshold=NAN), "must be finite"),
  (lambda x: policy_gradient(x, "ppo", clip_high_threshold=INF), "must be finite"),
  (lambda x: policy_gradient(x, "ppo", clip_high_threshold=1e39), "clip_high_threshold"),
  (lambda x: policy_gradient(x, "ppo", clip_high_threshold=0.1), "must be at most"),
  (lambda x: policy_gradient(x, "ppo", clip_high_threshold="1"), "clip_high_threshold"),
  (lambda x: policy_gradient(x, "dro", beta=1e300), "beta"),
  (lambda x: policy_gradient(x, "dro", clip_low_threshold=0.5), "has no setting"),
  (lambda x: policy_gradient(x, credit="gtop"), "unknown credit"),
  (lambda x: policy_gradient(x, credit=1.0), "unknown credit"),
  (lambda x: policy_gradient(x, "dro", credit="gtpo"), "takes no credit"),
  (lambda x: x.loss_fn_config_v2["credit"].__setattr__("text", "gtpo"), "takes no credit"),
  (credit(), "credit needs spans"),
  (credit(ratio="token"), "ratio"),
  (credit(objective="clip"), "objective"),
  (credit(kl_weight=0.1), "kl_weight"),
  (credit(tis_cap=2.0), "tis_cap"),
  (credit(eps_low=0.1), "eps_low"),
  (credit(average="token"), "average"),
  (credit(alpha3=0.1), "alpha3"),
  (credit(alpha2=-1.0), "alpha2"),
  (credit(alpha2=NAN), "must be finite"),
  (credit(alpha2="much"), "alpha2"),
]


def test_requests_to_learn(url, trained):
  for change, message in GRADIENTS:
    check_numbered(url, trained, "forward_backward", message_with(change), message)
  _, model, seq = trained
  assert step(url, model, seq[0]) == 0
  seq[0] += 1


def test_a_body_over_the_limit_is_the_same_however_the_network_divides_it(url, trained):
  _, model, seq = trained
  fields = {
    "model_id": model,
    "seq_id": seq[0],
    "path": "a",
    "user_metadata": {"a": "x" * (17 << 20)},
  }
  body = json.dumps(fields).encode()
  answers = []
  for size in (len(body), 1_000_003, 65_536):
    parts = (body[i : i + size] for i in range(0, len(body), size))
    answers.append(send(url, "POST", "save_weights", parts))
  assert answers[0][0] == 413 and b"over the limit" in answers[0][1]
  for status, data in answers[1:]:  # it is acknowledged by now, as refused
    assert (status, json.loads(data)["request_id"]) == (200, f"{model}:{seq[0]}")
  seq[0] += 1


def test_bodies_over_the_limit(url, trained, monkeypatch):
  """More than fits in the buffers of the connection, so that the server must read them."""
  long = lambda model, seq: (
    json.dumps(
      {"model_id": model, "seq_id": seq, "path": "a", "user_metadata": {"a": "x" * 70_000_000}}
    ).encode(),
    "application/json",
  )
  check_numbered(url, trained, "save_weights", long, "over the limit of 16777216 bytes", 413)
  late = lambda model, seq: (
    json.dumps({"user_metadata": {"a": "x" * 70_000_000}, "model_id": model}).encode(),
    "application/json",
  )
  body, kind = late(*trained[:2])
  is_refused(url, "save_weights", body, "over the limit", kind, 413)
  is_refused(url, "asample", body, "over the limit", kind, 413)
  is_refused(url, "create_session", body, "over the limit", kind, 413)
  monkeypatch.setattr(app, "MAX_BATCH_BYTES", 100)
  check_numbered(
    url, trained, "forward_backward", message_with(lambda x: None), "over the limit of 100", 413
  )
  _, model, seq = trained
  assert step(url, model, seq[0]) == 0
  seq[0] += 1


LORA = {"rank": 2, "seed": 5}
MODELS = [
  ({"base_model": None}, "base_model is missing"),
  ({"base_model": "other"}, "this server has 'tiny'"),
  ({"base_model": 5}, "base_model must be a valid string"),
  ({"base_model": HALF}, "not valid JSON"),
  ({"base_model": "\0"}, "this server has 'tiny'"),
  ({"lora_config": {}}, "lora_config.rank is missing"),
  ({"lora_config": {"seed": 5}}, "lora_config.rank is missing"),
  ({"lora_config": {"rnak": 2}}, "rank"),
  ({"lora_config": LORA | {"alpha": 32}}, "unknown field"),
  ({"lora_config": LORA | {"lora_alpha": 32}}, "unknown field"),
  ({"lora_config": LORA | {"target_modules": ["q"]}}, "unknown field"),
  ({"lora_config": LORA | {"train_mlp": "no"}}, "train_mlp must be a valid boolean"),
  ({"lora_config": LORA | {"train_mlp": 0}}, "train_mlp must be a valid boolean"),
  ({"lora_config": LORA | {"train_mlp": None}}, "train_mlp must be a valid boolean"),
  ({"lora_config": LORA | {"train_unembed": "yes"}}, "train_unembed must be a valid boolean"),
  ({"lora_config": LORA | {"train_mlp": False, "train_attn": False}}, "the head alone"),
  ({"lora_config": {"rank": 0, "train_mlp": False}}, "train_mlp"),
  ({"lora_config": {"rank": 0, "train_attn": False}}, "train_attn"),
  ({"lora_config": {"rank": -1}}, "lora_config.rank"),
  ({"lora_config": {"rank": 2.0}}, "lora_config.rank"),
  ({"lora_config": {"rank": True}}, "lora_config.rank"),
  ({"lora_config": {"rank": "2"}}, "lora_config.rank"),
  ({"lora_config": {"rank": 1000}}, "limit of 128"),
  ({"lora_config": {"rank": 2**70}}, "rank"),
  ({"lora_config": LORA | {"seed": -1}}, "lora_config.seed"),
  ({"lora_config": LORA | {"seed": 2**32}}, "lora_config.seed"),
  ({"lora_config": LORA | {"seed": 5 + 2**32}}, "lora_config.seed"),
  ({"lora_config": LORA | {"seed": 1.5}}, "lora_config.seed"),
  ({"lora_config": []}, "lora_config must be"),
  ({"lora_config": "small"}, "lora_config must be"),
  ({"lora_config": False}, "lora_config must be"),
  ({"optimizer_config": {"type": "dimuon"}}, "must be 'adamw'"),
  ({"optimizer_config": {"type": "adamw", "beta1": 0.9}}, "unknown field"),
  ({"user_metadata": nested(700)}, "not valid JSON"),
  ({"user_metadata": {"a": [HALF]}}, "not valid JSON"),
  ({"user_metadata": {HALF: 1}}, "not valid JSON"),
  ({"user_metadata": {"a": {HALF: 1}}}, "not valid JSON"),
  ({"user_metadata": {"a": NAN}}, "user_metadata must have no numbers that are not finite"),
  ({"user_metadata": ["a"]}, "user_metadata must be"),
  ({"model_seq_id": -1}, "model_seq_id"),
  ({"model_seq_id": "0"}, "model_seq_id"),
  ({"model_seq_id": 0.5}, "model_seq_id"),
  ({"model_seq_id": 2**63}, "model_seq_id"),
  ({"model_seq_id": None}, "model_seq_id is missing"),
  ({"session_id": 5}, "session_id must be a valid string"),
  ({"mood": "good"}, "unknown field"),
]
SAMPLERS = [
  ({}, "this server has 'tiny'"),
  ({"base_model": "other"}, "this server has 'tiny'"),
  ({"base_model": ["tiny"]}, "base_model must be a valid string"),
  ({"model_path": ["a"]}, "model_path must be a valid string"),
  ({"base_model": "tiny", "sampling_session_seq_id": -1}, "sampling_session_seq_id"),
  ({"base_model": "tiny", "sampling_session_seq_id": True}, "sampling_session_seq_id"),
  ({"base_model": "tiny", "temperature": 1.0}, "unknown field"),
]


def test_models_and_samplers(url, trained):
  session = trained[0]
  given = {"session_id": session, "model_seq_id": 9, "base_model": "tiny", "lora_config": LORA}
  for fields, message in MODELS:
    is_refused(url, "create_model", json.dumps(given | fields).encode(), message)
  given = {"session_id": session, "sampling_session_seq_id": 9}
  for fields, message in SAMPLERS:
    is_refused(url, "create_sampling_session", json.dumps(given | fields).encode(), message)
  create(url, session=session, number=9)  # the number was not taken


PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
FEW = {"max_tokens": 2}
SAMPLES = [
  ({"num_samples": 0}, "num_samples"),
  ({"num_samples": -1}, "num_samples"),
  ({"num_samples": 1.5}, "num_samples"),
  ({"num_samples": True}, "num_samples"),
  ({"num_samples": "2"}, "num_samples"),
  ({"num_samples": 10**6}, "num_samples"),
  ({"seq_id": None}, "seq_id is missing"),
  ({"seq_id": "a"}, "seq_id"),
  ({"seq_id": 2**63}, "seq_id"),
  ({"prompt": None}, "prompt is missing"),
  ({"prompt": "abc"}, "prompt must be"),
  ({"prompt": {"chunks": []}}, "prompt is empty"),
  ({"prompt": {"chunks": [{"tokens": [1.5]}]}}, "prompt.chunks[0].tokens[0]"),
  ({"prompt": {"chunks": [{"tokens": [True]}]}}, "prompt.chunks[0].tokens[0]"),
  ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "no id from 0"),
  ({"prompt": {"chunks": [{"tokens": [2**70]}]}}, "prompt"),
  ({"prompt": {"chunks": [{"tokens": [5] * 65}]}}, "prompt has 65 tokens"),
  ({"prompt": {"chunks": [{"type": "image", "data": "a"}]}}, "prompt.chunks[0]"),
  ({"prompt": {"chunks": [{"tokens": [5], "role": "user"}]}}, "unknown field"),
  ({"min_p": 0.1}, "unknown field"),
  ({"temperature": 0.5}, "unknown field"),
  ({"num_sample": 2}, "did you mean 'num_samples'"),
  ({"prompt_logprobs": "yes"}, "prompt_logprobs"),
  ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
  ({"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
  ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
  ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
  ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n"),
  ({"model_path": "tinker://a/weights/b"}, "unknown field"),
]
SAMPLINGS = [
  ({"min_p": 0.1}, "unknown field"),
  ({"presence_penalty": 0.1}, "unknown field"),
  ({"frequency_penalty": 0.1}, "unknown field"),
  ({"repetition_penalty": 1.1}, "unknown field"),
  ({"logit_bias": {"5": 1}}, "unknown field"),
  ({"temprature": 0.5}, "did you mean 'temperature'"),
  ({"n": 2}, "unknown field"),
  ({"max_tokens": -1}, "max_tokens"),
  ({"max_tokens": 33}, "max_tokens is 33"),
  ({"max_tokens": 2.0}, "max_tokens"),
  ({"max_tokens": "2"}, "max_tokens"),
  ({"max_tokens": 2**70}, "max_tokens"),
  ({"temperature": NAN}, "temperature"),
  ({"temperature": -1}, "temperature"),
  ({"temperature": 1e-9}, "temperature"),
  ({"temperature": 1e9}, "temperature"),
  ({"temperature": "1"}, "temperature"),
  ({"temperature": None}, "temperature"),
  ({"top_p": 0}, "top_p"),
  ({"top_p": 1.5}, "top_p"),
  ({"top_k": -2}, "top_k"),
  ({"top_k": 1.5}, "top_k"),
  ({"top_k": 2**40}, "top_k"),
  ({"seed": -1}, "seed"),
  ({"seed": 2**32}, "seed"),
  ({"seed": 5 + 2**32}, "seed"),
  ({"seed": "5"}, "seed"),
  ({"stop": []}, "stop must not be empty"),
  ({"stop": ""}, "stop"),
  ({"stop": [-1]}, "stop"),
  ({"stop": [10**6]}, "stop has the token 1000000"),
  ({"stop": [2**70]}, "stop has the token"),
  ({"stop": [True]}, "stop"),
  ({"stop": [1.0]}, "stop"),
  ({"stop": [[5]]}, "stop"),
  ({"stop": [5, "a"]}, "stop"),
  ({"stop": {"a": 1}}, "stop"),
  ({"stop": 5}, "stop"),
  ({"stop": [HALF]}, "not valid JSON"),
]


def sampler_of(url, session, number=0):
  given = {"session_id": session, "sampling_session_seq_id": number, "base_model": "tiny"}
  return post(url, "create_sampling_session", **given)[1]["sampling_session_id"]


def test_samples(url, trained):
  sampler = sampler_of(url, trained[0])
  given = {"sampling_session_id": sampler, "seq_id": 0, "prompt": PROMPT, "sampling_params": FEW}
  inner = [({"sampling_params": FEW | x}, message) for x, message in SAMPLINGS]
  for fields, message in [*SAMPLES, *inner, ({"sampling_params": [1]}, "sampling_params")]:
    is_refused(url, "asample", json.dumps(given | fields).encode(), message)
  status, answer = post(url, "asample", **given)  # its number was not taken
  assert status == 200 and result(url, answer["request_id"])[0] == 200


def test_names_that_nobody_has(url, trained):
  session, model, _ = trained
  for name in (
    "",
    "x",
    HALF,
    "\0",
    "a:b",
    f"{session}:train:77",
    f"{model}:",
    "é" * 9,
    "a" * 10**5,
  ):
    for path, fields in {
      "optim_step": {"model_id": name, "seq_id": 1, "adam_params": RATE},
      "save_weights": {"model_id": name, "seq_id": 1},
      "load_weights": {"model_id": name, "seq_id": 1, "path": "x", "optimizer": True},
      "get_info": {"model_id": name},
      "session_heartbeat": {"session_id": name},
      "create_model": {"session_id": name, "model_seq_id": 0, "base_model": "tiny"},
      "create_sampling_session": {
        "session_id": name,
        "sampling_session_seq_id": 0,
        "base_model": "tiny",
      },
      "asample": {"sampling_session_id": name, "seq_id": 0, "prompt": PROMPT},
      "retrieve_future": {"request_id": name},
      "weights_info": {"tinker_path": name},
    }.items():
      status, answer = post(url, path, **fields)
      if "session_id" not in fields or not name.startswith(session):
        assert status in (400, 404, 410), (path, name, status, answer)
    if "\0" not in name:
      message = CLASSES["ForwardBackwardRequest"].FromString(gradient_request("x", 1))
      message.model_id = name.replace(HALF, "y")
      body = message.SerializeToString()
      assert send(url, "POST", "forward_backward", body, "application/x-protobuf")[0] == 410


def test_parameters_of_lists(url, trained):
  _, model, seq = trained
  for name in ("a", "b", "c"):
    status, answer = post(url, "save_weights", model_id=model, seq_id=seq[0], path=name)
    assert result(url, answer["request_id"])[0] == 200
    seq[0] += 1
  names = lambda query: [
    x["checkpoint_id"].split("/")[1]
    for x in json.loads(send(url, "GET", f"training_runs/{model}/checkpoints{query}")[1])[
      "checkpoints"
    ]
  ]
  assert names("") == ["a", "b", "c"] == names("?limit=100") == names("?offset=0")
  assert names("?limit=2") == ["a", "b"] and names("?limit=2&offset=1") == ["b", "c"]
  assert names("?limit=0") == [] == names("?offset=3")
  for path in ("training_runs", "checkpoints", f"training_runs/{model}/checkpoints"):
    for query in (
      *("limit=-1", "limit=x", "limit=1.5", "limit=", "offset=-1", "offset=1e3", "page=2"),
      *("limit=99999999999999999999", "Limit=2", "access_scope=all"),
    ):
      status, data = send(url, "GET", f"{path}?{query}")
      assert status == 400, (path, query, data)


def test_a_number_means_one_request(url):
  session, model = create(url)
  sampler = sampler_of(url, session)
  bodies = {
    "optim_step": [{"adam_params": RATE}, {"adam_params": {"learning_rate": 0.02}}],
    "save_weights": [{"path": "a"}, {"path": "b"}, {"path": "a", "overwrite": True}],
    "save_weights_for_sampler": [{"path": "a"}, {"path": "a", "ttl_seconds": 9}],
  }
  wrong = "was another request"
  for path, fields in bodies.items():
    number = {"optim_step": 1, "save_weights": 2, "save_weights_for_sampler": 3}[path]
    given = {"model_id": model, "seq_id": number}
    status, first = post(url, path, **given, **fields[0])
    assert status == 200 and result(url, first["request_id"])[0] == 200
    assert post(url, path, **given, **fields[0]) == (200, first)
    for other in fields[1:]:
      is_refused(url, path, json.dumps(given | other).encode(), wrong)
    for other in bodies:
      if other != path:
        is_refused(url, other, json.dumps(given | bodies[other][0]).encode(), wrong)
    body = gradient_request(model, number)
    is_refused(url, "forward_backward", body, wrong, "application/x-protobuf")
  given = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
  for lora in (LORA | {"rank": 4}, LORA | {"seed": 6}, None):
    body = json.dumps(given | {"lora_config": lora}).encode()
    is_refused(url, "create_model", body, wrong)
  given = {"sampling_session_id": sampler, "seq_id": 1, "prompt": PROMPT}
  ask = lambda seed: given | {"sampling_params": FEW | {"seed": seed}}
  assert post(url, "asample", **ask(5))[0] == 200
  assert post(url, "asample", **ask(5))[0] == 200
  is_refused(url, "asample", json.dumps(ask(6)).encode(), wrong)
  is_refused(url, "asample", json.dumps(ask(5) | {"num_samples": 2}).encode(), wrong)
  path = f"tinker://{model}/weights/a"
  given = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
  is_refused(url, "create_sampling_session", json.dumps(given).encode(), "is taken")
