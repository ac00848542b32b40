"""Qwen2.5 in Flax Linen: one layer's code for training, prefill and decode.

Parameters are stacked over layers and carry the names of their axes. A forward pass runs one or two *streams*, each
[n, g, s, d]: the prompts (g = 1), and the completions, which look at their prompt's keys and values, computed once for the
whole group in the same sweep over the layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gtpo_jax.arrays import Packing, Prompts, most_in_row
from gtpo_jax.models.attention import KV, Context, rope_angles, rotate
from gtpo_jax.models.causal import attend_causally
from gtpo_jax.models.embedding import look_up
from gtpo_jax.models.flash import SAVED
from gtpo_jax.models.presets import DTYPES, ModelConfig
from gtpo_jax.runtime.mesh import axis_size, constrain, partition_spec, uneven, where_even

Params = dict[str, Any]
Rope = tuple[jax.Array, jax.Array]
Attend = Callable[[jax.Array, KV], tuple[jax.Array, Any]]


class StreamMasks(NamedTuple):
  """What the positions of one stream see, the same in every layer."""

  rope: Rope  # f32[n, g | 1, s, e/2] twice
  mask: (
    jax.Array | None
  )  # bool[n, 1, s], the stream's real tokens; None where those behind a token do not matter
  prompt: jax.Array | None = (
    None  # bool[n, m, p], which of the first stream's are seen, once for each segment; None for the first itself
  )
  segment: jax.Array | None = (
    None  # i32[n, g, s], the segment that a position sees alone of its stream; None where there is but one
  )


class Layer(nn.Module):
  """One transformer block: RMSNorm, grouped-query attention with QKV bias, RMSNorm, SwiGLU."""

  config: ModelConfig
  mesh: Mesh

  def setup(self):
    """Declares the layer's parameters with the names of their axes."""
    c = self.config
    self.attention_norm = _Norm(c)
    self.q = _Dense(
      c, self.mesh, (c.width,), (c.heads, c.head_dim), ("embed", "heads", "head_dim"), bias=True
    )
    self.k = _Dense(
      c,
      self.mesh,
      (c.width,),
      (c.kv_heads, c.head_dim),
      ("embed", "kv_heads", "head_dim"),
      bias=True,
    )
    self.v = _Dense(
      c,
      self.mesh,
      (c.width,),
      (c.kv_heads, c.head_dim),
      ("embed", "kv_heads", "head_dim"),
      bias=True,
    )
    self.o = _Dense(c, self.mesh, (c.heads, c.head_dim), (c.width,), ("heads", "head_dim", "embed"))
    self.mlp_norm = _Norm(c)
    self.gate = _Dense(c, self.mesh, (c.width,), (c.mlp,), ("embed", "mlp"))
    self.up = _Dense(c, self.mesh, (c.width,), (c.mlp,), ("embed", "mlp"))
    self.down = _Dense(c, self.mesh, (c.mlp,), (c.width,), ("mlp", "embed"))

  def __call__(
    self, streams: tuple[jax.Array, ...], masks_by_stream: tuple[StreamMasks, ...]
  ) -> tuple[tuple[jax.Array, ...], None]:
    """Runs the layer over each stream [n, g, s, d], of which all but the first may look at the first."""
    x, first = self.read(streams[0], masks_by_stream[0])
    out = [x]
    for x, masks in zip(streams[1:], masks_by_stream[1:], strict=True):
      q, kv = self._project(x, masks.rope)
      out.append(
        self._finish(
          x,
          attend_causally(
            self.config, self.mesh, q, Context(kv, masks.mask, first, masks.prompt, masks.segment)
          ),
        )
      )
    return tuple(out), None

  def read(self, x: jax.Array, masks: StreamMasks) -> tuple[jax.Array, KV]:
    """Runs the layer over one stream [n, g, s, d] that looks at itself alone; its keys and values too."""
    q, kv = self._project(x, masks.rope)
    return self._finish(x, attend_causally(self.config, self.mesh, q, Context(kv, masks.mask))), kv

  def decode(self, x: jax.Array, rope: Rope, attend: Attend) -> tuple[jax.Array, Any]:
    """One new position x [n, g, 1, d] transformed, and what `attend` keeps."""
    attended, kept = attend(*self._project(x, rope))
    return self._finish(x, attended), kept

  def _project(self, x: jax.Array, rope: Rope) -> tuple[jax.Array, KV]:
    """Rotated queries [n, g, h, s, e], and the keys and values of the same positions."""
    x = self._whole(self.attention_norm(x))
    q, k, v = (jnp.swapaxes(project(x), 2, 3) for project in (self.q, self.k, self.v))
    return rotate(q, rope), KV(jnp.swapaxes(rotate(k, rope), -1, -2), v)

  def _finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
    x = residual_layout(
      x + whole_gradient(self.o(jnp.swapaxes(attended, 2, 3)), self.mesh), self.mesh
    )
    h = self._whole(self.mlp_norm(x))
    mixed = nn.silu(self.gate(h)) * self.up(h)
    mixed = constrain(
      mixed, self.mesh, "batch", None, where_even(self.mesh, h.shape[2], "position"), "mlp"
    )  # and so its gradient
    return residual_layout(x + whole_gradient(self.down(mixed), self.mesh), self.mesh)

  def _whole(self, x: jax.Array) -> jax.Array:
    """All positions of a context shard on every shard of the tensor axis, as products with its heads and features want them."""
    return layer_layout(x, self.mesh)


