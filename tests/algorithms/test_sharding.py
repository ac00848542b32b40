"""On eight devices, the prompts split among them, every recipe gives what it gives on one."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from recipe_cases import BY_ENTROPY, NAMES, arrays, random_batch, strong

CASES = [(name, {"scope": scope}) for name in BY_ENTROPY for scope in ("group", "batch")]
CASES += [(name, {}) for name in NAMES if name not in BY_ENTROPY]
CASES += [
  ("gtpo", {"compare": "matrix", "scope": "batch", "norm_scope": "group"}),
  ("grpo_s", {"scope": "batch", "norm_scope": "batch"}),
]


@functools.partial(jax.jit, static_argnums=0)
def prepare(algorithm, batch):
  mask = algorithm.loss_mask(**batch)
  return (
    algorithm.advantages(**batch),
    mask,
    algorithm.token_weights(mask, batch["correct"], batch.get("guided")),
  )


@pytest.mark.parametrize(
  ("name", "options"),
  CASES,
  ids=lambda x: x if isinstance(x, str) else "-".join(x.values()) or "plain",
)
def test_the_prompts_may_lie_on_eight_devices(name, options):
  devices = np.asarray(jax.devices())
  assert len(devices) == 8
  algorithm = strong(name, **options)
  batch = random_batch(90, name, n=8)
  by_prompt = NamedSharding(Mesh(devices, "n"), PartitionSpec("n"))
  apart = prepare(algorithm, jax.device_put(batch, by_prompt))
  together = prepare(algorithm, arrays(batch))
  for got, expected in zip(apart, together, strict=True):
    assert len(got.sharding.device_set) == 8 and len(expected.sharding.device_set) == 1
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-5, atol=1e-6)
  assert np.abs(np.asarray(together[0])).max() > 0.5
