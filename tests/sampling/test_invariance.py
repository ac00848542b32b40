"""Sampled tokens do not depend on slots, chunks, mesh or attention kernel."""

import dataclasses

import numpy as np
import pytest
from meshes import mesh_of
from small import (
  CONFIG,
  PROMPTS,
  RAGGED_PROMPTS,
  assert_same,
  build,
  log_prob_errors,
  sample,
  trainer_scores,
)

from gtpo_jax.models.decode import params_bytes
from gtpo_jax.runtime.fields import AUTO
from gtpo_jax.sampling.paged.memory import page_bytes, temporary_bytes
from gtpo_jax.sampling.settings import Demand, EngineConfig


@pytest.fixture(scope="module")
def expected():
  """66 completions, sampled all at once on one device."""
  rollouts = sample(build(), RAGGED_PROMPTS, group=6)
  lengths = rollouts.mask.sum(-1)
  assert lengths.min() == 1 and lengths.max() == 10
  assert 0.2 < rollouts.finished.mean() < 0.95
  return rollouts


@pytest.mark.parametrize(("slots", "chunk"), [(4, 1), (1, 4), (16, 3), (64, 10)])
@pytest.mark.some(0, slow=2)
def test_slots_and_chunks_do_not_matter(slots, chunk, expected):
  """The cases cover refilled slots, long and short queues, and chunks that end early."""
  built = build(engine_config=EngineConfig(slots=slots, chunk=chunk))
  assert_same(sample(built, RAGGED_PROMPTS, group=6), expected)


@pytest.mark.devices
@pytest.mark.parametrize(
  ("mesh", "slots"),
  [
    ((2, 2, 1, 2), 64),
    ((8, 1, 1, 1), 16),
    ((1, 4, 1, 2), 4),
    ((1, 2, 2, 2), 16),
    ((1, 2, 4, 1), 16),
  ],
)
@pytest.mark.some(0, slow=1)
def test_the_mesh_does_not_matter(mesh, slots, expected):
  built = build(mesh_of(*mesh), engine_config=EngineConfig(slots=slots, chunk=4))
  assert_same(sample(built, RAGGED_PROMPTS, group=6), expected)


def test_refilled_slots_and_shared_prompts_agree_with_the_trainer():
  built = build(engine_config=EngineConfig(slots=3, chunk=3))
  rollouts = sample(built, RAGGED_PROMPTS, group=6, temperature=0.8)
  log_probs, entropy = trainer_scores(built, rollouts, 0.8)
  assert np.abs(np.asarray(log_probs) - rollouts.log_probs)[rollouts.mask].max() <= 1e-4
  assert np.abs(np.asarray(entropy) - rollouts.entropy)[rollouts.mask].max() <= 1e-4


@pytest.mark.parametrize(
  ("mesh", "slots", "page", "fraction"),
  [
    pytest.param((1, 1, 1, 1), 16, 16, 1.0, marks=pytest.mark.manual),
    pytest.param((1, 1, 1, 1), 4, 32, 1.0, marks=pytest.mark.manual),
    pytest.param((2, 2, 1, 2), 16, 16, 0.6, marks=[pytest.mark.slow, pytest.mark.devices]),
  ],
)
def test_pages_and_the_tpu_kernel_do_not_matter(mesh, slots, page, fraction, expected):
  """The kernel is interpreted."""
  engine_config = EngineConfig(
    slots=slots, chunk=4, attention="pallas", page_size=page, cache_fraction=fraction
  )
  built = build(mesh_of(*mesh), engine_config=engine_config)
  assert_same(sample(built, RAGGED_PROMPTS, group=6), expected)


@pytest.mark.parametrize(
  "fraction", [0.05, *(pytest.param(x, marks=pytest.mark.manual) for x in (0.1, AUTO))]
)
@pytest.mark.slow
def test_completions_that_wait_for_pages_are_the_same(fraction):
  """Ten completions of up to four pages share five to eight pages, also with their prompts.

  With "auto", the memory holds seven pages beside the parameters and temporaries.
  """
  config = EngineConfig(
    slots=10, chunk=12, attention="triton", page_size=16, cache_fraction=fraction
  )
  wide = dataclasses.replace(CONFIG, head_dim=16)
  arguments = {"max_tokens": 60, "stop": (7,), "config": wide}
  demand = Demand()
  if fraction == AUTO:
    programs = build(**arguments, engine_config=config)[1].programs
    beside = params_bytes(programs.model, programs.model).copied + temporary_bytes(
      programs.model, 10, programs.sizes.pool
    )
    demand = Demand(memory=beside + 7 * page_bytes(programs.cache))
  built = build(**arguments, engine_config=config, demand=demand)
  rollouts = sample(built, PROMPTS, group=3)
  _, engine, _ = built
  assert engine.programs.sizes.pool.pages == {0.05: 5, 0.1: 5, AUTO: 7}[fraction]
  assert engine.statistics["sampling/waiting"] > 0.1
  assert rollouts.mask.sum(-1).max() > 48
  assert_same(rollouts, sample(build(**arguments), PROMPTS, group=3))


@pytest.mark.parametrize("kv_dtype", ["", "int8"])
@pytest.mark.slow
def test_the_gpu_kernel_agrees_with_the_trainer(kv_dtype):
  """The kernel is interpreted."""
  built = build(
    config=dataclasses.replace(CONFIG, head_dim=16),
    engine_config=EngineConfig(
      slots=6, chunk=4, attention="triton", page_size=16, kv_dtype=kv_dtype
    ),
  )
  errors = log_prob_errors(built, sample(built, PROMPTS))
  assert errors.max() <= 1e-4 if not kv_dtype else 1e-4 < errors.mean() < 0.04
