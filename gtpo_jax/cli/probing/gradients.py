"""Gradients of losses that are known by their derivatives, as vectors that can be kept.

The gradient of a large model is multiplied by random signs and folded to `SKETCH` numbers. Inner
products of such sketches are unbiased estimates of those of the gradients, with a standard error of
at most sqrt(2 / SKETCH) times the product of the norms (Charikar et al. 2002, Weinberger et al.
2009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.algorithms import Algorithm, make
from gtpo_jax.arrays import Rollouts, Signals
from gtpo_jax.checkpoint.integrity import mix_bits
from gtpo_jax.config import Config
from gtpo_jax.models.lora import partition
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import shard_batch
from gtpo_jax.training.gradient import FrozenParams, Minibatch, UpdateSettings, make_gradient

SKETCH = 65_521  # numbers; a prime, so that it shares no factor with the width of a matrix
LARGEST = 2**20  # numbers of a gradient that is kept as it is

# (rollouts, derivatives by log-probs and by entropies f32[n, g, t]) -> f32[p]
Gradients = Callable[[Rollouts, np.ndarray, np.ndarray], np.ndarray]


class LinearLoss(Algorithm):
  """The loss `advantages` times log-probs plus `entropy_weights` times entropies, summed."""

  def token_loss(self, log_probs: jax.Array, entropy: jax.Array, signals: Signals) -> jax.Array:
    """Returns the loss of some tokens, as in `Algorithm.token_loss`."""
    terms = signals.advantages * log_probs
    if self.recipe.entropy_bonus:
      terms += signals.entropy_weights * entropy
    return jnp.where(signals.mask, terms, 0.0).sum()


def make_gradients(
  config: Config, model: Transformer, params: Params, largest: int = LARGEST
) -> Gradients:
  """Returns a function that computes the gradient of a loss by the parameters that are trained.

  Every loss with the same derivatives has the same vector, bit for bit. Only losses with an entropy
  bonus use the program that differentiates entropies.

  Args:
    config: divides the batch into micro-batches.
    model: the architecture.
    params: the parameters at which the gradient is taken.
    largest: a gradient of more numbers is replaced by its sketch.
  """
  trained, base = partition(model, params)
  size = sum(leaf.size for leaf in jax.tree.leaves(trained))
  reduce = sketch if size > largest else flatten
  batch = config.batch
  settings = UpdateSettings(
    config.sampling.temperature, micro_batches=batch.micro_batches, head_chunk=batch.head_chunk
  )

  def program(coef: float) -> Callable[..., jax.Array]:
    loss = LinearLoss("linear", make("rloo", entropy_coef=coef).recipe)
    gradient = make_gradient(model, loss, settings)
    key = jax.random.key(0)
    return jax.jit(
      lambda trained, base, *batch: reduce(
        gradient(trained, FrozenParams(base), Minibatch(*batch), key)[0]
      )
    )

  plain, with_entropy = program(0.0), program(1.0)

  def gradients(rollouts: Rollouts, by_log_probs: np.ndarray, by_entropy: np.ndarray) -> np.ndarray:
    has_bonus = by_entropy.any()
    signals = Signals(
      mask=(by_log_probs != 0) | (by_entropy != 0),
      advantages=by_log_probs,
      entropy_weights=by_entropy if has_bonus else None,
    )
    compute = with_entropy if has_bonus else plain
    return np.asarray(compute(trained, base, rollouts, shard_batch(signals, model.mesh)))

  return gradients


def gradients_of(
  gradients: Gradients, rollouts: Rollouts, losses: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> dict[str, np.ndarray]:
  """Returns the gradient of each loss, given by its derivatives; equal ones are computed once."""
  computed: dict[bytes, np.ndarray] = {}
  found = {}
  for name, derivatives in losses.items():
    key = b"".join(x.tobytes() for x in derivatives)
    if key not in computed:
      computed[key] = gradients(rollouts, *derivatives)
    found[name] = computed[key]
  return found


def flatten(gradient: Params) -> jax.Array:
  """Returns a gradient as one vector f32[p], of all p parameters."""
  return jnp.concatenate([leaf.astype(jnp.float32).ravel() for leaf in jax.tree.leaves(gradient)])


def sketch(gradient: Params) -> jax.Array:
  """Returns f32[SKETCH], the gradient times random signs, folded. The signs are always the same."""
  total = jnp.zeros(SKETCH, jnp.float32)
  for number, leaf in enumerate(jax.tree.leaves(gradient)):
    rows = -(-leaf.size // SKETCH)
    flat = jnp.pad(leaf.astype(jnp.float32).ravel(), (0, rows * SKETCH - leaf.size))
    index = jax.lax.iota(jnp.uint32, rows * SKETCH) + jnp.uint32(number * 0x9E3779B9 % 2**32)
    sign = jnp.where(mix_bits(index) >> 31, 1.0, -1.0)
    total += (flat * sign).reshape(rows, SKETCH).sum(0)
  return total
