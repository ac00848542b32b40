"""`gtpo_jax.probe`: gradients of arms, independence of arms, resuming, refusals, the command."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TOY, even, small_run

import gtpo_jax
from gtpo_jax.algorithms import make
from gtpo_jax.arrays import Prompts, Rollouts, Signals
from gtpo_jax.cli import main
from gtpo_jax.cli.probing.arms import (
  REFERENCE,
  Arm,
  own_rewards,
  parse_arms,
  shuffled_means,
  shuffled_tokens,
)
from gtpo_jax.cli.probing.gradients import SKETCH, flatten, make_gradients, sketch
from gtpo_jax.logs.display import Display
from gtpo_jax.models.lora import partition
from gtpo_jax.models.params import init_params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import shard_batch, single_device_mesh
from gtpo_jax.runtime.paths import write_atomically
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.training.gradient import FrozenParams, Minibatch, UpdateSettings, make_gradient
from gtpo_jax.training.log_probs import Reading, head_settings, score

QUIET = Display(enabled=False)
BATCHES, REFERENCE_BATCHES = 3, 2
N, G, T = 3, 4, 6


STOPS = ("a", "e", "i", "o", "u", "1", "2", "3", "4", "5")  # so that most completions end


def config_of(**changes):
  fields = {"model.preset": "tiny", "batch.prompts": 4, "sampling.stop": STOPS}
  return small_run(**{**fields, **changes})


def probe(workdir, arms, stopping=lambda: False, **more):
  config = more.pop("config", config_of())
  return gtpo_jax.probe(
    config, arms, BATCHES, REFERENCE_BATCHES, workdir, QUIET, stopping, reward=even, **more
  )


def random_signals():
  rng = np.random.default_rng(0)
  mask = np.arange(T) < rng.integers(2, T + 1, (N, G, 1))
  correct = np.array([[True, False, True, False]] * N)
  entropy = np.where(mask, rng.gamma(1.0, 1.0, mask.shape), 0.0).astype(np.float32)
  parts = np.stack([correct, rng.random((N, G))], -1).astype(np.float32)
  penalty = -rng.random((N, G)).astype(np.float32)
  return Signals(mask=mask, entropy=entropy, correct=correct, penalty=penalty, parts=parts)


# --- arms ---


def test_arms_are_recipes_with_settings():
  arms = parse_arms("grpo, gtpo(alpha2=1,compare=position),grpo_s,dapo", config_of(), controls=True)
  assert list(arms) == [
    *("grpo", "gtpo(alpha2=1,compare=position)", "gtpo(alpha2=1,compare=position) shuffled"),
    *("grpo_s", "grpo_s shuffled", "dapo"),
  ]
  expected = make("gtpo", alpha2=1, compare="position")
  assert arms["gtpo(alpha2=1,compare=position)"].algorithm == expected
  with_controls = parse_arms("grpo,dapo_forking,empg,rloo,otb", config_of(), controls=True)
  assert [name for name, arm in with_controls.items() if arm.shuffled] == [
    "dapo_forking shuffled",
    "empg shuffled",
  ]


def test_refusals_name_the_value_and_the_fix():
  config = config_of()
  for arms, message in (
    ("grpo,gtop", "the arm 'gtop': unknown algorithm 'gtop', did you mean 'gtpo'"),
    ("grpo,gtpo(alpha3=1)", "has no setting 'alpha3'"),
    ("grpo,gtpo(alpha2)", "needs settings as NAME=VALUE, got 'alpha2'"),
    ("grpo,gtpo(", "an arm is a recipe with settings"),
    ("grpo,grpo", "'grpo' is named twice"),
    ("grpo", "at least two arms"),
    ("grpo,opd", "learns from a teacher: set teacher.path"),
    ("grpo,dapo_mixed(guide_completions=2)", "cannot be probed: its guide"),
    ("grpo,vineppo(cut_interval=2)", "has no setting 'cut_interval'"),
    ("grpo,gtpo(overlong_buffer=4)", "set --config.algorithm.overlong_buffer"),
  ):
    with pytest.raises(UserError, match=message.replace("(", r"\(")) as error:
      parse_arms(arms, config, controls=False)
    assert "\n" not in str(error.value)
  for counts, message in (((1, 8), "batches must be at least 2, got 1"), ((4, 0), "reference")):
    with pytest.raises(UserError, match=message):
      gtpo_jax.probe(config, "grpo,gtpo", *counts)


def test_the_rewards_of_an_arm_are_those_of_a_run():
  signals = random_signals()
  config = config_of(**{"reward.parts": "correct,toys:even*0.5"})
  other = 0.5 * signals.parts[..., 1]
  plain = own_rewards(config, make("grpo"), signals)
  np.testing.assert_allclose(plain.reward, signals.correct + other, rtol=1e-6)
  np.testing.assert_array_equal(plain.penalty, signals.penalty)
  signed = own_rewards(config, make("w_reinforce"), signals)
  np.testing.assert_allclose(signed.reward, 2 * signals.correct - 1 + other, rtol=1e-6)
  shaped = own_rewards(config, make("gtpo"), signals)
  np.testing.assert_allclose(shaped.penalty, signals.penalty + other, rtol=1e-6)


def test_shuffled_entropies_stay_within_a_verdict():
  signals = random_signals()
  mask, entropy = signals.mask, signals.entropy
  shuffled = shuffled_tokens(signals, np.random.default_rng(0))
  means = shuffled_means(signals, np.random.default_rng(0))
  mean = entropy.sum(2) / mask.sum(2)
  for group in range(N):
    for verdict in (False, True):
      members = signals.correct[group] == verdict
      side = mask[group] & members[:, None]
      np.testing.assert_array_equal(np.sort(shuffled[group][side]), np.sort(entropy[group][side]))
      np.testing.assert_allclose(
        np.sort(means[group, members].max(1)), np.sort(mean[group, members]), rtol=1e-6
      )
  assert not (shuffled == entropy)[mask].all() and not shuffled[~mask].any()


# --- gradients ---


@pytest.mark.slow
def test_sketches_keep_inner_products():
  rng = np.random.default_rng(0)
  a, b = (
    {"first": rng.normal(size=(300, 500)), "second": rng.normal(size=SKETCH + 7)} for _ in "ab"
  )
  b = {key: 0.5 * a[key] + b[key] for key in a}
  exact = sum(float((a[key] * b[key]).sum()) for key in a)
  size = lambda x: np.sqrt(sum(float((leaf**2).sum()) for leaf in x.values()))
  sketches = [
    np.asarray(sketch({key: jnp.asarray(x, jnp.float32) for key, x in tree.items()}), float)
    for tree in (a, b)
  ]
  error = sketches[0] @ sketches[1] - exact
  assert abs(error) < 4 * np.sqrt(2 / SKETCH) * size(a) * size(b)
  assert exact > 20 * abs(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gtpo", "gspo", "clip_cov", "dapo_forking", "bonus"])
def test_gradients_of_arms_are_those_of_the_update(name):
  algorithm = make("grpo", entropy_coef=0.1) if name == "bonus" else make(name)
  model = Transformer(TOY, single_device_mesh())
  params = init_params(model, jax.random.key(0))
  rng = np.random.default_rng(0)
  signals = random_signals()
  mask = signals.mask
  rollouts = Rollouts(
    prompts=Prompts(rng.integers(1, 48, (N, 5), np.int32), np.full(N, 5, np.int32)),
    tokens=np.where(mask, rng.integers(1, 48, (N, G, T), np.int32), 0),
    present=mask,
    mask=mask,
    log_probs=np.zeros((N, G, T), np.float32),
    entropy=signals.entropy,
    finished=np.ones((N, G), bool),
  )
  log_probs, entropy = score(model, params, Reading.of(rollouts), head_settings(model, 1.0, 0))
  entropy = np.where(mask, entropy, 0.0)
  log_probs = np.where(mask, log_probs, 0.0)
  rollouts = shard_batch(rollouts.replace(log_probs=log_probs, entropy=entropy), model.mesh)
  signals = signals.replace(entropy=entropy)
  config = config_of(**{"batch.prompts": N, "batch.micro_batches": N})
  derivatives = Arm(algorithm).derivative(config, signals, rollouts, (0,))
  found = make_gradients(config, model, params)(rollouts, *derivatives)

  own = own_rewards(config, algorithm, signals)
  in_loss = algorithm.loss_mask(own)
  credit = own.after_credit().replace(
    advantages=algorithm.advantages(own),
    mask=in_loss,
    weights=algorithm.token_weights(in_loss),
    log_probs_old=log_probs,
  )
  gradient = make_gradient(model, algorithm, UpdateSettings())
  trained, base = partition(model, params)
  batch = Minibatch(rollouts, shard_batch(credit, model.mesh))
  expected, _ = jax.jit(gradient)(trained, FrozenParams(base), batch, jax.random.key(0))
  np.testing.assert_allclose(found, flatten(expected), atol=2e-6)
  assert np.abs(found).max() > 1e-3


# --- probes ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A probe of four arms: two are the same function, one is the reference's own estimator."""
  folder = tmp_path_factory.mktemp("probe")
  return folder, probe(folder, "grpo,gtpo,gtpo(alpha2=0.1),rloo(loss_aggregation=constant)")


