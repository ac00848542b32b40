"""A decoder-only transformer in Flax Linen: one layer's code for training, prefill and decoding.

Parameters are stacked over layers and have named axes. A *stream* is one batch of sequences
[n, g, s, d] that a forward pass runs through the layers. There are one or two: the prompts (g = 1)
and the completions, which attend to the keys and values of their prompt. The same pass computes
these once per group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from gtpo_jax.arrays import Packing, Prompts, conversation_numbers, max_per_row
from gtpo_jax.models.attention.flash import ATTENTION_RESIDUALS
from gtpo_jax.models.attention.layer import Attention
from gtpo_jax.models.attention.sources import RowRanges
from gtpo_jax.models.attention.streams import StreamMasks, ropes_at, stream_masks
from gtpo_jax.models.config import DTYPES, EXPERTS, ModelConfig
from gtpo_jax.models.declaration import declare
from gtpo_jax.models.delta.layer import GatedDeltaNet
from gtpo_jax.models.embedding import embedding_lookup
from gtpo_jax.models.experts.module import Experts
from gtpo_jax.models.experts.routing import (
  RecordedRoutes,
  RouterStatistics,
  Routing,
  routes_of_inputs,
)
from gtpo_jax.models.kinds import ATTENTION, DELTA, LayerKind, Stack
from gtpo_jax.models.layers import (
  MATRIX_INIT,
  Dense,
  RMSNorm,
  gated,
  layer_layout,
  layer_layout_of_gradient,
  normalised,
  residual_layout,
)
from gtpo_jax.models.number_formats import einsum
from gtpo_jax.runtime.mesh import constrain, divisible_axis


def _is_attention(primitive: Any, *arrays: Any, **settings: Any) -> bool:
  """Whether the backward pass of attention reads an operation's results.

  The kernels of this package and splash name them; cuDNN's is a primitive of its own.
  """
  named = jax.checkpoint_policies.save_only_these_names(ATTENTION_RESIDUALS)
  is_cudnn = "dot_product_attention_fwd" in primitive.name
  return is_cudnn or named(primitive, *arrays, **settings)


MIXERS = {ATTENTION: Attention, DELTA: GatedDeltaNet}
ACTIVATIONS = {"silu": nn.silu, "gelu_pytorch_tanh": functools.partial(nn.gelu, approximate=True)}
# Which results a layer keeps for the backward pass, by `ModelConfig.remat`.
REMAT_POLICIES = {
  "full": None,
  "attention": _is_attention,
  "products": jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _is_attention
  ),
}


def _ranges(packing: Packing, t: int) -> RowRanges:
  """Returns where `packing` places completions of up to `t` positions, or their conversations."""
  owner = packing.source // t
  start = packing.start
  if packing.begins is not None:
    owner = owner * packing.conversations + packing.pack(conversation_numbers(packing.begins, t))
    start = (start[..., None] + packing.begins).reshape(len(start), -1)
  owner = jnp.where(packing.source < 0, -1, owner)
  owners = jnp.arange(start.shape[1])[:, None, None]
  length = (owner[:, None] == owners).sum((2, 3), dtype=jnp.int32)
  return RowRanges(start, length, owner)


class Layer(nn.Module):
  """One transformer block: a mixer of positions and an MLP, with norms before or after.

  The MLP is gated, or a mixture of experts.
  """

  config: ModelConfig
  mesh: Mesh
  kind: LayerKind = LayerKind()

  def setup(self):
    """Declares the layer's parameters with the names of their axes."""
    c = self.config
    dense = lambda name, inputs, outputs, axes: Dense(
      c, self.mesh, inputs, outputs, axes, bias=name in c.biases
    )
    norm = lambda used: RMSNorm(c, (c.width,)) if used else None
    self.attention_norm = norm(c.family.pre_norms)
    self.mixer = MIXERS[self.kind.mixer](c, self.mesh, self.kind)
    nn.share_scope(self, self.mixer)  # its parameters have the layer's names
    self.attention_post_norm = norm(c.family.post_norms)
    self.mlp_norm = norm(c.family.pre_norms)
    self.mlp_post_norm = norm(c.family.post_norms)
    self.experts = None
    if self.kind.mlp == EXPERTS:
      self.experts = Experts(c, self.mesh, ACTIVATIONS[c.family.activation])
      return
    self.gate = dense("gate", (c.width,), (c.mlp,), ("embed", "mlp"))
    self.up = dense("up", (c.width,), (c.mlp,), ("embed", "mlp"))
    self.down = dense("down", (c.mlp,), (c.width,), ("mlp", "embed"))

  def __call__(
    self,
    streams: tuple[jax.Array, ...],
    masks_by_stream: tuple[StreamMasks, ...],
    routes: RecordedRoutes | None = None,
  ) -> tuple[tuple[jax.Array, ...], RouterStatistics | None]:
    """Runs the layer over streams [n, g, s, d]; those after the first continue the first.

    Args:
      streams: the prompts, and then the completions.
      masks_by_stream: of each stream.
      routes: the choices that were recorded of this layer; None for a dense layer, or if nothing
        was recorded.

    Returns:
      The streams, and the statistics of the last one's router; None for a dense layer.
    """
    recorded = (None,) * len(streams) if routes is None else routes.ids
    shares = None if routes is None else routes.shares
    mixed, prompt = self.mixer(self._input(streams[0]), masks_by_stream[0], len(streams) > 1)
    x, routing = self._finish(streams[0], mixed, recorded[0], shares)
    out = [x]
    for x, masks, ids in zip(streams[1:], masks_by_stream[1:], recorded[1:], strict=True):
      mixed = self.mixer.continue_from(self._input(x), masks, prompt)
      x, routing = self._finish(x, mixed, ids, shares)
      out.append(x)
    return tuple(out), None if routing is None else routing.statistics

  def prefill(self, x: jax.Array, masks: StreamMasks) -> tuple[jax.Array, Any, jax.Array | None]:
    """Runs the layer over one stream [n, g, s, d].

    Returns:
      The stream, the mixer's memory of it, and the chosen experts i32[n, g, s, k]; None for a
      dense layer.
    """
    mixed, kept = self.mixer(self._input(x), masks)
    x, routing = self._finish(x, mixed)
    return x, kept, None if routing is None else routing.ids

  def decode(self, x: jax.Array, past: Any) -> tuple[jax.Array, Any, jax.Array | None]:
    """Runs the layer over one new position [n, g, 1, d].

    Args:
      x: the residual stream.
      past: how the mixer reads the positions before; for attention, an `Attend`.

    Returns:
      The position, the mixer's memory of it, and the chosen experts as in `prefill`.
    """
    mixed, kept = self.mixer.step(self._input(x), past)
    x, routing = self._finish(x, mixed)
    return x, kept, None if routing is None else routing.ids

  def _input(self, x: jax.Array) -> jax.Array:
    return layer_layout(normalised(self.attention_norm, x), self.mesh)

  def _finish(
    self,
    x: jax.Array,
    mixed: jax.Array,
    recorded: jax.Array | None = None,
    shares: jax.Array | None = None,
  ) -> tuple[jax.Array, Routing | None]:
    """Adds the mixer's output and then the MLP's to the residual stream.

    Returns:
      The stream, and the routing; None for a dense layer. `recorded` and `shares` are as in
      `route`.
    """
    output = normalised(self.attention_post_norm, mixed)
    x = residual_layout(x + layer_layout_of_gradient(output, self.mesh), self.mesh)
    h = layer_layout(normalised(self.mlp_norm, x), self.mesh)
    output, routing = self._mlp(h, recorded, shares)
    output = normalised(self.mlp_post_norm, output)
    return residual_layout(x + layer_layout_of_gradient(output, self.mesh), self.mesh), routing

  def _mlp(
    self, h: jax.Array, recorded: jax.Array | None, shares: jax.Array | None
  ) -> tuple[jax.Array, Routing | None]:
    """Returns the output of the MLP, and its routing."""
    if self.experts is not None:
      return self.experts(h, recorded, shares)
    hidden = gated(ACTIVATIONS[self.config.family.activation], self.gate(h), self.up(h))
    positions = divisible_axis(self.mesh, h.shape[2], "position")
    hidden = constrain(hidden, self.mesh, "batch", None, positions, "mlp")  # the gradient too
    return self.down(hidden), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recomputed(layer: Layer, weights: Any, *inputs: Any) -> Any:
  """Runs a layer whose backward pass recomputes it, once the gradient of its results is there.

  `jax.checkpoint` does not order the two outside of loops, and XLA would recompute many layers, or
  convert their quantised matrices, before it needs them.
  """
  weights, inputs = jax.lax.optimization_barrier((weights, inputs))
  return layer.apply({"params": weights}, *inputs)


