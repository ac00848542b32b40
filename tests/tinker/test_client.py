"""The official client against a server: training, sampling, checkpoints, credit, refusals."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from live import (
  CLIENT_WARNINGS,
  KEY,
  connected,
  need_client,
  options_for,
  running,
  sampled,
  supervised,
)

from gtpo_jax.algorithms import make as make_algorithm
from gtpo_jax.cli.export import export_policy
from gtpo_jax.models import load
from gtpo_jax.tinker.entropy_credit import recorded, shape
from gtpo_jax.tinker.wire import Datum, Sample

tinker = need_client()
types = tinker.types
pytestmark = CLIENT_WARNINGS

PROMPT = [5, 6, 7, 8]
TEXT = [3, 9, 4, 12, 5, 30, 31]
WEIGHTS = [0, 0, 1, 1, 1, 1]


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
  with running(options_for(model, tmp_path_factory.mktemp("workdir"))) as (url, opened):
    yield url, opened


@pytest.fixture(scope="module")
def service(server):
  with connected(server[0]) as client:
    yield client


def train(service, seed=1, rank=4):
  return service.create_lora_training_client("tiny", rank=rank, seed=seed).result()


def learn(training, steps=1, rate=1e-2):
  datum = supervised(tinker, TEXT, WEIGHTS)
  for _ in range(steps):
    loss = training.forward_backward([datum, datum], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=rate))
  return loss.result(), step.result()


def sample(client, count=1, seed=None, tokens=8):
  params = types.SamplingParams(max_tokens=tokens, seed=seed)
  return client.sample(types.ModelInput.from_ints(PROMPT), count, params).result().sequences


def test_the_first_sample_of_the_guide(server, model, capsys):
  page = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text()
  (block,) = re.findall(r"```python\n(import tinker\n.*?)```", page, re.DOTALL)
  ours = {"http://127.0.0.1:8123": server[0], "HuggingFaceTB/SmolLM2-135M-Instruct": model.name}
  for name, value in ours.items():
    assert name in block
    block = block.replace(name, value)
  exec(block, names := {})
  assert capsys.readouterr().out.strip()
  assert names["tokenizer"].name_or_path == str(model)
  path = names["training"].save_weights_for_sampler("named").result().path
  sampler = names["service"].create_sampling_client(model_path=path)
  assert sampler.get_tokenizer().name_or_path == str(model)
  holder = names["service"].holder
  holder.run_coroutine_threadsafe(holder.aclose()).result(10)


def test_a_model_learns_and_goes_on_from_its_checkpoint(service, server):
  training = train(service)
  first, step = learn(training)
  assert step.metrics["grad_norm:mean"] > 0
  assert first.loss_fn_outputs[0]["logprobs"].data[:2] == [0, 0]  # the prompt's
  weighted = -2 * np.dot(first.loss_fn_outputs[0]["logprobs"].data, WEIGHTS)
  assert first.metrics["loss:sum"] == pytest.approx(weighted, rel=1e-5)
  saved = training.save_state("half").result()
  last, _ = learn(training, steps=4)
  assert last.metrics["loss:sum"] < first.metrics["loss:sum"]
  resumed = service.create_training_client_from_state_with_optimizer(saved.path).result()
  again, _ = learn(resumed, steps=4)
  assert again.metrics["loss:sum"] == last.metrics["loss:sum"]  # moments too
  assert resumed.get_info().lora_rank == 4
  rest = tinker.RestClient(base_url=server[0])
  assert rest.get_weights_info_by_tinker_path(saved.path).result().lora_rank == 4
  listed = rest.list_checkpoints(training.model_id).result().checkpoints
  assert [x.tinker_path for x in listed] == [saved.path]
  with pytest.raises(Exception, match="exists"):
    training.save_state("half").result()


def test_exported_adapters_are_those_of_the_sampler(service, server, tmp_path):
  training = train(service)
  learn(training, steps=2)
  path = training.save_state("exported").result().path
  run, kind, name = path.removeprefix("tinker://").split("/")
  folder = server[1].workdir / "runs" / run.replace(":", "-") / kind / name
  assert {"adapter_config.json", "adapter_model.safetensors"} <= {x.name for x in folder.iterdir()}
  export_policy(folder, tmp_path / "merged", "")
  model, params = load(tmp_path / "merged", "float32")
  logits = model.apply({"params": params}, np.asarray([TEXT]))[0, :-1]
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  expected = np.take_along_axis(log_probs, np.asarray(TEXT[1:])[:, None], 1)[:, 0]
  datum = supervised(tinker, TEXT, np.ones(6))
  trained = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
  np.testing.assert_allclose(trained, expected, atol=1e-4)


def test_a_sampler_has_the_weights_that_were_saved(service, server):
  training = train(service)
  learn(training, steps=2)
  live = training.save_weights_and_get_sampling_client().result()
  text = types.ModelInput.from_ints(TEXT)
  scored = live.compute_logprobs(text).result()
  assert scored[0] is None
  datum = supervised(tinker, TEXT, np.ones(6))
  trained = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
  np.testing.assert_allclose(scored[1:], trained, atol=1e-4)
  base = service.create_sampling_client(base_model="tiny").result()
  assert base.compute_logprobs(text).result()[1:] != scored[1:]
  named = training.save_weights_for_sampler("named").result().path
  again = service.create_sampling_client(model_path=named).result()
  assert again.compute_logprobs(text).result() == scored
  learn(training, steps=2)
  assert live.compute_logprobs(text).result() == scored  # not those of now


def test_samples(service):
  base = service.create_sampling_client(base_model="tiny").result()
  first = sample(base, 3, seed=7)
  assert [x.tokens for x in sample(base, 3, seed=7)] == [x.tokens for x in first]
  assert len({tuple(x.tokens) for x in first}) == 3
  for sequence in first:
    text = types.ModelInput.from_ints([*PROMPT, *sequence.tokens])
    scored = base.compute_logprobs(text).result()[len(PROMPT) :]
    np.testing.assert_allclose(sequence.logprobs, scored, atol=1e-4)
  params = types.SamplingParams(max_tokens=8, seed=7, stop=[first[0].tokens[2]])
  prompt = types.ModelInput.from_ints(PROMPT)
  answer = base.sample(prompt, 1, params, topk_sample_logprobs=2, include_prompt_logprobs=True)
  (cut,) = answer.result().sequences
  assert cut.tokens == first[0].tokens[:3]
  assert cut.stop_reason == "stop"
  assert answer.result().prompt_logprobs == base.compute_logprobs(prompt).result()
  top = cut.topk_logprobs
  assert len(top[0]) == 2


def test_credit_shapes_advantages_by_recorded_entropies(service, server):
  training = train(service)
  live = training.save_weights_and_get_sampling_client().result()
  sequences = sample(live, 4, seed=3)
  data = [sampled(tinker, PROMPT, x, a) for x, a in zip(sequences, (1, -1, 1, -1), strict=True)]
  config = {"credit": "gtpo", "alpha2": 0.3}
  shaped = training.forward_backward(data, "importance_sampling", config).result()
  own = [training.forward([datum], "cross_entropy") for datum in _supervised(sequences)]
  entropies = [x.result().loss_fn_outputs[0]["entropy"].data for x in own]
  records = {
    x.sequence_id: Sample(np.asarray(x.tokens), np.asarray(e[3:], np.float32))
    for x, e in zip(sequences, entropies, strict=True)
  }
  inputs = [_read(datum) for datum in data]
  entropies = recorded(inputs, records.__getitem__)
  expected, _ = shape(make_algorithm("gtpo", alpha2=0.3), inputs, entropies)
  # On-policy, ratios are 1 and the loss is minus the sum of advantages.
  total = -sum(datum.inputs["advantages"].sum() for datum in expected)
  assert shaped.metrics["loss:sum"] == pytest.approx(total, abs=1e-3)
  assert abs(total) > 1e-3
  plain = training.forward_backward(data, "importance_sampling").result()
  assert plain.metrics["loss:sum"] != pytest.approx(total, abs=1e-3)
  training.optim_step(types.AdamParams()).result()


def _supervised(sequences):
  for x in sequences:
    tokens = [*PROMPT, *x.tokens]
    yield supervised(tinker, tokens, np.ones(len(tokens) - 1))


def _read(datum):
  from gtpo_jax.tinker.wire import SampledSpan

  get = lambda name: np.asarray(datum.loss_fn_inputs[name].data)
  tokens = np.asarray(datum.model_input.to_ints(), np.int32)
  name = datum.loss_fn_input_spans[1].sequence_id
  spans = (SampledSpan(3, len(tokens) - 3, name, 0),)
  inputs = {name: get(name).astype(np.float32) for name in ("advantages", "logprobs")}
  return Datum(tokens, get("target_tokens"), inputs, spans)


@pytest.mark.slow
def test_all_weights_are_trained_with_rank_0(service, server):
  training = train(service, rank=0)
  first, _ = learn(training, rate=1e-3)
  saved = training.save_state("all").result()
  last, _ = learn(training, steps=3, rate=1e-3)
  assert last.metrics["loss:sum"] < first.metrics["loss:sum"]
  live = training.save_weights_and_get_sampling_client().result()
  (sequence,) = sample(live)
  assert len(sequence.tokens) > 0
  with pytest.raises(Exception, match="one model at a time"):
    train(service, rank=0)
  run, kind, name = saved.path.removeprefix("tinker://").split("/")
  folder = server[1].workdir / "runs" / run.replace(":", "-") / kind / name
  model, params = load(folder, "float32")  # as Transformers would
  assert model.config.lora.rank == 0
  table = np.asarray(params["embedding"])
  assert not np.array_equal(table, np.asarray(server[1].base.params["embedding"]))


@pytest.mark.slow
def test_a_custom_loss_is_that_of_the_client(service):
  torch = pytest.importorskip("torch")
  training = train(service)
  datum = supervised(tinker, TEXT, np.ones(6))
  squares = lambda data, found: ((found[0] ** 2).sum(), {"own": 1.0})
  result = training.forward_backward_custom([datum], squares).result()
  before = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
  assert result.metrics["loss:sum"] == pytest.approx(np.square(before).sum(), rel=1e-5)
  training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
  after = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
  assert np.square(after).sum() < np.square(before).sum()
  assert torch is not None


@pytest.mark.parametrize(
  ("loss", "config", "message"),
  [
    ("stable_reinforce", None, "use loss_fn=importance_sampling"),
    ("ppo", None, "needs logprobs, advantages"),
    ("cross_entropy", {"credit": "gtpo"}, "takes no credit"),
  ],
)
def test_refusals_name_the_reason_and_the_model_goes_on(service, loss, config, message):
  training = train(service)
  datum = supervised(tinker, TEXT, WEIGHTS)
  with pytest.raises(Exception, match=message):
    training.forward_backward([datum], loss, config).result()
  learn(training)


def test_credit_without_spans_is_refused(service):
  training = train(service)
  live = training.save_weights_and_get_sampling_client().result()
  (sequence,) = sample(live)
  datum = sampled(tinker, PROMPT, sequence, 1.0)
  plain = types.Datum(model_input=datum.model_input, loss_fn_inputs=datum.loss_fn_inputs)
  with pytest.raises(Exception, match="credit needs spans"):
    training.forward_backward([plain], "importance_sampling", {"credit": "gtpo"}).result()


def test_strangers_read_nothing(service, server):
  training = train(service)
  path = training.save_weights_for_sampler("mine").result().path
  live = training.save_weights_and_get_sampling_client().result()
  (sequence,) = sample(live)
  with connected(server[0], "tml-other") as stranger:
    with pytest.raises(Exception, match="there are no weights"):
      stranger.create_sampling_client(model_path=path).result()
    with pytest.raises(Exception, match="there are no weights"):
      stranger.create_training_client_from_state(path).result()
    assert not _runs(server, "tml-other")
    assert _runs(server, KEY)
    own = train(stranger)
    datum = sampled(tinker, PROMPT, sequence, 1.0)
    with pytest.raises(Exception, match="there is no sample"):
      own.forward_backward([datum], "ppo", {"credit": "gtpo"}).result()


def _runs(server, key):
  rest = tinker.RestClient(base_url=server[0], api_key=key)
  return rest.list_training_runs().result().training_runs


@pytest.mark.slow
def test_two_clients_and_two_models_at_once(server):
  found = {}

  def work(name, seed):
    losses = []
    with connected(server[0]) as service:
      training = train(service, seed=seed, rank=2 + seed)
      for _ in range(3):
        losses.append(learn(training)[0].metrics["loss:sum"])
        client = training.save_weights_and_get_sampling_client().result()
        losses.append([x.tokens for x in sample(client, 2, seed=5)])
    found[name] = losses

  for round_ in range(2):  # together, then alone
    threads = [threading.Thread(target=work, args=((round_, seed), seed)) for seed in (0, 2)]
    for thread in threads:
      thread.start()
      if round_:
        thread.join()
    for thread in threads:
      thread.join()
  assert found[0, 0] == found[1, 0]
  assert found[0, 2] == found[1, 2]
  assert found[0, 0] != found[0, 2]


@pytest.mark.devices
@pytest.mark.manual
def test_several_devices_hold_the_model(model, tmp_path):
  """Eight devices train, sample and save as one does; what is expected is computed on one."""
  with running(options_for(model, tmp_path / "workdir")) as server, connected(server[0]) as service:
    assert server[1].base.worker.model.mesh.size == 8
    test_a_model_learns_and_goes_on_from_its_checkpoint(service, server)
    test_exported_adapters_are_those_of_the_sampler(service, server, tmp_path)
    test_a_sampler_has_the_weights_that_were_saved(service, server)
    test_credit_shapes_advantages_by_recorded_entropies(service, server)
