"""model.compute_dtype = "auto": one config computes in the fastest format of each device."""

import dataclasses
import types

import jax
import pytest

from gtpo_jax.checkpoint.opening import usable_here
from gtpo_jax.config import Config, ModelSection, resolve_model
from gtpo_jax.models import number_formats
from gtpo_jax.models.number_formats import compute_dtype_for, usable_compute_dtype
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.runtime.chips import cpu_bfloat16_units


def device(platform, kind, capability=None):
  """Stands for a device that is not attached."""
  return types.SimpleNamespace(
    platform=platform, device_kind=kind, compute_capability=capability, process_index=0
  )


T4 = device("gpu", "Tesla T4", "7.5")
L4 = device("gpu", "NVIDIA L4", "8.9")
CPU = device("cpu", "cpu")


def test_the_format_of_each_device():
  table = [
    (device("tpu", "TPU v5 lite"), "bfloat16", "TPU v5 lite has units for it"),
    (device("tpu", "TPU v6 lite"), "bfloat16", "TPU v6 lite has units for it"),
    (device("gpu", "NVIDIA H100 80GB HBM3", "9.0"), "bfloat16", "NVIDIA H100 80GB HBM3 has units"),
    (device("gpu", "NVIDIA A100-SXM4-80GB", "8.0"), "bfloat16", "NVIDIA A100-SXM4-80GB has units"),
    (L4, "bfloat16", "NVIDIA L4 has units for it"),
    (T4, "float16", "Tesla T4 has no bfloat16 units"),
    (device("gpu", "Tesla V100-SXM2-16GB", "7.0"), "float16", "no bfloat16 units"),
    (device("gpu", "Tesla P100-PCIE-16GB", "6.0"), "float32", "no units for 16-bit formats"),
    (device("gpu", "AMD Instinct MI300X", "gfx942"), "bfloat16", "AMD Instinct MI300X has units"),
  ]
  for each, name, reason in table:
    chosen = compute_dtype_for("auto", each, 128)
    assert (chosen.name, reason in chosen.reason) == (name, True), chosen


def test_the_format_of_a_cpu(monkeypatch):
  table = [
    ("avx512_bf16", 576, "bfloat16", "this CPU has units for it (avx512_bf16)"),
    ("amx_bf16", 512, "bfloat16", "this CPU has units for it (amx_bf16)"),
    ("avx512_bf16", 128, "float32", "on CPUs, models below width 512 gain little from bfloat16"),
    ("", 4096, "float32", "this CPU has no bfloat16 units"),
  ]
  for units, width, name, reason in table:
    monkeypatch.setattr(number_formats, "cpu_bfloat16_units", lambda units=units: units)
    assert compute_dtype_for("auto", CPU, width) == (name, reason)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_format_that_is_set_is_used_everywhere(name):
  for each in (T4, L4, CPU):
    assert compute_dtype_for(name, each, 128) == (name, f"model.compute_dtype is {name}")


def test_the_units_of_a_cpu_are_read_from_linux(tmp_path):
  table = [
    ("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n", "amx_bf16"),
    ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16\n", "avx512_bf16"),
    ("processor\t: 0\nflags\t\t: fpu avx2\n", ""),
    ("processor\t: 0\nFeatures\t: fp asimd bf16\n", ""),
    ("", ""),
  ]
  for i, (text, expected) in enumerate(table):
    (tmp_path / str(i)).write_text(text)
    assert cpu_bfloat16_units(tmp_path / str(i)) == expected
  assert cpu_bfloat16_units(tmp_path / "absent") == ""


def test_a_config_resolves_to_a_concrete_format_for_each_device(monkeypatch):
  monkeypatch.setattr(number_formats, "cpu_bfloat16_units", lambda: "avx512_bf16")
  config = Config(model=ModelSection(preset="qwen2.5-0.5b", random_weights=True))
  assert config.model.compute_dtype == "auto"
  formats = [resolve_model(config, each).config.compute_dtype for each in (T4, L4, CPU)]
  assert formats == ["float16", "bfloat16", "bfloat16"]
  assert resolve_model(Config(), CPU).config == PRESETS["tiny"]  # in float32
  assert PRESETS["tiny"].compute_dtype == "float32"


def test_a_run_is_opened_in_its_own_format_where_the_device_has_units_for_it(monkeypatch):
  table = [(T4, "bfloat16", "auto"), (T4, "float32", "float32"), (L4, "bfloat16", "bfloat16")]
  for each, recorded, expected in [*table, (CPU, "bfloat16", "bfloat16")]:
    assert usable_compute_dtype(recorded, each) == expected
  trained = Config(model=ModelSection(compute_dtype="bfloat16"))
  assert usable_here(trained) == trained
  monkeypatch.setattr(jax, "devices", lambda: [T4])
  opened = usable_here(trained)
  assert resolve_model(opened).config.compute_dtype == "float16"
  auto = dataclasses.replace(trained.model, compute_dtype="auto")
  assert opened == dataclasses.replace(trained, model=auto)
