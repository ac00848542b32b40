"""The policy itself as a teacher that reads more: its base model, or its current weights."""

import jax
import numpy as np
import pytest
from experience_cases import (
  coins,  # noqa: F401 (an autouse fixture)
  collect,
  config_of,
  random_worker,
)

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.cli.planning.run_programs import RunPrograms, build_model
from gtpo_jax.cli.planning.search import Search
from gtpo_jax.config.updates import frozen_bytes
from gtpo_jax.logs.display import Display
from gtpo_jax.loop import train
from gtpo_jax.models.params import abstract_params
from gtpo_jax.rollout.frozen import check_frozen, load_frozen
from gtpo_jax.runtime.chips import CHIPS
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import bytes_per_device
from gtpo_jax.training.log_probs import make_scorer


def privileged(policy, **changes):
  """The config of a run whose teacher is its own policy, which reads the answer too."""
  prompts = {"teacher.prompt": "{prompt} It is {answer}.", "teacher.max_prompt_tokens": 40}
  return config_of("opd", **{**prompts, "teacher.policy": policy, **changes})


def test_current_weights_score_the_batch_with_the_teachers_prompts(tmp_path):
  config = privileged("current")
  worker, params = random_worker(config)
  check_frozen(config, worker)
  frozen = load_frozen(config, worker, tmp_path, {})
  assert not frozen.digests and not frozen.steps
  _, (batch,) = collect(config, 1, frozen)
  rollouts = batch.rollouts
  expected = make_scorer(worker.model, 1.0, 1, 64)(params, rollouts.for_teacher)
  np.testing.assert_allclose(rollouts.teacher, expected, atol=1e-5)
  assert np.abs(np.asarray(rollouts.divergence))[np.asarray(rollouts.mask)].max() > 1e-3


def test_the_base_model_is_loaded_from_the_run(tmp_path):
  config = privileged("base")
  worker, params = random_worker(config)
  base = jax.tree.map(lambda x: x * 1.1, params)
  checkpoints = Checkpoints(tmp_path / "base", keep=1)
  checkpoints.save_params(base)
  checkpoints.close()
  frozen = load_frozen(config, worker, tmp_path, {})
  assert frozen.digests.keys() == {"teacher.policy"}
  jax.tree.map(np.testing.assert_array_equal, frozen.teacher[1], base)


def test_only_a_base_model_takes_memory():
  size = bytes_per_device(abstract_params(random_worker()[0].model))
  for policy, expected in (("current", 0), ("base", size)):
    config = privileged(policy)
    worker, _ = random_worker(config)
    assert frozen_bytes(config, worker.model, worker.teacher) == expected
    search = Search(config, 1, CHIPS["v5e"], [0])
    found = search.memory.state_bytes(next(iter(search.bases())))
    search = Search(config_of("gtpo"), 1, CHIPS["v5e"], [0])
    assert (found > search.memory.state_bytes(next(iter(search.bases())))) == bool(expected)


def test_the_context_must_hold_what_the_teacher_reads():
  with pytest.raises(UserError, match=r"teacher.max_prompt_tokens \+ .* = 40014 is over"):
    random_worker(privileged("current", **{"teacher.max_prompt_tokens": 40_000}))


@pytest.mark.parametrize("adapters", [2, 0])
@pytest.mark.parametrize("policy", ["current", "base"])
@pytest.mark.parametrize("divergence", ["reverse_kl", "sampled"])
@pytest.mark.some(0, slow=1)
def test_a_run_learns_from_itself(policy, divergence, adapters, tmp_path):
  """It plans and compiles what it runs, and resumes."""
  changes = {"distill.divergence": divergence, "model.lora_rank": adapters}
  config = privileged(policy, steps=2, **changes)
  for steps in (1, 2):
    rows = train(privileged(policy, steps=steps, **changes), tmp_path, Display(enabled=False))
  row = rows.history[-1]
  assert row["step"] == 2 and row["grad_norm"] > 0 and row["update/empty"] == 0
  assert row["distill/divergence"] != 0
  programs = RunPrograms(config, build_model(config, jax.devices()))
  names = {program.name for program in programs.compile()}
  assert ("teacher" in names) == (divergence == "sampled")
