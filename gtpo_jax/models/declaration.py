"""Parameter declarations: shape, dtype, logical axes, initializer and kind, all in one place.

Shardings, abstract shapes, Hugging Face shapes and weight decay are derived from them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import flax.linen as nn
import flax.struct
import jax


class Kind(enum.Enum):
  """The role of a parameter. Weight decay applies to matrices and tables, not to vectors."""

  MATRIX = "matrix"  # a linear map: input axes, then output axes
  TABLE = "table"  # one row per token
  VECTOR = "vector"  # a bias or a scale, whatever its number of axes


# The name of a parameter within its module says its kind.
KINDS = {
  "kernel": Kind.MATRIX,
  "lora_a": Kind.MATRIX,
  "lora_b": Kind.MATRIX,
  "embedding": Kind.TABLE,
  "head": Kind.TABLE,
  "bias": Kind.VECTOR,
  "scale": Kind.VECTOR,
}


@flax.struct.dataclass
class Declaration(nn.LogicallyPartitioned):
  """A parameter (or its abstract shape) with the names of its axes.

  Attributes:
    inputs: number of leading axes that a matrix contracts, the layer axis not counted; 0 for other
      kinds.
  """

  inputs: int = flax.struct.field(default=0, pytree_node=False)


def declare(
  module: nn.Module,
  name: str,
  init: nn.initializers.Initializer,
  shape: Sequence[int],
  axes: Sequence[str],
  dtype: jax.typing.DTypeLike,
  inputs: int = 0,
) -> jax.Array:
  """Declares the parameter `name` of `module` and returns its value.

  Args:
    module: a bound module.
    name: a key of `KINDS`.
    init: initializer.
    shape: of one layer.
    axes: a logical axis (see `runtime.mesh.RULES`) for each dimension.
    dtype: stored format.
    inputs: leading axes that a matrix contracts; 0 for other kinds.

  Raises:
    ValueError: the name has no kind, or `inputs` does not fit its kind.
  """
  if name not in KINDS:
    raise ValueError(
      f"parameter {name!r} has no kind; use one of {', '.join(KINDS)}, or add it to KINDS"
    )
  if (KINDS[name] is Kind.MATRIX) != (0 < inputs < len(shape)):
    raise ValueError(
      f"parameter {name!r} of shape {tuple(shape)} is a {KINDS[name].value}; got inputs = {inputs}"
    )
  boxed = lambda key, shape, dtype: Declaration(init(key, shape, dtype), tuple(axes), inputs=inputs)
  return module.param(name, boxed, tuple(shape), dtype)


def is_decayed(path: Sequence[str]) -> bool:
  """Returns whether weight decay applies to the parameter at `path`.

  Raises:
    KeyError: the parameter was not declared with `declare`.
  """
  return KINDS[path[-1]] is not Kind.VECTOR
