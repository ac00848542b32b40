"""Parameter declarations: shape, dtype, logical axes, initializer and kind, all in one place.

Shardings, abstract shapes, Hugging Face shapes and weight decay follow from the declarations.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import flax.struct
import jax


class Kind(enum.Enum):
  """The role of a parameter. Weight decay applies to all but vectors."""

  MATRIX = "matrix"  # a linear map: input axes, then output axes
  TABLE = "table"  # one row per token
  VECTOR = "vector"  # a bias or a scale, with any number of axes
  FILTER = "filter"  # of a convolution: the taps of each feature, on the last axis


# The name of a parameter within its module determines its kind.
KINDS = {
  "kernel": Kind.MATRIX,
  "kernel_scale": Kind.VECTOR,
  "lora_a": Kind.MATRIX,
  "lora_b": Kind.MATRIX,
  "embedding": Kind.TABLE,
  "head": Kind.TABLE,
  "bias": Kind.VECTOR,
  "scale": Kind.VECTOR,
  "filter": Kind.FILTER,
  "a_log": Kind.VECTOR,
  "dt_bias": Kind.VECTOR,
}


class AxisRoles(NamedTuple):
  """The roles of the axes of a parameter, without the layer axis."""

  inputs: int = 0  # number of axes that a matrix contracts; 0 for other kinds
  # number of leading axes that number matrices of one shape, such as those of experts
  numbered: int = 0
  # the sizes of the parts of a head's features, for example query, key and value. Hugging Face's
  # tensors have each part of all heads together. () if there is one
  parts: tuple[int, ...] = ()


PLAIN = AxisRoles()  # of a parameter that is no matrix


@flax.struct.dataclass
class Declaration(nn.LogicallyPartitioned):
  """A parameter (or its abstract shape) with the names of its axes, and their `AxisRoles`."""

  inputs: int = flax.struct.field(default=0, pytree_node=False)
  numbered: int = flax.struct.field(default=0, pytree_node=False)
  parts: tuple[int, ...] = flax.struct.field(default=(), pytree_node=False)

  @property
  def last_input(self) -> int:
    """The last axis that a matrix contracts, in an array whose axis 0 are the layers."""
    return self.numbered + self.inputs


def declare(
  module: nn.Module,
  name: str,
  init: nn.initializers.Initializer,
  shape: Sequence[int],
  axes: Sequence[str],
  dtype: jax.typing.DTypeLike,
  roles: AxisRoles = PLAIN,
) -> jax.Array:
  """Declares the parameter `name` of `module` and returns its value.

  Args:
    module: a bound module.
    name: a key of `KINDS`.
    init: the initializer.
    shape: the shape within one layer.
    axes: a logical axis (see `runtime.mesh.RULES`) for each dimension.
    dtype: the stored dtype.
    roles: the roles of the axes.
  """
  if name not in KINDS:
    raise ValueError(
      f"parameter {name!r} has no kind; use one of {', '.join(KINDS)}, or add it to KINDS"
    )
  if (KINDS[name] is Kind.MATRIX) != (0 < roles.inputs < len(shape) - roles.numbered):
    raise ValueError(
      f"parameter {name!r} of shape {tuple(shape)} is a {KINDS[name].value}; got inputs = "
      f"{roles.inputs}"
    )
  boxed = lambda key, shape, dtype: Declaration(
    init(key, shape, dtype), tuple(axes), **roles._asdict()
  )
  return module.param(name, boxed, tuple(shape), dtype)


def is_decayed(path: Sequence[str]) -> bool:
  """Returns whether weight decay applies to the parameter at `path`."""
  return KINDS[path[-1]] is not Kind.VECTOR
