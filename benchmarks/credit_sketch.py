"""The gradient probe for models whose gradients are too large to keep.

The gradient of an arm is multiplied by random signs and folded to `SKETCH` numbers. Inner products
of such sketches are unbiased estimates of those of the gradients, with a standard error of at most
sqrt(2 / SKETCH) times the product of the norms (Charikar et al. 2002, Weinberger et al. 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from credit_arms import REFERENCE, Arm, ArmBatch
from credit_probe import Moments, cosine, cotangent

from gtpo_jax.arrays import Rollouts
from gtpo_jax.models.params import Params

SKETCH = 65_521  # numbers; a prime, so that it shares no factor with the width of a matrix
REFERENCE_NAME = "reference"
AT_ONCE = 4  # groups whose gradient is computed at once

Gradients = Callable[[Params, Rollouts, np.ndarray], jax.Array]


def sketch(gradient: Params) -> jax.Array:
  """Returns f32[SKETCH], the gradient times random signs, folded. The signs are always the same."""
  total = jnp.zeros(SKETCH, jnp.float32)
  for number, leaf in enumerate(jax.tree.leaves(gradient)):
    rows = -(-leaf.size // SKETCH)
    flat = jnp.pad(leaf.astype(jnp.float32).ravel(), (0, rows * SKETCH - leaf.size))
    index = jax.lax.iota(jnp.uint32, rows * SKETCH) + jnp.uint32(number * 0x9E3779B9 % 2**32)
    sign = jnp.where(_mix(index) >> 31, 1.0, -1.0)
    total += (flat * sign).reshape(rows, SKETCH).sum(0)
  return total


def _mix(x: jax.Array) -> jax.Array:
  """Returns MurmurHash3's finaliser of u32 numbers, which maps neighbours to distant values."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


class Sketches(NamedTuple):
  """The sketches of one batch.

  Attributes:
    names: of the arms, and `REFERENCE_NAME`.
    values: f32[v, s], s numbers of each of the v arms.
    signals: what is known of the batch.
  """

  names: list[str]
  values: np.ndarray
  signals: dict[str, float]

  def save(self, file: Path) -> None:
    """Writes the sketches under their name only when they are complete."""
    part = file.with_suffix(".part")
    with part.open("wb") as out:
      np.savez(out, names=self.names, values=self.values, signals=[*self.signals.items()])
    part.rename(file)

  @classmethod
  def read(cls, file: Path) -> Sketches:
    """Reads what `save` wrote."""
    with np.load(file) as stored:
      signals = {str(key): float(value) for key, value in stored["signals"]}
      return cls([str(name) for name in stored["names"]], stored["values"], signals)


def sketch_batch(
  gradients: Gradients,
  params: Params,
  batch: ArmBatch,
  arms: Mapping[str, Arm],
  signals: dict[str, float],
) -> Sketches:
  """Returns the sketches of the arms and of the reference on one batch.

  Arms with equal derivatives share one gradient, and groups without any derivative are left out:
  the gradient is a sum over the groups.

  Args:
    gradients: from `credit_probe.make_gradients`, with `sketch` or another reduction to vectors.
    params: the policy that sampled the batch.
    batch: n groups.
    arms: the arms to compare; none for a batch of the reference only.
    signals: what is known of the batch.
  """
  all_arms = {**arms, REFERENCE_NAME: REFERENCE}
  derivatives = _derivatives(all_arms, batch)
  distinct, place = np.unique(derivatives, axis=0, return_inverse=True)
  groups = np.flatnonzero((distinct != 0).any((0, 2, 3)))
  total: Any = 0.0
  for start in range(0, max(len(groups), 1), AT_ONCE):
    chosen = groups[start : start + AT_ONCE]
    rows = np.resize(chosen, AT_ONCE) if len(chosen) else np.zeros(AT_ONCE, int)
    part = distinct[:, rows] * (np.arange(AT_ONCE) < len(chosen))[:, None, None]
    rollouts = jax.tree.map(lambda x, rows=rows: x[rows], batch.rollouts)
    total = total + np.asarray(gradients(params, rollouts, part), np.float64)
  values = total[place.reshape(-1)].astype(np.float32)
  return Sketches([*all_arms], values, signals)


def _derivatives(arms: Mapping[str, Arm], batch: ArmBatch) -> np.ndarray:
  """Returns the derivatives of the loss of each arm by the log-probs, f32[v, n, g, t]."""
  return np.stack([cotangent(arm, batch, arm.advantages(batch)) for arm in arms.values()])


def probe_result(batches: Sequence[Sketches], compared: int) -> dict[str, Any]:
  """Returns what each arm does, in the form of `credit_probe.probe`.

  The reference of a batch is the mean gradient with a leave-one-out baseline over all *other*
  batches, so no batch is compared with itself.

  Args:
    batches: at least 3. Those from `compared` on have the reference only.
    compared: batches on which the arms are compared, at least 2.
  """
  reference = np.stack([b.values[b.names.index(REFERENCE_NAME)] for b in batches]).astype(float)
  others = [np.delete(reference, i, axis=0).mean(0) for i in range(compared)]
  of_reference = _moments(reference)
  arms = {}
  for name in batches[0].names:
    if name == REFERENCE_NAME:
      continue
    own = [b.values[b.names.index(name)].astype(float) for b in batches[:compared]]
    arms[name] = {
      "cosine": [cosine(x, y) if x.any() else 0.0 for x, y in zip(own, others, strict=True)],
      "noise": _moments(own).noise(),
    }
  keys = batches[0].signals
  return {
    "batches": compared,
    "reference_batches": len(batches) - 1,
    "reference_noise": of_reference.noise() / (len(batches) - 1),
    "signals": {key: float(np.nanmean([b.signals[key] for b in batches])) for key in keys},
    "arms": arms,
  }


def _moments(vectors: Sequence[np.ndarray] | np.ndarray) -> Moments:
  found = Moments()
  for vector in vectors:
    found.add(vector)
  return found
