"""A model of several kinds of layers samples as it is trained, through every cache and in parts."""

import dataclasses
import functools

import jax
import pytest
from meshes import mesh_of
from small import CONFIG, RAGGED_PROMPTS, assert_same, build, log_prob_errors, sample
from test_resume import sample_in_parts
from test_turn_requests import converse

from gtpo_jax.models import Transformer, init_params
from gtpo_jax.models.decode import make_decode_params
from gtpo_jax.models.kinds import DELTA, DeltaSizes, LayerKind
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.sampling.settings import EngineConfig

# Windows over a page of 16 with angles of their own, and none; and a tail.
PATTERN = (LayerKind(17, rope_theta=100.0), LayerKind())
KINDS = dataclasses.replace(
  CONFIG,
  layers=5,
  head_dim=16,
  model_type="gemma3_text",
  biases=(),
  query_scalar=12.0,
  kinds=PATTERN,
)
# Three gated delta nets before each layer with attention; and a tail.
DELTA_NETS = dataclasses.replace(
  CONFIG,
  layers=5,
  head_dim=16,
  model_type="qwen3_5_text",
  biases=(),
  rope_share=0.25,
  norm_eps=1e-2,
  kinds=(LayerKind(mixer=DELTA),) * 3 + (LayerKind(),),
  delta=DeltaSizes(key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4),
)
SIZES = {"layers": 5, "head_dim": 16, "biases": ()}
NO_ANGLES = dataclasses.replace(
  CONFIG, model_type="smollm3", kinds=(LayerKind(), LayerKind(rotates=False)), **SIZES
)
NORMS_AFTER = dataclasses.replace(CONFIG, model_type="olmo2", **SIZES)
NORMS_AFTER_AND_WINDOWS = dataclasses.replace(
  CONFIG, model_type="olmo3", kinds=(LayerKind(17, rope_theta=100.0), LayerKind()), **SIZES
)
CONFIGS = {"windows": KINDS, "delta": DELTA_NETS}
# Each feature of these is in another one, or in a test of its own.
MORE = {"smollm3": NO_ANGLES, "olmo2": NORMS_AFTER, "olmo3": NORMS_AFTER_AND_WINDOWS}
EVERY = [*CONFIGS, *(pytest.param(name, marks=pytest.mark.manual) for name in MORE)]
TOKENS = 40
GROUP = 6
FEW_SLOTS = EngineConfig(slots=5, chunk=4)
PAGED = {
  kernel: EngineConfig(slots=6, chunk=4, attention=kernel, page_size=16, cache_fraction=0.3)
  for kernel in ("pallas", "triton")
}


def make(name, *args, **settings):
  if name.startswith("olmo"):  # norms of queries and keys would make attention sharp
    settings["logit_scale"] = 2
  return build(*args, config=(CONFIGS | MORE)[name], max_tokens=TOKENS, **settings)


@functools.cache
def expected(name):
  built = make(name, engine_config=FEW_SLOTS)
  rollouts = sample(built, RAGGED_PROMPTS, group=GROUP)
  assert rollouts.mask.sum(-1).max() == TOKENS and 0.2 < rollouts.finished.mean() < 0.98
  assert log_prob_errors(built, rollouts).max() <= 1e-4
  return rollouts


def test_parameters_are_stacked_by_their_place_in_the_pattern():
  model = Transformer(KINDS, single_device_mesh())
  params = init_params(model, jax.random.key(0))
  layers = make_decode_params(model, params).layers
  assert KINDS.layer_kinds == [*PATTERN, *PATTERN, PATTERN[0]]
  assert sorted(params["layers"]) == ["place_0", "place_1"]
  assert params["layers"]["place_1"]["q"]["kernel"].shape == (2, 32, 4, 16)
  assert params["tail"]["q"]["kernel"].shape == (1, 32, 4, 16)
  assert (layers[4]["q"]["kernel"] == params["tail"]["q"]["kernel"][0]).all()
  assert (layers[3]["v"]["kernel"] == params["layers"]["place_1"]["v"]["kernel"][1]).all()
  assert len(layers) == 5


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.slow
def test_a_resumed_completion_and_one_of_several_turns_are_scored_as_drawn(name):
  built = make(name, engine_config=FEW_SLOTS)
  assert_same(sample_in_parts(built, (3, 1, 0, 2)), expected(name))
  rows, answered = converse(built)
  assert answered > sum(map(len, rows))
  assert log_prob_errors(built, built[1].rollouts(rows)).max() <= 1e-4


@pytest.mark.parametrize("kernel", [pytest.param("pallas", marks=pytest.mark.manual), "triton"])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.slow
def test_pages_give_the_same_tokens(name, kernel):
  assert_same(sample_in_parts(make(name, engine_config=PAGED[kernel]), (5, 2, 4)), expected(name))


@pytest.mark.devices
@pytest.mark.parametrize("attention", ["xla", pytest.param("pallas", marks=pytest.mark.manual)])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow
def test_eight_devices_give_the_same_tokens(name, attention):
  page = {"page_size": 16} if attention == "pallas" else {}
  config = EngineConfig(slots=16, chunk=4, attention=attention, **page)
  built = make(name, mesh_of(2, 2, 1, 2), engine_config=config)
  assert_same(sample_in_parts(built, (2, 3)), expected(name))
