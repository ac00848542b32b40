"""The settings of sampling: invalid values are rejected, and defaults depend on the platform."""

import pytest
from small import build

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.settings import EngineConfig, SamplingParams


@pytest.mark.parametrize(
  ("setting", "value", "bound"),
  [
    ("temperature", -0.1, "0 or at least 2**-20 and finite"),
    ("temperature", float("inf"), "0 or at least 2**-20 and finite"),
    ("temperature", float("nan"), "0 or at least 2**-20 and finite"),
    ("top_k", -1, "at least 0"),
    ("top_p", 0.0, "in (0, 1]"),
    ("top_p", 1.01, "in (0, 1]"),
    ("top_p", float("nan"), "in (0, 1]"),
    ("min_p", -0.01, "in [0, 1)"),
    ("min_p", 1.0, "in [0, 1)"),
    ("min_p", float("nan"), "in [0, 1)"),
  ],
)
def test_bad_sampling_params_are_rejected_with_value_and_bound(setting, value, bound):
  with pytest.raises(UserError) as error:
    SamplingParams(**{setting: value})
  assert f"sampling.{setting} must be {bound}" in str(error.value)
  assert str(error.value).endswith(f"got {value}")


@pytest.mark.parametrize(
  ("settings", "quoted"),
  [
    ({"slots": -1}, "slots"),
    ({"chunk": -2}, "chunk"),
    ({"kv_dtype": "int4"}, "'int4'"),
    ({"attention": "flash"}, "'flash'"),
    ({"page_size": 48}, "a power of two from 16 to 1024, or 0 for 128, got 48"),
    ({"page_size": 8}, "got 8"),
    ({"cache_fraction": 0.0}, r'in \(0, 1\], or "auto", got 0.0'),
    ({"cache_fraction": 1.5}, "got 1.5"),
    ({"cache_fraction": "half"}, "got 'half'"),
  ],
)
def test_bad_engine_configs_are_rejected(settings, quoted):
  with pytest.raises(UserError, match=quoted):
    EngineConfig(**settings)


def test_defaults_depend_on_the_platform():
  resolve = lambda platform, shards: EngineConfig().resolve(platform, shards, "bfloat16")
  assert resolve("cpu", 2) == EngineConfig("auto", 16, "bfloat16", "xla", 128)
  assert resolve("tpu", 4) == EngineConfig("auto", 64, "bfloat16", "pallas", 128)
  assert resolve("gpu", 1).attention == "xla"
  assert EngineConfig().most_slots("cpu", 2) == 128
  assert EngineConfig().most_slots("tpu", 2) == 512
  assert EngineConfig().most_slots("gpu", 2) == 2048
  assert EngineConfig(8).most_slots("gpu", 2) == 8
  explicit = EngineConfig(8, 4, "int8", "xla", 32, 0.5)
  assert explicit.resolve("tpu", 4, "bfloat16") == explicit
  assert EngineConfig(attention="triton").resolve("gpu", 1, "float32").attention == "triton"


def test_kernels_that_cannot_run_are_rejected():
  with pytest.raises(UserError, match="a TPU kernel, and this is gpu"):
    EngineConfig(attention="pallas").resolve("gpu", 1, "bfloat16")
  with pytest.raises(UserError, match="a GPU kernel, and this is tpu"):
    EngineConfig(attention="triton").resolve("tpu", 1, "bfloat16")
  with pytest.raises(UserError, match="a power of two from 16, not 8"):
    build(engine_config=EngineConfig(attention="triton"))
