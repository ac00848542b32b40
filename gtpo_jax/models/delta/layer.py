"""The gated delta net of Qwen3-Next and Qwen3.5: a mixer whose past has a fixed size."""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.models.attention.streams import StreamMasks
from gtpo_jax.models.config import DTYPES, ModelConfig
from gtpo_jax.models.declaration import AxisRoles, declare
from gtpo_jax.models.delta.rule import chunked_delta_rule, delta_step
from gtpo_jax.models.kinds import LayerKind
from gtpo_jax.models.layers import Dense, RMSNorm
from gtpo_jax.runtime.mesh import divisible_axis, partition_spec

UNIT_EPS = 1e-6  # added to the squared norm of queries and keys
# Products of the rule are more precise than others, because a memory lasts for thousands of
# positions. GPUs have units for this one.
PRECISION = "high"


class DeltaState(NamedTuple):
  """A layer's memory of the positions so far."""

  inputs: jax.Array  # [n, g, taps - 1, k, features], the last inputs of the convolution
  memory: jax.Array  # f32[n, g, h, e, f]

  @classmethod
  def zeros(cls, config: ModelConfig, n: int, g: int = 1) -> DeltaState:
    """Returns the state before the first position."""
    d = config.delta
    inputs = jnp.zeros((n, g, d.taps - 1, d.key_heads, d.features), DTYPES[config.compute_dtype])
    return cls(inputs, jnp.zeros((n, g, d.value_heads, d.key_dim, d.value_dim), jnp.float32))


# The logical axes of a state's arrays.
STATE_AXES = DeltaState(("batch", None, None, "heads"), ("batch", None, "heads"))


class Filters(nn.Module):
  """The filters of the convolution."""

  config: ModelConfig

  @nn.compact
  def __call__(self) -> jax.Array:
    """Returns [k, features, taps]."""
    d = self.config.delta
    bound = d.taps**-0.5  # as torch initialises a convolution
    init = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)
    shape = (d.key_heads, d.features, d.taps)
    axes = ("heads", "head_dim", "tap")
    dtype = DTYPES[self.config.param_dtype]
    return declare(self, "filter", init, shape, axes, dtype, AxisRoles(parts=d.parts))


class Decay(nn.Module):
  """How fast the memory of each head decays."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the logarithm of the decay, f32[..., h], of its input `x` [..., h]."""
    c = self.config
    shape = (c.delta.value_heads,)
    rate = lambda key, shape, dtype: jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))
    vector = lambda name, init: declare(
      self, name, init, shape, ("heads",), DTYPES[c.param_dtype]
    ).astype(jnp.float32)
    a_log = vector("a_log", rate)
    bias = vector("dt_bias", nn.initializers.ones)
    return -jnp.exp(a_log) * jax.nn.softplus(x.astype(jnp.float32) + bias)


