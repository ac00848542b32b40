"""The guide, the KL reference and the rescoring of a batch."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experience_cases import (
  G,
  N,
  coins,  # noqa: F401 (an autouse fixture)
  collect,
  config_of,
  random_worker,
)

from gtpo_jax.arrays import KeyStream, key_for
from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.checkpoint.integrity import digest_tree
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.loop import train
from gtpo_jax.models.hf.save import save
from gtpo_jax.rewards import group_relative
from gtpo_jax.rollout.frozen import check_frozen, load_frozen
from gtpo_jax.rollout.groups import batch_like
from gtpo_jax.rollout.problems import training_problems
from gtpo_jax.rollout.sample import sample_problems
from gtpo_jax.rollout.turns import Turns
from gtpo_jax.rollout.worker import Policy
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.training.log_probs import make_scorer


@pytest.fixture
def run_with_base(tmp_path):
  """A workdir with a base model, as a run saves it before its first step."""
  _, params = random_worker()
  keep = Checkpoints(tmp_path / "run" / "base", keep=1)
  keep.save_params(jax.tree.map(lambda x: x * 1.1, params))
  keep.close()
  return tmp_path / "run"


def test_the_guide_samples_its_share_of_every_group(run_with_base):
  config = config_of(
    "dapo_mixed", **{"algorithm.guide_completions": 2, "batch.max_gen_batches": 40}
  )
  worker, params = random_worker()
  frozen = load_frozen(config, worker, run_with_base, {})
  _, batches = collect(config, 2, frozen)
  base = jax.tree.map(lambda x: x * 1.1, params)
  for batch in batches:
    guided = np.asarray(batch.rollouts.guided)
    np.testing.assert_array_equal(guided, np.tile([False, False, True, True], (N, 1)))
    own_wrong = (~batch.correct[:, :2]).any(1)
    right = batch.correct.any(1)
    assert (own_wrong & right).all()
    score = make_scorer(worker.model, 1.0, 1, 256)
    by_guide, by_policy = (np.asarray(score(p, batch.rollouts)) for p in (base, params))
    mask = np.asarray(batch.rollouts.mask)
    np.testing.assert_allclose(
      np.asarray(batch.rollouts.log_probs),
      np.where(guided[..., None], by_guide, by_policy),
      atol=1e-4,
    )
    assert np.abs(by_guide - by_policy)[mask].max() > 1e-3
  saved = [b for b in batches if not b.correct[:, :2].any(1).all()]
  assert saved, "no group was rescued by the guide"


def test_the_reference_and_the_rescoring(run_with_base):
  config = config_of("grpo", **{"algorithm.kl_weight": 0.1, "algorithm.tis_cap": 2.0})
  worker, params = random_worker()
  _, (batch,) = collect(config, 1, load_frozen(config, worker, run_with_base, {}))
  score = make_scorer(worker.model, 1.0, 2, 64)
  np.testing.assert_allclose(
    batch.rollouts.reference,
    score(jax.tree.map(lambda x: x * 1.1, params), batch.rollouts),
    atol=1e-5,
  )
  np.testing.assert_allclose(batch.rollouts.rescored, score(params, batch.rollouts), atol=1e-5)
  assert (
    np.abs(np.asarray(batch.rollouts.rescored) - np.asarray(batch.rollouts.log_probs)).max() < 1e-4
  )
  assert not np.asarray(batch.rollouts.rescored)[~np.asarray(batch.rollouts.mask)].any()


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"algorithm.kl_weight": 0.1},
    {"algorithm.tis_cap": 2.0},
    {"algorithm.dynamic_sampling": True},
  ],
)
def test_batch_like_has_the_real_shapes(changes, run_with_base):
  config = config_of("grpo", **changes)
  _, (batch,) = collect(config, 1, load_frozen(config, random_worker()[0], run_with_base, {}))
  like = batch_like(config)
  assert jax.tree.structure(like) == jax.tree.structure((batch.rollouts, batch.rewards))
  jax.tree.map(
    lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype) or pytest.fail(f"{x} {y}"),
    like,
    (batch.rollouts, batch.rewards),
  )


def test_the_overlong_filter_drops_completions_that_were_cut_off():
  for asked in (True, False):
    _, (batch,) = collect(config_of("gtpo", **{"algorithm.overlong_filter": asked}), 1)
    valid = np.asarray(batch.rewards.valid)
    finished = np.asarray(batch.rollouts.finished)
    assert not finished.all() and finished.any()
    np.testing.assert_array_equal(valid, finished if asked else np.ones_like(finished))


def test_group_relative_penalties_reach_the_rewards():
  _, (batch,) = collect(
    config_of("dapo", **{"algorithm.length_penalty": "group_relative", "algorithm.gamma": 0.9}), 1
  )
  penalty = np.asarray(batch.rewards.penalty)
  lengths = np.asarray(batch.rollouts.lengths)
  assert penalty.min() < 0
  np.testing.assert_allclose(
    penalty, group_relative(lengths, batch.correct, np.ones((N, G), bool), 0.9)
  )


@pytest.mark.slow
def test_the_kl_reference_is_the_initial_policy(tmp_path):
  config = config_of("grpo", **{"algorithm.kl_weight": 0.1})
  train(config, tmp_path / "run", Display(enabled=False))
  kl = [row["kl/reference"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]]
  assert kl[0] == pytest.approx(0, abs=1e-9) and kl[-1] > 1e-8


@pytest.mark.slow
def test_a_guide_from_a_hugging_face_folder_and_from_a_run(tmp_path):
  worker, params = random_worker()
  other = jax.tree.map(lambda x: x * 0.9, params)
  save(worker.model, other, worker.chat.tokenizer, tmp_path / "hf")
  config = config_of("dapo_mixed", **{"guide.path": str(tmp_path / "hf")})
  check_frozen(config, worker)
  _, (batch,) = collect(config, 1, load_frozen(config, worker, tmp_path / "nowhere", {}))
  scored = make_scorer(worker.model, 1.0, 1, 256)(other, batch.rollouts)
  guided = np.asarray(batch.rollouts.guided)
  np.testing.assert_allclose(
    np.asarray(batch.rollouts.log_probs)[guided], np.asarray(scored)[guided], atol=1e-4
  )

  own = config_of("gtpo", steps=1)
  train(own, tmp_path / "run", Display(enabled=False))
  config = config_of("dapo_mixed", **{"guide.path": str(tmp_path / "run")})
  check_frozen(config, worker)
  guide = load_frozen(config, worker, tmp_path / "nowhere", {}).guide
  newest = Checkpoints(tmp_path / "run" / "checkpoints").restore_params(worker.model)
  np.testing.assert_array_equal(guide.params.outer["embedding"], newest["embedding"])

  began = load_frozen(config, worker, tmp_path / "nowhere", {})
  assert began.digests == {"guide.path": digest_tree(newest)[:16]} and began.steps == {
    "guide.path": 1
  }
  # The guide's own run continues.
  train(config_of("gtpo", steps=2), tmp_path / "run", Display(enabled=False))
  again = load_frozen(config, worker, tmp_path / "nowhere", began.steps)
  assert again.digests == began.digests and again.steps == {"guide.path": 1}
  moved_on = load_frozen(config, worker, tmp_path / "nowhere", {})
  assert moved_on.steps == {"guide.path": 2} and moved_on.digests != began.digests
  shutil.rmtree(tmp_path / "run" / "checkpoints" / "1")
  with pytest.raises(
    UserError, match=r"guide.path = '.*run': no checkpoint of step 1 in .*; available steps: 2"
  ):
    load_frozen(config, worker, tmp_path / "nowhere", began.steps)


def test_unusable_guides_are_refused_before_anything_is_written(tmp_path):
  (tmp_path / "empty").mkdir()
  other = tmp_path / "hf"
  other.mkdir()
  (other / "config.json").write_text(
    json.dumps(
      {
        "model_type": "qwen2",
        "vocab_size": 9,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
      }
    )
  )
  for path, message in (
    (tmp_path / "nobody", "no folder at"),
    (tmp_path / "empty", "no checkpoint in"),
    (other, "has a vocabulary of 9 tokens, but the policy's tokenizer has 384"),
  ):
    with pytest.raises(UserError, match=message):
      train(
        config_of("dapo_mixed", **{"guide.path": str(path)}),
        tmp_path / "run",
        Display(enabled=False),
      )
  assert not (tmp_path / "run").exists()


def test_a_guide_never_samples_padding_ids(run_with_base):
  """If the guide's vocabulary is larger than the tokenizer's, the extra ids are ignored."""
  config = config_of("dapo_mixed")
  worker, params = random_worker(config)
  engine = worker.engine_for(worker.model, vocab_limit=40)
  problems = training_problems(config, worker)[0][0]
  rows = sample_problems(
    Turns(worker, G),
    Policy(engine, engine.layout(params)),
    [problems[i] for i in range(N)],
    engine.completion_keys(jax.random.key(0), N, G),
    config.sampling_params,
  )
  rollouts = engine.rollouts(rows)
  tokens = np.asarray(rollouts.tokens)
  mask = np.asarray(rollouts.mask)
  assert tokens[mask].max() < 40 and len(np.unique(tokens[mask])) > 20
  assert np.asarray(rollouts.entropy)[mask].max() <= np.log(40) + 1e-4


def test_unusable_settings_are_refused():
  for name, changes, message in (
    ("dapo", {"guide.path": "x"}, "guide.path = 'x' only has an effect with a guide"),
    ("grpo", {"reference.path": "x"}, "effect with algorithm.kl_weight above 0"),
    ("dapo_mixed", {"algorithm.guide_completions": 3}, "leave at least two of batch.group = 4"),
    ("dapo", {"batch.max_gen_batches": 0}, "batch.max_gen_batches must be at least 1, got 0"),
    (
      "gtpo",
      {"algorithm.overlong_buffer": 14},
      "overlong_buffer must be below sampling.max_tokens = 14, got 14",
    ),
  ):
    with pytest.raises(UserError, match=message):
      config_of(name, **changes)


def test_keys_of_policy_and_guide_differ():
  keys = [jax.random.key_data(key_for(0, stream, 1)).tolist() for stream in KeyStream]
  assert len({tuple(key) for key in keys}) == len(KeyStream)
  assert jnp.issubdtype(key_for(0, KeyStream.GUIDE).dtype, jax.dtypes.prng_key)


def test_loading_the_base_model_changes_no_file(run_with_base, tmp_path):
  shutil.copytree(run_with_base, tmp_path / "copy")
  load_frozen(config_of("dapo_mixed"), random_worker()[0], run_with_base, {})
  files = lambda root: {
    str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()
  }
  assert files(run_with_base) == files(tmp_path / "copy")
