"""Layers that attend to a window: every path equals a loop over queries and keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of
from test_causal import E, in_two_segments, inputs, value_and_gradient

from gtpo_jax.models import PRESETS
from gtpo_jax.models.attention.causal import attend_causally
from gtpo_jax.models.attention.flash import attend_in_blocks
from gtpo_jax.models.attention.kernels import attend_with_cudnn, attend_with_splash

KERNELS = {
  "blocks": functools.partial(attend_in_blocks, precision="highest"),
  "splash": functools.partial(attend_with_splash, interpret=True),
  "cudnn": functools.partial(attend_with_cudnn, implementation="xla"),
}
MAKERS = {
  "prompt": functools.partial(inputs, prompt=False),
  "completions": inputs,
  "packed": in_two_segments,
}


@functools.cache
def case(make):
  """Queries and their context; packed completions have places of their own."""
  q, context = MAKERS[make]()
  if context.segment is None:
    return q, context
  index = np.broadcast_to(np.arange(q.shape[3]), context.segment.shape)
  start = np.asarray(context.ranges.start) % q.shape[3]
  owner = np.asarray(context.ranges.owner)
  of_owner = np.stack([row_start[row] for row_start, row in zip(start, owner, strict=True)])
  return q, context._replace(places=jnp.asarray(index - of_owner))


def by_loop(q, context, window):
  """Attention of each query over the keys that a loop finds within its window, in float64."""
  n, g, h, s, _ = q.shape
  place = np.broadcast_to(np.arange(s), (n, g, s))
  place = place if context.places is None else np.asarray(context.places)
  segment = np.zeros((n, g, s), int) if context.segment is None else np.asarray(context.segment)
  real = np.ones((n, 1, s), bool) if context.own_mask is None else np.asarray(context.own_mask)
  real = np.broadcast_to(real, (n, g, s))
  arrays = [np.asarray(x, np.float64) for x in (q, context.own.k, context.own.v)]
  queries, own_k, own_v = arrays
  out = np.zeros(q.shape)
  for i, j, t in np.ndindex(n, g, s):
    keys = [
      (own_k[i, j, :, :, u], own_v[i, j, :, u])
      for u in range(t + 1)
      if t - u < window and real[i, j, u] and segment[i, j, u] == segment[i, j, t]
    ]
    if context.prompt is not None and segment[i, j, t] < context.prompt_mask.shape[1]:
      k, v = (np.asarray(x, np.float64)[i, 0] for x in (context.prompt.k, context.prompt.v))
      last = v.shape[1] - 1
      mask = np.asarray(context.prompt_mask)[i, segment[i, j, t]]
      keys += [
        (k[..., u], v[:, u]) for u in range(last) if mask[u] and last + place[i, j, t] - u < window
      ]
    if not keys:
      continue
    k, v = (np.repeat(np.stack(x, 1), h // len(x[0]), 0) for x in zip(*keys, strict=True))
    scores = np.einsum("he,hke->hk", queries[i, j, :, t], k) / E**0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    out[i, j, :, t] = np.einsum("hk,hke->he", weights / weights.sum(1, keepdims=True), v)
  return out


def is_real(context):
  if context.segment is not None:
    return np.asarray(context.segment < 2)
  return True if context.own_mask is None else np.asarray(context.own_mask)


@functools.cache
def reference(make, window):
  """The loop's outputs, and the outputs and gradients of `full_softmax`, which must equal them."""
  q, context = case(make)
  return by_loop(q, context, window), value_and_gradient(full_softmax(window), q, context)


def full_softmax(window):
  """Attention from all scores at once, with a window."""

  def attend(q, context):
    _, g, h, s, e = q.shape
    k, v, segment = context.concatenate(g)
    k, v = (jnp.repeat(x, h // x.shape[2], axis=2) for x in (k, v))
    before = k.shape[3] - s
    place = jnp.broadcast_to(jnp.arange(s), (*segment.shape[:2], s))
    place = place if context.places is None else context.places
    copies = 0 if context.prompt is None else before // (context.prompt.v.shape[3] - 1)
    of_prompt = jnp.tile(jnp.arange(-(before // max(copies, 1)), 0), copies)
    distance = jnp.concatenate(
      [
        place[..., None] - of_prompt,
        jnp.broadcast_to(jnp.arange(s)[:, None] - jnp.arange(s), (*place.shape, s)),
      ],
      -1,
    )
    visible = (distance >= 0) & (distance < window)
    visible &= (segment[:, :, None] == segment[..., -s:, None]) & (segment > 0)[:, :, None]
    scores = jnp.einsum("nghse,nghte->nghst", q, k, precision="highest") / e**0.5
    weights = jax.nn.softmax(jnp.where(visible[:, :, None], scores, -1e30))
    return jnp.einsum("nghst,nghte->nghse", weights, v, precision="highest")

  return attend


@pytest.mark.parametrize("window", [1, 13, 70, 400])  # the prompts have 15 and 20 positions
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.some(6)
def test_every_kernel_equals_the_loop_in_value_and_gradient(kernel, make, window):
  q, context = case(make)
  out, want = reference(make, window)
  got = value_and_gradient(functools.partial(KERNELS[kernel], window=window), q, context)
  keep = np.broadcast_to(is_real(context), (*q.shape[:2], q.shape[3]))
  for x in (got[0], want[0]):
    x, y = (np.moveaxis(np.asarray(x), 2, 3)[keep] for x in (x, out))
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)
  for x, y in zip(got[1:], want[1:], strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=3e-5)


@pytest.mark.devices
@pytest.mark.parametrize("make", ["completions", "packed"])
@pytest.mark.parametrize("kind", ["blocks", "splash"])
@pytest.mark.some(0)
def test_windows_where_positions_are_on_a_mesh(kind, make):
  precision = "highest" if kind == "blocks" else "default"
  config = dataclasses.replace(PRESETS["tiny"], attention=kind, matmul_precision=precision)
  q, context = case(make)
  attend = functools.partial(attend_causally, config, mesh_of(1, 1, 3, 2), window=13)
  got = value_and_gradient(attend, q, context)
  for x, y in zip(got, reference(make, 13)[1], strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=3e-5)
