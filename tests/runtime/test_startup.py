"""A run never uses the CPU of a machine with an accelerator unless it is asked to."""

import jax
import pytest

from gtpo_jax.runtime import startup
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.startup import refuse_cpu_fallback


@pytest.fixture
def machine_with_gpu(monkeypatch, tmp_path):
  (tmp_path / "nvidia3").touch()
  table = {
    "an NVIDIA GPU": (str(tmp_path / "nvidia[0-9]*"), "cuda", "cuda"),
    "a TPU": (str(tmp_path / "accel[0-9]*"), "tpu", "tpu"),
  }
  monkeypatch.setattr(startup, "ACCELERATORS", table)
  before = jax.config.jax_platforms
  jax.config.update("jax_platforms", None)  # the tests themselves ask for the CPU
  yield
  jax.config.update("jax_platforms", before)


def test_a_gpu_that_jax_does_not_use_is_an_error(machine_with_gpu):
  with pytest.raises(UserError) as error:
    refuse_cpu_fallback()
  message = str(error.value)
  assert message.startswith("this machine has an NVIDIA GPU, but JAX would use the CPU (")
  assert message.endswith("; pip install 'gtpo_jax[cuda]', or set JAX_PLATFORMS=cpu to use the CPU")
  assert "\n" not in message


def test_the_cpu_may_be_asked_for(machine_with_gpu, monkeypatch):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides the GPUs
  refuse_cpu_fallback()
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
  jax.config.update("jax_platforms", "cpu")
  refuse_cpu_fallback()


def test_a_machine_without_accelerator(machine_with_gpu, tmp_path):
  (tmp_path / "nvidia3").unlink()
  refuse_cpu_fallback()


def test_a_platform_that_does_not_start(monkeypatch):
  def default_backend():
    raise RuntimeError("Unable to initialize backend 'cuda': no driver\nand more")

  monkeypatch.setattr(jax, "default_backend", default_backend)
  with pytest.raises(UserError, match=r"^JAX does not start with JAX_PLATFORMS=cpu \(Unable .* no"):
    refuse_cpu_fallback()
