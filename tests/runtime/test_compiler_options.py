"""XLA options by platform: which programs get them, and that the compilers know them."""

import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.cli.planning.topology import topology_devices, without_compile_cache
from gtpo_jax.runtime.compiler_options import OPTIONS, update_options

PIPELINED = {
  "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
  "xla_gpu_enable_pipelined_all_gather": True,
}


def gpus(count, processes=1):
  return [
    SimpleNamespace(platform="gpu", process_index=i * processes // count) for i in range(count)
  ]


def tpus(slices):
  return [SimpleNamespace(platform="tpu", slice_index=i % slices) for i in range(4)]


@pytest.mark.devices
def test_options_for_gpus_are_for_several(monkeypatch):
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  (option,) = update_options(gpus(8)).items()
  assert option in PIPELINED.items()
  assert update_options(gpus(1)) == {}


@pytest.mark.devices
def test_an_update_on_cpus_is_ordered_for_memory(monkeypatch):
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  for devices in (jax.devices(), jax.devices()[:1]):
    (name,) = update_options(devices)
    assert name == "xla_cpu_enable_concurrency_optimized_scheduler"


def test_several_tpu_slices_overlap_the_sum_of_gradients():
  assert update_options(tpus(slices=2)) == {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
  }
  assert update_options(tpus(slices=1)) == {}


def test_flags_of_the_user_win(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_pipelined_all_gather=false")
  assert update_options(gpus(8)) == {}
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_data_parallel_all_reduce_opt=false")
  assert list(update_options(tpus(2))) == ["xla_tpu_data_parallel_opt_different_sized_ops"]


def test_this_xla_compiles_with_the_options_for_gpus(monkeypatch):
  """XLA for CPUs checks the names and values of its options for GPUs too."""
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  options = update_options(gpus(2))
  doubled = jax.jit(lambda x: 2 * x, compiler_options=options)
  np.testing.assert_array_equal(doubled(jnp.arange(3)), [0, 2, 4])


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is missing")
@pytest.mark.slow
def test_the_compiler_for_tpus_knows_its_options():
  devices, _ = topology_devices("v5e:2x2")
  one_device = jax.sharding.SingleDeviceSharding(devices[0])
  x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=one_device)
  options = {name: value for option in OPTIONS for name, value in option.values.items()}
  known = {name: value for name, value in options.items() if name.startswith("xla_tpu")}
  lowered = jax.jit(lambda x: 2 * x).lower(x)
  assert len(known) == 2
  with without_compile_cache():
    assert lowered.compile(compiler_options=known)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_tpu_no_such_option"):
      lowered.compile(compiler_options={"xla_tpu_no_such_option": True})