def _recompute(layer: Layer, kept: Any, d_results: Any) -> Any:
  kept, d_results = jax.lax.optimization_barrier((kept, d_results))
  _, gradients = jax.vjp(lambda weights, *inputs: layer.apply({"params": weights}, *inputs), *kept)
  return gradients(d_results)


_recomputed.defvjp(lambda layer, *kept: (_recomputed(layer, *kept), kept), _recompute)


class Repetition(nn.Module):
  """The layers of one repetition of a pattern."""

  config: ModelConfig
  mesh: Mesh
  layer: Callable[..., nn.Module]  # `Layer`, or the same with remat
  kinds: tuple[LayerKind, ...]  # of the layers

  def setup(self):
    """Declares the layers."""
    self.place = [self.layer(self.config, self.mesh, kind) for kind in self.kinds]

  def __call__(
    self,
    streams: tuple[jax.Array, ...],
    masks_by_stream: tuple[StreamMasks, ...],
    routes: tuple[RecordedRoutes | None, ...] | None = None,
  ) -> tuple[tuple[jax.Array, ...], tuple[RouterStatistics | None, ...]]:
    """Runs the layers over streams, one after another; see `Layer`."""
    statistics = []
    for layer, recorded in zip(self.place, routes or (None,) * len(self.place), strict=True):
      streams, of_layer = layer(streams, masks_by_stream, recorded)
      statistics.append(of_layer)
    return streams, tuple(statistics)


