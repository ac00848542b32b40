"""Loss scaling for float16, whose smallest normal number is 6e-5.

The loss is a mean over tokens, so the gradients of activations are far smaller than that. The loss
is multiplied by a constant, and the gradients of the parameters are divided by it (1710.03740). If
a gradient overflows, the update is skipped, as any update that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from gtpo_jax.models.config import ModelConfig

FLOAT16_SCALE = 2.0**13


def loss_scale(config: ModelConfig) -> float:
  """Returns the factor of the loss: 1 unless activations are float16."""
  return FLOAT16_SCALE if config.compute_dtype == "float16" else 1.0


def scaled(loss: Callable[..., jax.Array], scale: float) -> Callable[..., jax.Array]:
  """Returns a function that returns `scale` times what `loss` returns."""
  if scale == 1:
    return loss
  return lambda *arguments: scale * loss(*arguments)


def unscale(gradient: Any, scale: float) -> Any:
  """Returns the gradient of the loss from the scaled loss's."""
  if scale == 1:
    return gradient
  return jax.tree.map(lambda x: (x / scale).astype(x.dtype), gradient)
