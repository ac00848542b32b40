"""`gtpo plan`: what a run needs on hardware that is not attached."""

import jax
import pytest
from plan_cases import HAS_CUDA_PLUGIN, needs_libtpu, small_config

from gtpo_jax.cli.planning.plan import format_table, plan
from gtpo_jax.cli.planning.search import with_overrides
from gtpo_jax.logs.profile import compile_count
from gtpo_jax.runtime.errors import UserError


def check(result, devices):
  assert result["devices"] == devices
  assert result["params"] == 603_776
  assert result["fits"]
  assert result["override"] == ""
  state = result["params.bytes"] + result["optimizer.bytes"]
  assert 0 < state <= result["update.peak_bytes"] <= result["hbm_bytes"]
  assert 0 < result["sample.peak_bytes"] <= result["hbm_bytes"]
  # Parameters and two moments are split over fsdp and tensor.
  assert state < 3 * 4 * result["params"]
  # Parameters are gathered at least twice, and their gradient is reduced.
  assert result["update.sent_bytes"] > 2 * result["params.bytes"]
  table = format_table(result)
  assert f"{devices} device(s)" in table
  assert table.splitlines()[-1].split() == ["fits", "yes"]


@pytest.mark.slow
def test_virtual_devices():
  result = plan(small_config(), "cpu:8")
  check(result, 8)
  assert result["update.seconds"] is result["sample.seconds"] is None


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.manual)])
def test_a_tpu_that_is_not_attached(times):
  # Twice, because programs for an absent TPU cannot be read back from the compile cache.
  for _ in range(times):
    result = plan(small_config(), "v5e:2x4")
    check(result, 8)
    assert 0 < result["update.seconds"] < 1
    assert 0 < result["sample.seconds"] < 1
    assert 0 < result["update.activation_bytes"] < result["update.peak_bytes"]
    assert result["cache.bytes"] < result["sample.peak_bytes"]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"mesh.data": 3}, r"data 3 x expert 1 x fsdp 2 x context 1 x tensor 2 does not fit 8 device"),
    (
      {"mesh.context": 2, "sampling.max_tokens": 41},
      "sampling.max_tokens = 41 is not a multiple of mesh.context x mesh.tensor = 4",
    ),
    ({"batch.prompts": 6}, r"batch.prompts = 6 is not a multiple of 4: 1 part"),
    (
      {"batch.minibatches": 8, "batch.micro_batches": 1},
      r"batch.prompts = 16 is not a multiple of 32: 8 part\(s\) x 4 batch",
    ),
    (
      {"batch.micro_batches": 12},
      "batch.micro_batches = 12 is more than the 4 prompts of a device, and groups of batch.group "
      "= 16 do not divide evenly into so many parts; lower it to 4",
    ),
    ({"mesh.fsdp": 1, "mesh.tensor": 8}, "heads axis of 4 does not divide over 8 shards"),
    ({"sampling.max_tokens": 40_000}, "over the model's context of 32768"),
  ],
)
def test_invalid_runs_are_rejected_before_anything_is_compiled(changes, message):
  jax.random.key(0)  # JAX compiles two small programs for the first key of a process
  compiled = compile_count()
  with pytest.raises(UserError, match=message):
    plan(small_config(**changes), "cpu:8")
  assert compile_count() == compiled


@pytest.mark.manual
@needs_libtpu
def test_an_override_is_found_for_a_run_that_does_not_fit():
  """With 1,024 rows of 8,192 positions, one MLP array takes 6 GiB per device; 64 rows fit."""
  config = small_config(
    **{
      "model.compute_dtype": "bfloat16",
      "data.max_prompt_tokens": 16,
      "sampling.max_tokens": 8192,
      "batch.group": 64,
      "batch.prompts": 64,
      "mesh.data": 1,
      "mesh.fsdp": 4,
      "mesh.tensor": 1,
    }
  )
  result = plan(config, "v5e:2x2")
  assert not result["fits"]
  assert result["update.peak_bytes"] > result["hbm_bytes"]
  assert result["update.sent_bytes"] is None
  flags = dict(flag.removeprefix("--config.").split("=") for flag in result["override"].split())
  values = {
    name: value == "True" if value in ("True", "False") else int(value)
    for name, value in flags.items()
  }
  assert values.get("batch.micro_batches", 1) > 1
  assert f"it fits with {result['override']} (checked by compiling)" in format_table(result)
  assert plan(with_overrides(config, values), "v5e:2x2")["fits"]


@pytest.mark.some(0, slow=1)
@pytest.mark.parametrize(
  ("topology", "expected"),
  [
    ("t4:1", "float16, because Tesla T4 has no bfloat16 units"),
    ("l4:1", "bfloat16, because NVIDIA L4 has units for it"),
    ("h100:1", "bfloat16, because NVIDIA H100 80GB HBM3 has units for it"),
    pytest.param("v5e:1x1", "bfloat16, because TPU v5 lite has units for it", marks=needs_libtpu),
    ("cpu:8", "float32, because "),
  ],
)
def test_one_config_is_accepted_by_every_device(topology, expected):
  if topology.endswith(":1") and not HAS_CUDA_PLUGIN:
    pytest.skip("JAX's CUDA plugin is not installed")
  config = small_config(**{"mesh.fsdp": 1, "mesh.tensor": 1, "mesh.data": -1})
  result = plan(config, topology)
  assert result["fits"] and not result["refused"] and result["override"] == ""
  assert result["compute_dtype"] == expected.partition(",")[0]
  assert f"computing in                 {expected}" in format_table(result)


@pytest.mark.manual
@needs_libtpu
def test_a_mesh_that_does_not_divide_is_replaced():
  """Eight batch shards do not divide four prompts."""
  result = plan(small_config(**{"mesh.fsdp": 8, "mesh.tensor": 1, "batch.prompts": 4}), "v5e:2x4")
  assert "batch.prompts = 4 is not a multiple of 8" in result["refused"]
  assert result["fits"] and result["mesh"]["data"] * result["mesh"]["fsdp"] <= 4
  table = format_table(result)
  assert "refused: batch.prompts = 4" in table
  assert f"planned with                 {result['override']}" in table