class Transformer(nn.Module):
  """The language model.

  `apply({"params": params}, tokens)` returns logits. The other methods are for the sampler and the
  trainer.
  """

  config: ModelConfig  # the architecture
  mesh: Mesh  # the devices that parameters and activations are split over

  def setup(self):
    """Declares the embedding, the head, the stacked layers and the final norm."""
    c = self.config
    table = lambda name: declare(
      self,
      name,
      MATRIX_INIT,
      (c.vocab_size, c.width),
      ("vocab", "vocab_embed"),
      DTYPES[c.param_dtype],
    )
    self.embedding = table("embedding")
    self.head = None if c.tied else table("head")
    for stack in c.stacks:
      setattr(self, stack.name, self._stack(stack))
    self.norm = RMSNorm(c, (c.width,))

  def _stack(self, stack: Stack) -> nn.Module:
    """Returns a loop over the repetitions of a stack of layers."""
    c = self.config
    layer = Layer
    if c.remat != "none":
      # A single repetition is no loop, so the compiler could take forward for recomputed values.
      is_loop = stack.repetitions > 1 or c.layers == 1
      layer = nn.remat(Layer, prevent_cse=not is_loop, policy=REMAT_POLICIES[c.remat])
    scan = functools.partial(
      nn.scan,
      variable_axes={"params": 0},
      split_rngs={"params": True},
      in_axes=(nn.broadcast, 0),
      length=stack.repetitions,
      unroll=stack.repetitions if c.remat == "none" else 1,
      metadata_params={nn.PARTITION_NAME: "layer"},
    )
    if len(stack.kinds) == 1:
      return scan(layer)(c, self.mesh, *stack.kinds)
    return scan(Repetition)(c, self.mesh, layer, stack.kinds)

  def __call__(self, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Returns logits f32[b, s, v] for `tokens` i32[b, s].

    Args:
      tokens: padded on the left or on the right.
      mask: bool[b, s], False on padding; None if there is no padding.
    """
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask
    streams = (self.embed(tokens)[:, None],)
    (hidden,), _ = self._run_layers(streams, (stream_masks(mask, self.config),))
    return self.logits(hidden[:, 0])

  def completion_hidden(
    self, prompts: Prompts, completions: jax.Array, packing: Packing | None = None
  ) -> jax.Array:
    """Returns the hidden states that predict each token of `completions` i32[n, g, t].

    Each prompt is computed once per group. Its last token is the first input of each completion,
    or of each of its conversations.

    Returns:
      [n, g, t, d], or [n, w, s, d] with a `packing`.
    """
    return self.completion_states(prompts, completions, packing)[0]

  def completion_states(
    self,
    prompts: Prompts,
    completions: jax.Array,
    packing: Packing | None = None,
    routes: jax.Array | None = None,
    shares: jax.Array | None = None,
  ) -> tuple[jax.Array, RouterStatistics | None]:
    """Returns `completion_hidden`, and the statistics of the routers that computed it.

    Args:
      prompts, completions, packing: as there.
      routes: `Rollouts.routes`; None if nothing was recorded.
      shares: as in `RecordedRoutes`.

    Returns:
      The hidden states, and statistics of their shape without the axis d; None without experts.
    """
    c = self.config
    n, g, t = completions.shape
    last = jnp.broadcast_to(prompts.tokens[:, None, -1:], (n, g, 1))
    inputs = jnp.concatenate([last, completions[:, :, :-1]], axis=2)
    offset = jnp.arange(t)
    within = None if packing is None else packing.places(t)
    if within is not None:
      offset = within
      inputs = jnp.where(offset == 0, last, inputs)
    if routes is not None:
      routes = routes_of_inputs(prompts.routes, routes, within)
      routes = routes if packing is None else packing.pack(routes)
    prompt_mask = prompts.mask.at[:, -1].set(False)[:, None]
    segment = None
    ranges = None
    if packing is not None:
      inputs = packing.pack(inputs)
      offset = packing.source % t if within is None else packing.pack(offset)
      segment = packing.segment
      ranges = _ranges(packing, t)
      segments = max_per_row(g, inputs.shape[1]) * packing.conversations
      prompt_mask = jnp.repeat(prompt_mask, segments, axis=1)
    positions = prompts.lengths[:, None, None] - 1 + offset
    needs_places = any(kind.window or kind.mixer == DELTA for kind in c.kinds)
    places = None
    if packing is not None and needs_places:
      places = jnp.broadcast_to(offset, inputs.shape)
    ropes = ropes_at(positions, c)
    masks = StreamMasks(ropes, None, prompt_mask, segment, ranges, places)
    masks_by_stream = (stream_masks(prompts.mask, c), masks)
    streams = tuple(
      self._scaled(embedding_lookup(self.embedding, x, c.compute_dtype, self.mesh))
      for x in (prompts.tokens[:, None], inputs)
    )
    recorded = None
    if routes is not None:
      recorded = RecordedRoutes((prompts.routes[:, None], routes), shares)
    outputs, statistics = self._run_layers(streams, masks_by_stream, recorded)
    return outputs[1], statistics

  def embed(self, tokens: jax.Array) -> jax.Array:
    """Returns the embeddings [..., d] of `tokens` i32[...] in the compute dtype."""
    return self._scaled(self._gather_features(self.embedding)[tokens])

  def _scaled(self, embeddings: jax.Array) -> jax.Array:
    """Multiplies embeddings [..., d] by the square root of d, if the family does."""
    if not self.config.family.scaled_embedding:
      return embeddings
    return embeddings * jnp.asarray(self.config.width**0.5, embeddings.dtype)

  def final_norm(self, x: jax.Array) -> jax.Array:
    """Applies the last RMSNorm, [..., d] -> [..., d]."""
    return self.norm(x)

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Returns logits f32[..., v] from final-norm hidden states [..., d]."""
    head = self._gather_features(self.head_table())
    return einsum("...d,vd->...v", hidden, head, self.config.matmul_precision)

  def head_table(self) -> jax.Array:
    """Returns the output head [v, d] in its stored dtype; it is the embedding if tied."""
    return self.embedding if self.config.tied else self.head

  def _gather_features(self, table: jax.Array) -> jax.Array:
    """Casts a table [v, d] to the compute dtype and gathers its features over fsdp."""
    return constrain(table.astype(DTYPES[self.config.compute_dtype]), self.mesh, "vocab", None)

  def _run_layers(
    self,
    streams: tuple[jax.Array, ...],
    masks_by_stream: tuple[StreamMasks, ...],
    routes: RecordedRoutes | None = None,
  ) -> tuple[tuple[jax.Array, ...], RouterStatistics | None]:
    """Runs all layers and the final norm; also returns the statistics of all routers."""
    streams = tuple(residual_layout(x, self.mesh) for x in streams)
    statistics = []
    first = 0  # of the stack's layers
    for stack in self.config.stacks:
      recorded = None if routes is None else self._of_stack(routes, stack, first)
      if self.config.apart and self.config.remat == "full" and not self.is_initializing():
        of_layer = (self.variables["params"][stack.name], recorded)
        weights, recorded = jax.tree.map(lambda x: x[0], of_layer)
        layer = Layer(self.config, self.mesh, *stack.kinds, parent=None)
        streams, of_stack = _recomputed(layer, weights, streams, masks_by_stream, recorded)
        of_stack = jax.tree.map(lambda x: x[None], of_stack)
      else:
        streams, of_stack = getattr(self, stack.name)(streams, masks_by_stream, recorded)
      statistics += jax.tree.leaves(of_stack, is_leaf=lambda x: isinstance(x, RouterStatistics))
      first += stack.repetitions * len(stack.kinds)
    of_routers = RouterStatistics.of_layers(statistics) if statistics else None
    return tuple(self.norm(x) for x in streams), of_routers

  def _of_stack(self, routes: RecordedRoutes, stack: Stack, first: int) -> Any:
    """Returns the recorded choices of a stack whose first layer is `first`, for its `__call__`."""
    numbers = {layer: i for i, layer in enumerate(self.config.expert_layers)}
    step = len(stack.kinds)
    places = [
      routes.of_layers(
        np.asarray([numbers[first + i * step + place] for i in range(stack.repetitions)])
      )
      if kind.mlp == EXPERTS
      else None
      for place, kind in enumerate(stack.kinds)
    ]
    return places[0] if step == 1 else tuple(places)