@pytest.mark.slow
def test_equal_arms_have_equal_numbers_and_arms_do_not_depend_on_others(whole, tmp_path):
  folder, result = whole
  arms = result["arms"]
  assert arms["gtpo"] == {**arms["gtpo(alpha2=0.1)"], "p_holm": arms["gtpo"]["p_holm"]}
  assert arms["grpo"]["groups"][0] > 0 and arms["grpo"]["cosine"][0] != arms["gtpo"]["cosine"][0]
  assert make("rloo", loss_aggregation="constant") == REFERENCE
  assert json.loads((folder / "probe.json").read_text()) == result

  few = probe(tmp_path / "few", ["grpo", "rloo(loss_aggregation=constant)"])
  own = ("cosines", "cosine", "alignment", "noise", "groups", "tokens")
  for name, arm in few["arms"].items():
    assert {key: arm[key] for key in own} == {key: arms[name][key] for key in own}
  added = probe(tmp_path / "few", "grpo,gtpo,gtpo(alpha2=0.1),rloo(loss_aggregation=constant)")
  assert added == result


class Killed(BaseException):
  """Ends a probe at once, as a kill does: nothing but the files is left."""


@pytest.mark.slow
def test_a_probe_resumes_after_a_kill_with_the_same_bits(whole, tmp_path, monkeypatch):
  """Whatever it was about to write: its settings, a batch or the result. So it does if stopped."""
  _, result = whole
  arms = "grpo,gtpo,gtpo(alpha2=0.1),rloo(loss_aggregation=constant)"
  files = lambda: sorted(file.name for file in (tmp_path / "probe").glob("*.npz"))
  for complete, writes in ((0, 0), (1, 2), (BATCHES + REFERENCE_BATCHES, 5)):
    left = [writes]

    def write(path, data, left=left):
      if not left[0]:
        path.with_suffix(".part").write_bytes(data[: len(data) // 2])
        raise Killed
      left[0] -= 1
      write_atomically(path, data)

    with monkeypatch.context() as patch, pytest.raises(Killed):
      patch.setattr(sys.modules["gtpo_jax.cli.probing.probe"], "write_atomically", write)
      probe(tmp_path, arms)
    assert len(files()) == complete and not (tmp_path / "probe.json").exists()
  assert probe(tmp_path, arms) == result

  (tmp_path / "probe" / files()[-1]).unlink()
  with pytest.raises(Stopped):
    probe(tmp_path, arms, stopping=lambda: True)
  assert probe(tmp_path, arms) == result

  with pytest.raises(UserError, match=r"seed was 0, now 1"):
    probe(tmp_path, arms, config=config_of(seed=1))
  with pytest.raises(UserError, match="has a probe with batches = 3, this one has 2; use another"):
    gtpo_jax.probe(config_of(), arms, 2, 2, tmp_path, QUIET, reward=even)


@pytest.mark.slow
def test_adapters_a_penalty_and_norms_of_scores_can_be_probed(tmp_path):
  config = config_of(**{"model.lora_rank": 2, "algorithm.overlong_buffer": 4})
  arms = "grpo,otb,grpo(kl_weight=0.1),grpo(entropy_coef=0.01),gtpo,gspo,gdpo"
  result = probe(None, arms, config=config, controls=True)
  assert result["arms"]["otb"]["cosines"] != result["arms"]["grpo"]["cosines"]
  assert "over_control" in result["arms"]["gtpo"]
  assert result["arms"]["grpo(kl_weight=0.1)"]["difference"][0] == pytest.approx(0, abs=1e-3)


@pytest.mark.slow
def test_credit_is_compared_with_values_that_continuations_measure(tmp_path):
  """An arm that takes its credit from continuations orders segments best, uniform credit not."""
  arms = "grpo,gtpo,spo_chain(cut_interval=1,continuations=8)"
  config = config_of(**{"log.continuations": 8})
  plain = probe(tmp_path / "plain", arms)
  result = probe(tmp_path / "mc", arms, config=config)
  ranks = {name: arm.pop("mc_rank") for name, arm in result["arms"].items()}
  assert result == plain
  assert ranks["grpo"][0] == 0 and ranks["spo_chain(cut_interval=1,continuations=8)"][0] > 0.2
  assert -0.5 < ranks["gtpo"][0] < ranks["spo_chain(cut_interval=1,continuations=8)"][0]


@pytest.mark.slow
def test_the_command_probes_the_tiny_main_job(tmp_path, capsys):
  fields = {"warm_start.steps": 20, "batch.prompts": 4, "batch.group": 4, "warm_start.batch": 32}
  overrides = [f"--config.{name}={value}" for name, value in fields.items()]
  arguments = ["probe", "--config=configs/tiny.py", f"--workdir={tmp_path / 'probe'}", *overrides]
  arguments += ["--arms=grpo,gtpo", "--batches=2", "--reference=2", f"--json={tmp_path / 'a.json'}"]
  assert main(arguments) == 0
  out = capsys.readouterr().out.splitlines()
  result = json.loads((tmp_path / "a.json").read_text())
  assert out[-1] == result["verdict"] and out[-4].startswith("arm")
  assert out[-3].startswith("grpo ") and out[-2].startswith("gtpo ")