def layer_layout(x: jax.Array, mesh: Mesh) -> jax.Array:
  """The layout of [n, g, s, d] within a layer: split over the batch, and over positions where the context axis divides them."""
  return constrain(x, mesh, "batch", None, where_even(mesh, x.shape[2], "position"), None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def whole_gradient(x: jax.Array, mesh: Mesh) -> jax.Array:
  """The identity, whose gradient is laid out as within a layer. Without it the compiler gathers the batch for the gradient of a matrix
  whose other operand is split over context alone, where the stream is split over context and tensor."""
  return x


whole_gradient.defvjp(
  lambda x, mesh: (x, None), lambda mesh, _, d_out: (layer_layout(d_out, mesh),)
)


def residual_layout(x: jax.Array, mesh: Mesh) -> jax.Array:
  """The residual stream [n, g, s, d] between layers: split over the batch, and over positions where context and tensor divide them."""
  return constrain(
    x, mesh, "batch", None, where_even(mesh, x.shape[2], "sequence", "position"), None
  )


class Qwen2(nn.Module):
  """The language model. `apply({"params": params}, tokens)` gives logits; the other methods serve sampler and trainer."""

  config: ModelConfig
  mesh: Mesh

  def setup(self):
    """Declares embedding, head, stacked layers and final norm."""
    c = self.config
    table = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "vocab_embed"))
    shape = (c.vocab_size, c.width)
    self.embedding = self.param("embedding", table, shape, DTYPES[c.param_dtype])
    self.head = None if c.tied else self.param("head", table, shape, DTYPES[c.param_dtype])
    policy = (
      jax.checkpoint_policies.save_only_these_names(SAVED) if c.remat == "attention" else None
    )
    layer = Layer if c.remat == "none" else nn.remat(Layer, prevent_cse=False, policy=policy)
    self.layers = nn.scan(
      layer,
      variable_axes={"params": 0},
      split_rngs={"params": True},
      in_axes=nn.broadcast,
      length=c.layers,
      metadata_params={nn.PARTITION_NAME: "layer"},
    )(c, self.mesh)
    self.norm = _Norm(c)

  def __call__(self, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Logits f32[b, s, v] for tokens i32[b, s]; `mask` bool[b, s] is False on padding, on either side."""
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask
    (hidden,) = self._sweep((self.embed(tokens)[:, None],), (_own_masks(mask, self.config),))
    return self.logits(hidden[:, 0])

  def completion_hidden(
    self, prompts: Prompts, completions: jax.Array, packing: Packing | None = None
  ) -> jax.Array:
    """The hidden states [n, g, t, d] that predict each token of `completions` i32[n, g, t]; [n, w, s, d] where they are packed.

    The prompt is computed once a group, all but its last token, at which each completion begins.
    """
    n, g, t = completions.shape
    last = jnp.broadcast_to(prompts.tokens[:, None, -1:], (n, g, 1))
    inputs = jnp.concatenate([last, completions[:, :, :-1]], axis=2)
    number = jnp.arange(t)
    before = prompts.mask.at[:, -1].set(False)[:, None]
    segment = None
    if packing is not None:
      inputs = packing.pack(inputs)
      number = packing.source % t
      segment = packing.segment
      before = jnp.repeat(before, most_in_row(g, inputs.shape[1]), axis=1)
    rope = rope_angles(
      prompts.lengths[:, None, None] - 1 + number,
      self.config.head_dim,
      self.config.rope_theta,
      self.config.yarn,
    )
    masks_by_stream = (
      _own_masks(prompts.mask, self.config),
      StreamMasks(rope, None, before, segment),
    )
    streams = tuple(
      look_up(self.embedding, x, self.config.compute_dtype, self.mesh)
      for x in (prompts.tokens[:, None], inputs)
    )
    return self._sweep(streams, masks_by_stream)[1]

  def embed(self, tokens: jax.Array) -> jax.Array:
    """i32[...] -> [..., d] in the compute type."""
    return self._gathered(self.embedding)[tokens]

  def final_norm(self, x: jax.Array) -> jax.Array:
    """The last RMSNorm, [..., d] -> [..., d]."""
    return self.norm(x)

  def logits(self, hidden: jax.Array) -> jax.Array:
    """[..., d] -> f32[..., v]."""
    return jnp.einsum(
      "...d,vd->...v",
      hidden,
      self._gathered(self.head_table()),
      preferred_element_type=jnp.float32,
      precision=self.config.matmul_precision,
    )

  def head_table(self) -> jax.Array:
    """The output head [v, d] as it is kept: the embedding where tied."""
    return self.embedding if self.config.tied else self.head

  def _gathered(self, table: jax.Array) -> jax.Array:
    """A [v, d] table in the compute type, whole over fsdp, still split over the vocabulary."""
    return constrain(table.astype(DTYPES[self.config.compute_dtype]), self.mesh, "vocab", None)

  def _sweep(
    self, streams: tuple[jax.Array, ...], masks_by_stream: tuple[StreamMasks, ...]
  ) -> tuple[jax.Array, ...]:
    streams, _ = self.layers(tuple(residual_layout(x, self.mesh) for x in streams), masks_by_stream)
    return tuple(self.norm(x) for x in streams)


class DecodeParams(NamedTuple):
  """Parameters in sampling layout: one tree a layer, matrices in the compute type, whole over fsdp."""

  outer: Params  # embedding, head, final norm
  layers: list[Params]
  head_transposed: (
    jax.Array | None
  )  # [d, v], the output head transposed, where the machine multiplies by it faster so (CPU); None elsewhere


def sampling_layout(model: Qwen2, params: Params) -> DecodeParams:
  """Casts, gathers over fsdp and unstacks the parameters: once a rollout, not once a token. To be jitted.

  `model` is on the sampling mesh; the parameters may lie on another of the same devices.
  """

  def place(path: tuple, x: jax.Array, sharding: NamedSharding) -> jax.Array:
    if path[-1].key != "scale":  # norms work in float32 with the master scales, as in training
      x = x.astype(DTYPES[model.config.compute_dtype])
    spec = PartitionSpec(*(None if axes and "fsdp" in axes else axes for axes in sharding.spec))
    x = jax.lax.with_sharding_constraint(
      x, sharding
    )  # onto this mesh first, where it is another: no device then holds it whole
    return jax.lax.with_sharding_constraint(x, NamedSharding(model.mesh, spec))

  params = jax.tree.map_with_path(place, params, param_shardings(model))
  outer = {name: value for name, value in params.items() if name != "layers"}
  head_transposed = None
  if model.mesh.devices.flat[0].platform == "cpu":
    head_transposed = constrain(
      model.apply({"params": outer}, method="head_table").T, model.mesh, None, "vocab"
    )
  layer = lambda i: jax.tree.map(lambda x: x[i], params["layers"])
  return DecodeParams(outer, [layer(i) for i in range(model.config.layers)], head_transposed)


def next_logits(model: Qwen2, params: DecodeParams, hidden: jax.Array) -> jax.Array:
  """The logits f32[..., v] of the next token, from normed hidden states [..., d]."""
  if params.head_transposed is None:
    return model.apply({"params": params.outer}, hidden, method="logits")
  return jnp.matmul(
    hidden,
    params.head_transposed,
    preferred_element_type=jnp.float32,
    precision=model.config.matmul_precision,
  )


def prefill(model: Qwen2, params: DecodeParams, prompts: Prompts) -> tuple[jax.Array, list[KV]]:
  """Runs each prompt once: the last position's normed hidden state [n, 1, 1, d] and every layer's keys and values."""
  x = model.apply({"params": params.outer}, prompts.tokens, method="embed")[:, None]
  masks = _own_masks(prompts.mask, model.config)
  layer = Layer(model.config, model.mesh)
  kvs = []
  for weights in params.layers:
    x, kv = layer.apply({"params": weights}, x, masks, method="read")
    kvs.append(kv)
  return model.apply({"params": params.outer}, x[:, :, -1:], method="final_norm"), kvs


def decode_step(
  model: Qwen2,
  params: DecodeParams,
  tokens: jax.Array,
  positions: jax.Array,
  attend: Callable[[int, jax.Array, KV], tuple[jax.Array, Any]],
) -> tuple[jax.Array, list[Any]]:
  """Feeds one token a row, i32[n, g], at `positions` i32[n, g].

  Args:
    attend: called as (layer, queries [n, g, h, 1, e], the new keys and values); it owns the cache and returns what the
      queries see, [n, g, h, 1, e], and whatever it wants kept.

  Returns:
    The normed hidden state [n, g, 1, d] that predicts the next token, and what was kept of each layer.
  """
  c = model.config
  x = model.apply({"params": params.outer}, tokens[:, :, None], method="embed")
  rope = rope_angles(positions[:, :, None], c.head_dim, c.rope_theta, c.yarn)
  layer = Layer(c, model.mesh)
  kept = []
  for i, weights in enumerate(params.layers):
    x, keep = layer.apply(
      {"params": weights}, x, rope, functools.partial(attend, i), method="decode"
    )
    kept.append(keep)
  return model.apply({"params": params.outer}, x, method="final_norm"), kept


def init_params(model: Qwen2, key: jax.Array) -> Params:
  """Random parameters, made where they lie: plain nested dicts of arrays, layers stacked on axis 0."""
  shardings = param_shardings(model)
  return jax.jit(lambda k: nn.unbox(_init(model, k)), out_shardings=shardings)(key)


def abstract_params(model: Qwen2) -> Params:
  """Shapes, dtypes and shardings of the parameters, with nothing allocated."""
  shapes = nn.unbox(jax.eval_shape(lambda k: _init(model, k), jax.random.key(0)))
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, param_shardings(model)
  )


def param_shardings(model: Qwen2) -> Any:
  """A `NamedSharding` for every parameter, from its axis names.

  Raises:
    UserError: an axis does not divide evenly over the mesh. Key/value heads fewer than the tensor axis are replicated.
  """
  boxed = jax.eval_shape(lambda k: _init(model, k), jax.random.key(0))

  def place(x: Any) -> NamedSharding:
    names = list(x.names)
    for i, (name, size) in enumerate(zip(names, x.value.shape, strict=True)):
      if size % axis_size(model.mesh, name):
        if name == "kv_heads":
          names[i] = None
        else:
          raise uneven(name, size, model.mesh)
    return NamedSharding(model.mesh, partition_spec(names))

  return jax.tree.map(place, boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))


def _init(model: Qwen2, key: jax.Array) -> Params:
  return model.init(key, jnp.zeros((axis_size(model.mesh, "batch"), 2), jnp.int32))["params"]


def _own_masks(mask: jax.Array, config: ModelConfig) -> StreamMasks:
  """Causal sight of one stream bool[n, s] over its real tokens, positions counted from the first of them."""
  positions = jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)[:, None]
  return StreamMasks(
    rope_angles(positions, config.head_dim, config.rope_theta, config.yarn), mask[:, None]
  )


class _Norm(nn.Module):
  """RMSNorm in float32."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    init = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
    scale = self.param("scale", init, (self.config.width,), DTYPES[self.config.param_dtype])
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + self.config.norm_eps)
    return (h * scale).astype(x.dtype)


