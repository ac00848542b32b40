"""The expected time against what docs/benchmarks.md has measured, and its correction."""

import dataclasses
import os

import pytest
from toys import ADDITIONS, Listener, config_of, even

import gtpo_jax
from gtpo_jax.config import load, resolve_model
from gtpo_jax.config.roofline import CpuSpeed, cpu_speed, expected_seconds
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.runtime.chips import CHIPS, Chip

ONE = {"data": 1, "expert": 1, "fsdp": 1, "tensor": 1}
SMOLLM2 = ModelConfig(
  vocab_size=49152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp=1536
)
ONE_STEP = ModelConfig(
  vocab_size=8192, width=256, layers=4, heads=4, kv_heads=2, head_dim=64, mlp=1024
)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
  """The number of cores of the machines of the measurements."""
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)


EPYC = CpuSpeed()  # 2026-11-27
XEON = CpuSpeed(137e9, 4.65)  # with AMX, 2026-11-29


def expect(architecture, chip, slots, dtype="float32", cpu=EPYC, **changes):
  config = config_of(**{"model.remat": "full", **changes})
  c = dataclasses.replace(architecture, compute_dtype=dtype)
  return expected_seconds(config, c, chip, ONE, slots, cpu=cpu)


def assert_near(expected, measured):
  assert measured / 1.5 < expected < measured * 1.5


@pytest.mark.parametrize(
  ("cpu", "architecture", "dtype", "sizes", "sample", "update"),
  [
    (EPYC, ONE_STEP, "float32", (4, 8, 64, 128), 0.40, 0.62),
    (EPYC, SMOLLM2, "float32", (8, 8, 64, 32), 3.2, 6.7),
    (EPYC, SMOLLM2, "bfloat16", (8, 8, 64, 32), 2.5, 4.5),
    (XEON, ONE_STEP, "float32", (4, 8, 64, 128), 0.80, 1.21),
    (XEON, SMOLLM2, "float32", (8, 8, 64, 32), 5.6, 11.5),
    (XEON, SMOLLM2, "bfloat16", (8, 8, 64, 32), 3.4, 5.5),
  ],
)
def test_on_two_cores(cpu, architecture, dtype, sizes, sample, update):
  names = ("batch.prompts", "batch.group", "data.max_prompt_tokens", "sampling.max_tokens")
  expected = expect(architecture, Chip(0), 256, dtype, cpu, **dict(zip(names, sizes, strict=True)))
  assert_near(expected.sample, sample)
  assert_near(expected.update, update)
  assert expected.factor == 2.0


def test_half_the_speed_takes_twice_the_time():
  config = load("configs/tiny.py", ["--config.model.remat=full"])
  once, twice = (
    expected_seconds(config, resolve_model(config).config, Chip(0), ONE, 512, cpu=CpuSpeed(flops))
    for flops in (228e9, 114e9)
  )
  for name in ("sample", "update", "evaluation", "warm_start"):
    assert getattr(twice, name) == pytest.approx(2 * getattr(once, name))
  for dtype in ("float32", "bfloat16"):
    measured = cpu_speed(dtype)
    assert 1e8 < measured.products < 1e13 and 0.01 < measured.gain < 100
  assert cpu_speed("float32").gain == 1


def test_the_tiny_run():
  """45 s of warm start, and 40 to 48 s for 50 steps with their evaluations."""
  config = load("configs/tiny.py", ["--config.model.remat=full"])
  expected = expected_seconds(config, resolve_model(config).config, Chip(0), ONE, 512, cpu=EPYC)
  assert_near(expected.warm_start, 45)
  assert_near(expected.rest(config, 0), 45 + 44)
  assert expected.rest(config, 49) == pytest.approx(expected.step + expected.evaluation)


@pytest.mark.parametrize(
  ("preset", "sample", "update"), [("qwen2.5-0.5b", 2.92, 2.75), ("qwen2.5-1.5b", 6.66, 6.93)]
)
def test_on_one_h100(preset, sample, update):
  changes = {"batch.prompts": 16, "batch.group": 16, "data.max_prompt_tokens": 512}
  changes |= {"sampling.max_tokens": 1024, "model.preset": preset, "model.random_weights": True}
  expected = expect(PRESETS[preset], CHIPS["h100"], 256, "bfloat16", **changes)
  assert_near(expected.sample, sample)
  assert_near(expected.update, update)
  assert expected.factor == 1.5 and "H100" in expected.basis


@pytest.mark.slow
def test_a_run_says_it_and_corrects_it_after_three_steps_that_compile_nothing():
  changes = {"steps": 9, "batch.prompts": 2, "batch.group": 2, "eval.every": 0, "eval.samples": 1}
  changes |= {"data.max_prompt_tokens": 20, "sampling.max_tokens": 4}
  listener = Listener()
  gtpo_jax.train(config_of(**changes), None, listener, lambda: False, reward=even, data=ADDITIONS)
  said = listener.said
  (first,) = [line for line in said if line.startswith("expected: ")]
  assert " s a step (sampling " in first and "it may be off by a factor of 2" in first
  (after,) = [line for line in said if line.startswith("measured: ")]
  assert " s a step, so about " in after and after.endswith(" for the rest of the run")
