"""A pretrained model: SmolLM2-135M-Instruct, from the folder that GTPO_SMOLLM2 names."""

import json
import os
import shutil

import jax
import numpy as np
import pytest

import gtpo_jax
from gtpo_jax import cli
from gtpo_jax.config import load
from gtpo_jax.models.hf.load import read_params
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.sampling.settings import GREEDY

FOLDER = os.environ.get("GTPO_SMOLLM2", "")
pytestmark = pytest.mark.skipif(
  not FOLDER, reason="GTPO_SMOLLM2 does not name a folder; tests/build_smollm2.py builds one"
)

PROMPTS = (
  "Write one short sentence about a whale. Use the word rope in it.",
  "What is 3 + 4? Answer with a number.",
  "Name the capital of France.",
)
OVERRIDES = ("--config.model.compute_dtype=float32", "--config.log.tensorboard=False")


def recipe(variant="", *overrides):
  colon = f":{variant}" if variant else ""
  name = f"configs/smollm2_sentences.py{colon}"
  return load(name, [f"--config.model.path={FOLDER}", *OVERRIDES, *overrides])


@pytest.fixture(scope="module")
def torch_model():
  torch = pytest.importorskip("torch")
  from transformers import AutoModelForCausalLM

  return torch, AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def worker():
  return RolloutWorker(recipe("", "--config.sampling.max_tokens=16"), trains=False)


@pytest.fixture(scope="module")
def params(worker):
  return read_params(worker.model, worker.model_folder)


def encode(worker):
  return [worker.chat.encode_prompt([{"role": "user", "content": text}]) for text in PROMPTS]


@pytest.mark.slow
def test_logits_agree_with_transformers(worker, params, torch_model):
  """Within 1e-5 of the largest logit, and with the same most probable token everywhere."""
  torch, reference = torch_model
  for ids in encode(worker):
    tokens = np.asarray([ids])
    ours = jax.jit(lambda p, x: worker.model.apply({"params": p}, x))(params, tokens)
    ours = np.asarray(ours).reshape(len(ids), -1)
    with torch.no_grad():
      theirs = reference(torch.tensor(tokens)).logits[0].numpy()
    scale = np.abs(theirs).max()
    assert scale > 10
    assert np.abs(ours - theirs).max() <= 1e-5 * scale
    np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(worker, params, torch_model):
  torch, reference = torch_model
  prompts = encode(worker)
  layout = worker.engine.layout(params)
  key = jax.random.key(0)
  rollouts = worker.engine.sample(layout, prompts, key, group=1, sampling_params=GREEDY)
  for i, ids in enumerate(prompts):
    with torch.no_grad():
      theirs = reference.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    theirs = theirs[0, len(ids) :].tolist()
    ours = rollouts.tokens[i, 0][rollouts.mask[i, 0]].tolist()
    assert ours == theirs[: len(ours)] and len(ours) in (16, len(theirs))


@pytest.mark.manual  # two minutes of a core
@pytest.mark.parametrize("variant", ["", "lora"])
def test_two_steps_export_and_open_in_transformers(variant, tmp_path, torch_model):
  torch, reference = torch_model
  small = ("steps=2", "batch.prompts=4", "batch.group=4", "sampling.max_tokens=24")
  small += ("eval.problems=2", "eval.samples=1", "eval.every=2")
  config = recipe(variant, *(f"--config.{setting}" for setting in small))
  result = gtpo_jax.train(config, workdir=tmp_path / "run")
  assert result.finished
  assert cli.main(["export", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'hf'}"]) == 0
  from transformers import AutoModelForCausalLM

  exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
  ids = result.policy.worker.chat.encode_prompt([{"role": "user", "content": PROMPTS[0]}])
  with torch.no_grad():
    theirs = exported(torch.tensor([ids])).logits[0].numpy()
    before = reference(torch.tensor([ids])).logits[0].numpy()
  model = result.policy.worker.model
  ours = jax.jit(lambda p, x: model.apply({"params": p}, x))(
    result.policy.params, np.asarray([ids])
  )
  ours = np.asarray(ours).reshape(len(ids), -1)
  assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
  assert np.abs(before - theirs).max() > 1e-4  # it has learned something


@pytest.mark.manual
def test_ten_steps_double_the_accuracy(tmp_path):
  config = recipe("", "--config.steps=10", "--config.eval.every=10")
  gtpo_jax.train(config, workdir=tmp_path / "run")
  rows = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").open()]
  accuracies = [value for row in rows for name, value in row.items() if name.endswith("mean@4")]
  assert accuracies[0] < 0.2 and accuracies[-1] > 2 * accuracies[0] + 0.2
  shutil.rmtree(tmp_path / "run")
