"""The frozen teacher: how it is found, checked, loaded and planned, and how it scores a batch."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from experience_cases import (
  coins,  # noqa: F401 (an autouse fixture)
  collect,
  config_of,
  random_worker,
)
from toys import LLAMA, save_llama

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.checkpoint.opening import teacher_model
from gtpo_jax.checkpoint.provenance import check_provenance
from gtpo_jax.cli.planning.run_programs import RunPrograms, build_model
from gtpo_jax.cli.planning.search import Search
from gtpo_jax.config import resolve_model, resolved_dict
from gtpo_jax.config.updates import frozen_bytes, run_demand
from gtpo_jax.logs.display import Display
from gtpo_jax.loop import train as train_run
from gtpo_jax.models import Transformer, init_params
from gtpo_jax.models.hf.save import save
from gtpo_jax.models.params import abstract_params, matmul_params
from gtpo_jax.rollout.frozen import check_frozen, load_frozen
from gtpo_jax.rollout.groups import batch_like
from gtpo_jax.runtime.chips import CHIPS
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import bytes_per_device, single_device_mesh
from gtpo_jax.training.log_probs import make_scorer


@pytest.fixture
def llama(tmp_path):
  """Returns the folder, the model and the parameters of a small Llama with our tokenizer."""
  model, params = save_llama(tmp_path / "llama", random_worker()[0].chat.tokenizer)
  return tmp_path / "llama", model, params


def run_in(folder, config, params, step=1):
  """Writes what a run leaves behind: its config and a checkpoint of its parameters."""
  for name in ("base", "checkpoints"):
    checkpoints = Checkpoints(folder / name, keep=2)
    checkpoints.save_params(params, 0 if name == "base" else step, with_base=name == "base")
    checkpoints.close()
  (folder / "config.json").write_text(json.dumps(resolved_dict(config)))
  return str(folder)


def test_a_teacher_of_another_family_scores_the_batch(llama):
  folder, model, params = llama
  config = config_of("opd", **{"teacher.path": str(folder), "sampling.temperature": 0.8})
  worker, _ = random_worker(config)
  check_frozen(config, worker)
  frozen = load_frozen(config, worker, folder.parent, {})
  assert frozen.digests.keys() == {"teacher.path"} and not frozen.steps
  _, (batch,) = collect(config, 1, frozen)
  expected = make_scorer(model, 0.8, 1, 64)(params, batch.rollouts)
  mask = np.asarray(batch.rollouts.mask)
  np.testing.assert_allclose(batch.rollouts.teacher, expected, atol=1e-5)
  assert not np.asarray(batch.rollouts.teacher)[~mask].any()
  assert np.abs(np.asarray(batch.rollouts.divergence))[mask].max() > 1e-2
  like = batch_like(config)
  assert jax.tree.structure(like) == jax.tree.structure((batch.rollouts, batch.rewards))


def test_a_teacher_can_read_the_answer(llama):
  folder, model, params = llama
  prompt = "{prompt} It is {answer}."
  changes = {"teacher.prompt": prompt, "teacher.max_prompt_tokens": 40}
  config = config_of("opd", **{"teacher.path": str(folder), **changes})
  worker, _ = random_worker(config)
  _, (batch,) = collect(config, 1, load_frozen(config, worker, folder.parent, {}))
  rollouts = batch.rollouts
  like = batch_like(config)
  assert jax.tree.structure(like) == jax.tree.structure((rollouts, batch.rewards))
  read = rollouts.teacher_prompts
  for i, problem in enumerate(batch.problems):
    text = f"{problem.messages[-1]['content']} It is {problem.answer}."
    expected = worker.chat.encode_prompt([{"role": "user", "content": text}])
    row = np.asarray(read.tokens[i])[-int(read.lengths[i]) :]
    assert row.tolist() == list(expected)
  score = make_scorer(model, 1.0, 1, 64)
  plain = np.asarray(score(params, rollouts.replace(teacher_prompts=None)))
  expected = score(params, rollouts.replace(prompts=read, teacher_prompts=None))
  np.testing.assert_allclose(rollouts.teacher, expected, atol=1e-5)
  assert np.abs(np.asarray(rollouts.teacher) - plain).max() > 1e-3
  short = config_of(
    "opd", **{"teacher.path": str(folder), **changes, "teacher.max_prompt_tokens": 9}
  )
  worker, _ = random_worker(short)
  with pytest.raises(UserError, match=r"the teacher's prompt of problem .* but at most 9 are"):
    worker.encode_for_teacher(batch.problems[0])


def test_the_memory_of_a_teacher_is_planned(llama):
  folder, *_ = llama
  config = config_of("opd", **{"teacher.path": str(folder)})
  worker, _ = random_worker(config)
  teacher = teacher_model(config, worker.model)
  # Embedding and head; per layer q, k, v, o and an MLP of three matrices and two norms; last norm.
  layer = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
  size = 4 * (2 * 390 * 64 + 2 * layer + 64)
  assert bytes_per_device(abstract_params(teacher)) == size
  assert frozen_bytes(config, worker.model, teacher) == size
  assert frozen_bytes(config_of("gtpo"), worker.model, None) == 0
  left = [run_demand(config, worker.model, 2**30, teacher=x).memory for x in (None, teacher)]
  assert left[0] - left[1] == size
  searches = [Search(c, 1, CHIPS["v5e"], [0]) for c in (config, config_of("gtpo"))]
  (with_teacher, without) = (
    search.memory.state_bytes(next(iter(search.bases()))) for search in searches
  )
  assert with_teacher - without == 4 * matmul_params(LLAMA)  # an estimate, without the embedding


@pytest.mark.parametrize("divergence", ["reverse_kl", "sampled"])
@pytest.mark.some(0, slow=0)
def test_a_plan_compiles_what_a_teacher_needs(divergence, llama):
  folder, *_ = llama
  changes = {"teacher.path": str(folder), "distill.divergence": divergence}

  def peaks(config):
    programs = RunPrograms(config, build_model(config, jax.devices())).compile()
    return {program.name: program.peak for program in programs}

  with_teacher = peaks(config_of("opd", **changes))
  alone = peaks(config_of("grpo"))
  size = bytes_per_device(abstract_params(Transformer(LLAMA, single_device_mesh())))
  scored = {"teacher"} if divergence == "sampled" else set()
  assert with_teacher.keys() - alone.keys() == scored
  assert all(with_teacher[name] >= alone[name] + size for name in alone)


@pytest.mark.parametrize(
  "divergence", ["sampled", pytest.param("forward_kl", marks=pytest.mark.manual)]
)
@pytest.mark.manual
def test_an_int8_teacher_and_a_student_with_adapters(divergence, tmp_path):
  """The teacher is a run of adapters over an int8 base; so is the student."""
  adapters = {"model.lora_rank": 2, "model.quantize": "int8"}
  own = config_of("gtpo", **adapters)
  model = Transformer(resolve_model(own).config, single_device_mesh())
  params = init_params(model, jax.random.key(8))
  params = jax.tree.map(lambda x: x if x.dtype == np.int8 else x + 0.01, params)
  path = run_in(tmp_path / "run", own, params, step=3)
  teacher = {"teacher.path": path, "distill.divergence": divergence}
  config = config_of("opd", **teacher, **adapters)
  worker, _ = random_worker(config)
  check_frozen(config, worker)
  frozen = load_frozen(config, worker, tmp_path, {})
  assert frozen.steps == {"teacher.path": 3}
  loaded = frozen.matched if frozen.teacher is None else frozen.teacher[1]
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  assert any(x.dtype == np.int8 for x in jax.tree.leaves(loaded))
  one_step = dataclasses.replace(config, steps=1)
  row = train_run(one_step, None, Display(enabled=False)).history[1]
  assert row["update/empty"] == 0 and row["grad_norm"] > 0 and row["distill/divergence"] != 0
  assert 0 < row.get("distill/agreement", 0.5) < 1


def test_a_teacher_that_changes_is_noticed_when_a_run_resumes(tmp_path):
  config = config_of("opd", **{"teacher.path": str(tmp_path / "run")})
  own = config_of("gtpo")
  model = Transformer(resolve_model(own).config, single_device_mesh())
  began, now = [], []
  for scale, found in ((1.0, began), (1.01, now)):
    params = jax.tree.map(lambda x, s=scale: x * s, init_params(model, jax.random.key(1)))
    (tmp_path / str(scale)).mkdir()
    path = run_in(tmp_path / str(scale), own, params)
    changed = dataclasses.replace(config, teacher=dataclasses.replace(config.teacher, path=path))
    worker, _ = random_worker(own)
    found.append(load_frozen(changed, worker, tmp_path, {}).digests)
  with pytest.raises(UserError, match=r"teacher.path was \w+, now \w+"):
    check_provenance(began[0], now[0], False, print)


def test_unusable_teachers_are_refused_in_one_line(tmp_path, llama):
  folder, _, params = llama
  (tmp_path / "empty").mkdir()
  small = Transformer(dataclasses.replace(LLAMA, vocab_size=99), single_device_mesh())
  save(small, init_params(small, jax.random.key(0)), None, tmp_path / "small")
  short = Transformer(dataclasses.replace(LLAMA, context=30), single_device_mesh())
  save(short, params, None, tmp_path / "short")
  shutil.copytree(folder, tmp_path / "other")
  file = tmp_path / "other" / "tokenizer.json"
  tokenizer = json.loads(file.read_text())
  vocabulary = tokenizer["model"]["vocab"]
  vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
  file.write_text(json.dumps(tokenizer))
  for name, message in (
    ("nobody", r"teacher.path = '.*nobody': no folder at"),
    ("empty", r"teacher.path = '.*empty': no checkpoint in"),
    ("small", "has a vocabulary of 99 tokens, but the policy's tokenizer has 384"),
    ("short", r"teacher.path = '.*short': .* = 34 is over the model's context of 30"),
    ("other", r"teacher.path = '.*other' has another tokenizer: 'a' and 1 other"),
  ):
    with pytest.raises(UserError, match=message) as error:
      train_run(
        config_of("opd", **{"teacher.path": str(tmp_path / name)}),
        tmp_path / "run",
        Display(enabled=False),
      )
    assert "\n" not in str(error.value)
  assert not (tmp_path / "run").exists() and folder.exists()


@pytest.mark.devices
def test_a_teacher_that_the_mesh_does_not_fit_is_refused(tmp_path):
  values = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 96,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
  }
  (tmp_path / "config.json").write_text(json.dumps(values))
  changes = {"teacher.path": str(tmp_path), "mesh.data": 1, "mesh.tensor": 2}
  with pytest.raises(UserError, match=r"teacher.path = '.*': .*heads.* 3") as error:
    build_model(config_of("opd", **changes), jax.devices()[:2])
  assert "\n" not in str(error.value)


def test_settings_without_a_teacher_are_refused():
  for name, changes, message in (
    ("opd", {}, "algorithm 'opd' learns from a teacher: set teacher.path"),
    ("rlsd", {}, "algorithm 'rlsd' learns from a teacher: set teacher.path"),
    ("rlsd", {"distill.coef": 0.5, "teacher.path": "x"}, r"out, got .*\(coef=0.5, "),
    ("gtpo", {"distill.coef": 0.5}, "distill.coef = 0.5 only has an effect with a teacher"),
    ("gtpo", {"teacher.prompt": "{prompt}"}, "teacher.prompt = '{prompt}' only has an effect with"),
    ("opd", {"teacher.prompt": "x", "teacher.path": "x"}, "teacher.prompt must contain {prompt}"),
    ("opd", {"teacher.max_prompt_tokens": 9, "teacher.path": "x"}, "only has an effect with teach"),
    ("opd", {"distill.coef": -1.0}, "distill.coef must be above 0 and finite, got -1.0"),
    ("grpo_s", {"teacher.path": "x"}, "but a teacher gives each token its own advantage"),
    ("opd", {"teacher.policy": "base", "teacher.path": "x"}, "leave one of them out"),
    ("opd", {"teacher.policy": "current"}, "is the policy itself unless it reads something else"),
    ("opd", {"teacher.policy": "best"}, "teacher.policy must be one of base, current, or empty, g"),
  ):
    with pytest.raises(UserError, match=message):
      config_of(name, **changes)


@pytest.mark.slow
def test_a_student_approaches_its_teacher(llama):
  folder, model, params = llama
  certain = {**params, "head": 3 * params["head"]}
  save(model, certain, random_worker()[0].chat.tokenizer, folder.parent / "certain")
  changes = {"teacher.path": str(folder.parent / "certain"), "distill.divergence": "reverse_kl"}
  config = config_of("opd", **changes, **{"optimizer.learning_rate": 3e-3, "steps": 8})
  result = train_run(config, None, Display(enabled=False))
  divergences = [row["distill/divergence"] for row in result.history[1:]]
  assert divergences[-1] < 0.75 * divergences[0]