class _Dense(nn.Module):
  """A linear map from the trailing `inputs` axes to `outputs` axes, axis names declared with the weights."""

  config: ModelConfig
  mesh: Mesh
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  axes: tuple[str, ...]
  bias: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    dtype = DTYPES[self.config.param_dtype]
    shape = self.inputs + self.outputs
    split = len(self.inputs)
    init = nn.with_logical_partitioning(nn.initializers.normal(0.02), self.axes)
    kernel = self.param("kernel", init, shape, dtype).astype(x.dtype)
    y = self._product(x, kernel, split)
    if self.name in self.config.lora.targets and self.config.lora.rank:
      lora = self.config.lora
      a = self.param(
        "lora_a",
        nn.with_logical_partitioning(_lora_init(self.inputs), (*self.axes[:split], "rank")),
        (*self.inputs, lora.rank),
        jnp.float32,
      )
      b = self.param(
        "lora_b",
        nn.with_logical_partitioning(nn.initializers.zeros, ("rank", *self.axes[split:])),
        (lora.rank, *self.outputs),
        jnp.float32,
      )
      low = self._product(x, a.astype(x.dtype), split)
      y = y + self._product(low, b.astype(x.dtype), 1) * (lora.alpha / lora.rank)
    if self.bias:
      zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[split:])
      y = y + self.param("bias", zeros, self.outputs, dtype).astype(x.dtype)
    return y

  def _product(self, x: jax.Array, kernel: jax.Array, axes: int) -> jax.Array:
    """Contracts the last `axes` axes of x with the first of the kernel."""
    multiply = _multiply if self.mesh.size > 1 else _multiply_alone
    return multiply(x, kernel, axes, self.config.matmul_precision)


