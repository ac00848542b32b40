"""`gtpo plan`: the programs of a run, compiled for hardware that is not here."""
import importlib.util

import pytest

from gtpo_jax.config import default_config, freeze
from gtpo_jax.errors import UserError
from gtpo_jax.plan import model_flops, plan, table, topology_devices


def config(**changes):
  base = default_config()
  with base.unlocked():
    base.update_from_flattened_dict({"mesh.fsdp": 2, "mesh.tensor": 2, **changes})
  return freeze(base)


def check(result, devices):
  assert result["devices"] == devices and result["params"] == 640_640 and result["fits"]
  assert 0 < result["state.bytes"] <= result["update.peak_bytes"] <= result["hbm_bytes"]
  assert 0 < result["sample.peak_bytes"] <= result["hbm_bytes"]
  assert result["state.bytes"] < 3 * 4 * result["params"]  # parameters and two moments are split over fsdp and tensor
  text = table(result)
  assert "fits" in text and "yes" in text and f"{devices} device(s)" in text


def test_virtual_devices():
  check(plan(config(), "cpu:8"), 8)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpu_that_is_not_here():
  for _ in range(2):  # the second must not read what the first left in the compile cache: no program of an absent TPU can be
    check(plan(config(), "v5e:2x4"), 8)


def test_model_flops_of_one_token_by_hand():
  # 3 (2 N + 2 layers heads head_dim S) with N the matrix parameters, head included once.
  n = 3 * (128 * 32 * (2 * 4 + 2 * 2) + 3 * 128 * 384) + 384 * 128
  tokens, length = 16 * 32 + 16 * 16 * 40, 32 + 40
  assert model_flops(config()) == 3 * tokens * (2 * n + 2 * 3 * 4 * 32 * length)


@pytest.mark.parametrize(("topology", "message"), [
    ("v5x:4x4", "unknown topology 'v5x:4x4', did you mean 'v5p'"), ("cpu:3", "8 CPU device.*JAX_NUM_CPU_DEVICES=3")])
def test_unknown_topologies_are_refused(topology, message):
  with pytest.raises(UserError, match=message):
    topology_devices(topology)