class GatedDeltaNet(nn.Module):
  """The gated delta rule with its projections, convolution and gates (2412.06464, section 3.4).

  Its parameters are in the scope of the layer. Queries, keys and values of one key head are next to
  each other, so that devices have whole heads.
  """

  config: ModelConfig
  mesh: Mesh
  kind: LayerKind

  def setup(self):
    """Declares the parameters with the names of their axes."""
    c = self.config
    d = c.delta
    dense = functools.partial(Dense, c, self.mesh)
    target = next((x for x in ("q", "k", "v") if x in c.lora.targets), "q")
    reading = functools.partial(dense, target=target)
    embed = (c.width,)
    values = (d.value_heads, d.value_dim)
    of_heads = ("embed", "heads", "head_dim")
    self.in_qkv = reading(embed, (d.key_heads, d.features), of_heads, parts=d.parts)
    self.in_z = reading(embed, values, of_heads)
    self.in_b = reading(embed, values[:1], ("embed", "heads"))
    self.in_a = reading(embed, values[:1], ("embed", "heads"))
    self.filters = Filters(c)
    self.decay = Decay(c)
    self.delta_norm = RMSNorm(c, (d.value_dim,), is_centred=False)
    self.out = dense(values, embed, ("heads", "head_dim", "embed"), target="o")

  def __call__(
    self, x: jax.Array, masks: StreamMasks, is_continued: bool = False
  ) -> tuple[jax.Array, DeltaState]:
    """Returns the output [n, g, s, d] of a stream, and the state after it.

    Args:
      x: [n, g, s, d].
      masks: of the stream. Padding on the left leaves the state at zero.
      is_continued: whether `continue_from` follows, which reads the last position again. The state
        is then that before it, and its output has no meaning.
    """
    x = jnp.where(masks.mask[..., None], x, jnp.zeros((), x.dtype))
    return self._mix(x, DeltaState.zeros(self.config, *x.shape[:2]), None, is_continued)

  def continue_from(self, x: jax.Array, masks: StreamMasks, prompt: DeltaState) -> jax.Array:
    """Returns the output of completions, whose first input is the last token of their prompt."""
    return self._mix(x, prompt, masks.places, False)[0]

  def step(self, x: jax.Array, state: DeltaState) -> tuple[jax.Array, DeltaState]:
    """Returns the output of one new position [n, g, 1, d], and the state after it."""
    qkv = self.in_qkv(x)
    convolved = convolve(qkv, self.filters(), state.inputs)
    at_position = jax.tree.map(lambda x: x[:, :, :, 0], self._rule_inputs(x, convolved))
    out, memory = delta_step(*at_position, state.memory)
    inputs = extended(qkv, state.inputs)[:, :, 1:]
    return self._output(x, out[:, :, :, None]), DeltaState(inputs, memory)

  def _mix(
    self, x: jax.Array, state: DeltaState, places: jax.Array | None, is_continued: bool
  ) -> tuple[jax.Array, DeltaState]:
    """Runs over sequences that begin with `state`, or whose segments do; see `convolve`."""
    s = x.shape[2]
    qkv = self.in_qkv(x)
    convolved = convolve(qkv, self.filters(), state.inputs, places)
    *qkv_heads, log_decay, beta = self._rule_inputs(x, convolved)
    if is_continued:
      is_kept = jnp.arange(s) < s - 1
      log_decay, beta = (jnp.where(is_kept, x, 0.0) for x in (log_decay, beta))
    begins = None if places is None else places == 0
    out, memory = self._over_heads(*qkv_heads, log_decay, beta, state.memory, begins)
    inputs = extended(qkv, state.inputs)
    inputs = inputs[:, :, s - 1 : -1] if is_continued else inputs[:, :, s:]
    return self._output(x, out), DeltaState(inputs, memory)

  def _rule_inputs(self, x: jax.Array, convolved: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arguments of the rule, f32[n, g, h, s, ...]."""
    d = self.config.delta
    heads = jax.nn.silu(convolved)
    q, k, v = jnp.split(heads, (d.key_dim, 2 * d.key_dim), -1)
    unit = lambda x: x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + UNIT_EPS)
    q, k = (jnp.repeat(unit(x), d.values_per_key, 3) for x in (q, k))
    v = v.reshape(*v.shape[:3], d.value_heads, d.value_dim)
    log_decay = self.decay(self.in_a(x))
    beta = jax.nn.sigmoid(self.in_b(x).astype(jnp.float32))
    return tuple(jnp.swapaxes(x, 2, 3) for x in (q * d.key_dim**-0.5, k, v, log_decay, beta))

  def _over_heads(self, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Runs the chunked rule on each device's rows and heads."""
    highest = self.config.matmul_precision == "highest"
    rule = functools.partial(chunked_delta_rule, precision="highest" if highest else PRECISION)
    rows = divisible_axis(self.mesh, arrays[0].shape[0], "batch")
    by_heads = partition_spec((rows, None, "heads"))
    *of_heads, begins = arrays
    specs = [*[by_heads] * len(of_heads), None if begins is None else partition_spec((rows,))]
    return jax.shard_map(
      rule, mesh=self.mesh, in_specs=tuple(specs), out_specs=by_heads, check_vma=False
    )(*arrays)

  def _output(self, x: jax.Array, out: jax.Array) -> jax.Array:
    """Normalises, gates and projects the output of the rule, f32[n, g, h, s, f]."""
    gate = jax.nn.silu(self.in_z(x).astype(jnp.float32))
    return self.out((self.delta_norm(jnp.swapaxes(out, 2, 3)) * gate).astype(x.dtype))


def convolve(
  x: jax.Array, kernel: jax.Array, before: jax.Array, places: jax.Array | None = None
) -> jax.Array:
  """Returns the sum over the taps of each position and those before it, f32[n, g, s, k, f].

  Args:
    x: [n, g, s, k, f].
    kernel: [k, f, taps]; the last tap is for the position itself.
    before: [n, g | 1, taps - 1, k, f], the inputs before the first position, the latest last.
    places: i32[n, g, s], the place of each position in its segment, which `before` precedes. None
      if each row is one segment.
  """
  s = x.shape[2]
  taps = kernel.shape[-1]
  kernel = kernel.astype(jnp.float32)
  before = before.astype(jnp.float32)
  wide = extended(x.astype(jnp.float32), before)
  out = 0.0
  for tap in range(taps):
    at_tap = wide[:, :, tap : tap + s]
    if places is not None:
      for place in range(taps - 1 - tap):  # whose tap is before its segment
        is_there = (places == place)[..., None, None]
        at_tap = jnp.where(is_there, before[:, :, tap + place, None], at_tap)
    out += at_tap * kernel[..., tap]
  return out


def extended(x: jax.Array, before: jax.Array) -> jax.Array:
  """Returns `x` [n, g, s, k, f] with the inputs before it, [n, g, taps - 1 + s, k, f]."""
  before = jnp.broadcast_to(before, (*x.shape[:2], *before.shape[2:]))
  return jnp.concatenate([before.astype(x.dtype), x], 2)
