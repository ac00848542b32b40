"""Keys and values take the memory that is left on a device."""

import dataclasses

import jax
import pytest
from small import CONFIG, RAGGED_PROMPTS, assert_same, build, sample
from test_layer_kinds import DELTA_NETS

from gtpo_jax.models.decode import params_bytes
from gtpo_jax.runtime.fields import AUTO
from gtpo_jax.runtime.mesh import bytes_per_device
from gtpo_jax.sampling.dense.state_shapes import StateShapes
from gtpo_jax.sampling.paged.memory import page_bytes, temporary_bytes
from gtpo_jax.sampling.programs import state_bytes
from gtpo_jax.sampling.settings import Demand, EngineConfig, SamplingParams

PAGED = EngineConfig(slots=10, chunk=12, attention="triton", page_size=16)
WIDE = dataclasses.replace(CONFIG, head_dim=16)


def paged(memory, fraction=AUTO):
  config = dataclasses.replace(PAGED, cache_fraction=fraction)
  demand = Demand(memory=memory)
  return build(config=WIDE, max_tokens=60, engine_config=config, demand=demand)[1].programs


def test_a_page_and_the_parameters_have_the_bytes_of_their_arrays():
  """Two layers of 2 heads of 16 features, keys and values in float32, 16 positions a page."""
  programs = paged(None)
  assert page_bytes(programs.cache) == 2 * 2 * 2 * 16 * 16 * 4
  _, engine, layout = build(config=WIDE, max_tokens=60, engine_config=PAGED)
  assert params_bytes(engine.model, engine.model).copied == bytes_per_device(layout)


def test_the_pool_takes_what_is_left():
  """Ten slots of four pages, and ten prompts of one, at most; one of each, at least."""
  everything = paged(None)
  assert everything.sizes.pool.pages == 50 and everything.sizes.longest_at_once == 10
  beside = params_bytes(everything.model, everything.model).copied
  beside += temporary_bytes(everything.model, 10, everything.sizes.pool)
  page = page_bytes(everything.cache)
  pages = lambda memory: paged(memory).sizes.pool.pages
  assert pages(beside + 50 * page) == 50
  assert pages(beside + 23 * page) == pages(beside + 24 * page - 1) == 23
  assert pages(beside + 1000 * page) == 50
  assert pages(0) == 5
  few = paged(beside + 23 * page)
  assert few.sizes.longest_at_once == 5
  assert few.sizes.describe() == (
    "10 slots and 23 pages of 16 tokens per device (0.00 GiB), which hold 5 completions of 60 "
    "tokens, or 10 of 10"
  )
  assert paged(0, fraction=0.5).sizes.pool.pages == 25  # a fraction is taken as it is


def test_states_take_memory_beside_pages():
  """Four gated delta nets keep 3 inputs of 2 x 28 features and 4 matrices of 8 x 6 numbers."""

  def programs(memory):
    demand = Demand(group=5, memory=memory)
    settings = {"config": DELTA_NETS, "max_tokens": 60, "engine_config": PAGED, "demand": demand}
    return build(**settings)[1].programs

  everything = programs(None)
  state = state_bytes(everything.model)
  assert state == 4 * 4 * (3 * 2 * 28 + 4 * 8 * 6)
  sizes = everything.sizes
  assert (sizes.slots, sizes.entries) == (10, 3)  # two groups, and half as many again
  assert everything.new_state(sizes.scheduler(4, 5), 16, SamplingParams()).prompts.delta[
    0
  ].memory.shape == (3, 1, 4, 8, 6)
  beside = params_bytes(everything.model, everything.model).copied + 13 * state
  beside += temporary_bytes(everything.model, 10, everything.sizes.pool)
  assert programs(beside + 23 * page_bytes(everything.cache)).sizes.pool.pages == 23


@pytest.mark.slow
def test_arrays_that_do_not_fit_run_fewer_completions_with_the_same_tokens():
  expected = sample(build(), RAGGED_PROMPTS, group=6)
  whole = build()[1].programs
  assert whole.sizes.slots == whole.config.slots == 64
  longest = whole.sizes.cache_lengths[-1]
  position = bytes_per_device(StateShapes(whole.cache, False).kv(1, 1))
  memory = params_bytes(whole.model, whole.model).copied + 24 * position * (1.5 * longest + 6)
  built = build(demand=Demand(memory=int(memory)))
  sizes = built[1].programs.sizes
  assert sizes.slots == sizes.longest_at_once == 16
  assert sizes.describe() == (
    "arrays for up to 16 completions per device (there is no memory for 64)"
  )
  assert_same(sample(built, RAGGED_PROMPTS, group=6), expected)
  assert build(demand=Demand(memory=0))[1].programs.sizes.slots == 1


def test_a_demand_of_few_completions_needs_few_pages():
  programs = build(
    config=WIDE, max_tokens=60, engine_config=PAGED, demand=Demand(6, 3, memory=1 << 40)
  )[1].programs
  assert (programs.sizes.slots, programs.sizes.pool.pages) == (6, 6 * 4 + 6)
  assert len(jax.tree.leaves(programs.init_kv())) == 2