def _multiply(x: jax.Array, kernel: jax.Array, axes: int, precision: str) -> jax.Array:
  return _contract(x, kernel, range(x.ndim - axes, x.ndim), range(axes), precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _multiply_alone(x: jax.Array, kernel: jax.Array, axes: int, precision: str) -> jax.Array:
  """`_multiply` on one device, its gradient in the kernel contracted as the kernel lies.

  JAX's own has the kernel's axes the other way round and turns what comes in; XLA on CPU then computes what comes in, all that is fused
  into it included, once more and column by column: three tenths of an update. Measured on one device alone, so several keep JAX's own.
  """
  return _multiply(x, kernel, axes, precision)


def _contract(x: jax.Array, y: jax.Array, of_x: range, of_y: range, precision: str) -> jax.Array:
  return jax.lax.dot_general(x, y, ((tuple(of_x), tuple(of_y)), ((), ())), precision=precision)


def _forward(
  x: jax.Array, kernel: jax.Array, axes: int, precision: str
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _multiply(x, kernel, axes, precision), (x, kernel)


def _backward(
  axes: int, precision: str, saved: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
  (x, kernel) = saved
  leading = range(saved[0].ndim - axes)
  d_x = _contract(
    d_out, kernel, range(len(leading), d_out.ndim), range(axes, kernel.ndim), precision
  )
  return d_x, _contract(x, d_out, leading, leading, precision)


_multiply_alone.defvjp(_forward, _backward)


def _lora_init(inputs: tuple[int, ...]) -> nn.initializers.Initializer:
  """Uniform within 1 / sqrt(fan in), as PEFT begins A; B begins at zero, so that the adapter begins as nothing."""
  bound = math.prod(inputs) ** -0.5
  return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)
