"""Every recipe gives the same result with the prompts split over eight devices as on one."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from recipe_cases import WITHOUT_ENTROPY, arrays, option_id, random_batch, strong
from slow_reference import BY_ENTROPY

pytestmark = pytest.mark.devices

CASES = [(name, {"scope": scope}) for name in BY_ENTROPY for scope in ("group", "batch")]
CASES += [(name, {}) for name in WITHOUT_ENTROPY]
CASES += [
  ("gtpo", {"compare": "matrix", "scope": "batch", "norm_scope": "group"}),
  ("grpo_s", {"scope": "batch", "norm_scope": "batch"}),
]


@functools.partial(jax.jit, static_argnums=0)
def prepare(algorithm, batch):
  mask = algorithm.loss_mask(**batch)
  weights = algorithm.token_weights(mask, batch["correct"], batch.get("guided"))
  return algorithm.advantages(**batch), mask, weights


@pytest.mark.parametrize(("name", "options"), CASES, ids=option_id)
@pytest.mark.some(4, slow=10)
def test_sharded_prompts_give_the_same_result(name, options):
  devices = np.asarray(jax.devices())
  assert len(devices) == 8
  algorithm = strong(name, **options)
  batch = random_batch(90, name, n=8)
  by_prompt = NamedSharding(Mesh(devices, "n"), PartitionSpec("n"))
  sharded = prepare(algorithm, jax.device_put(batch, by_prompt))
  unsharded = prepare(algorithm, arrays(batch))
  for got, expected in zip(sharded, unsharded, strict=True):
    assert len(got.sharding.device_set) == 8 and len(expected.sharding.device_set) == 1
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-5, atol=1e-6)
  assert np.abs(np.asarray(unsharded[0])).max() > 0.5
