"""The gated delta rule (2412.06464): a memory S per head that decays and is corrected.

At each position, with alpha = exp(log_decay) and unit keys (equation 10 there, transposed):

  S <- alpha S + beta k (v - alpha S^T k)^T,    output = S^T q

In chunks (2406.06484, section 3.2) the corrections of a chunk follow from a triangular system, so
that matrix products do all of the work. All of it is float32.

In shapes, e is the number of features of a key, and f of a value.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.models.kinds import DeltaSizes

CHUNK = 64
BLOCK = 16  # rows of the largest matrix that is inverted by products of its full size
# Arrays of the size of keys or values, and of [chunk, chunk], that the compiler keeps at once.
VECTORS = 8
SQUARES = 4


def chunked_delta_rule(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
  initial: jax.Array | None = None,
  begins: jax.Array | None = None,
  precision: str = "highest",
) -> tuple[jax.Array, jax.Array]:
  """Runs the rule over sequences, or over the segments that share a row.

  Args:
    q, k: f32[n, g, h, s, e].
    v: f32[n, g, h, s, f].
    log_decay: f32[n, g, h, s], at most 0.
    beta: f32[n, g, h, s], how much of the error is corrected.
    initial: the memory before the first position, f32[n, g | 1, h, e, f]; None for zeros.
    begins: bool[n, g, s], the positions before which the memory is `initial` again. None if there
      are none but the first.
    precision: of the products.

  Returns:
    The outputs f32[n, g, h, s, f], and the memory after the last position f32[n, g, h, e, f].
  """
  n, g, h, s, e = q.shape
  f = v.shape[-1]
  product = functools.partial(jnp.einsum, precision=precision)
  chunk = min(CHUNK, s)
  split = lambda x: _in_chunks(x, 3, chunk)
  q, k, v, log_decay, beta = map(split, (q, k, v, log_decay, beta))
  same = jnp.tril(jnp.ones((chunk, chunk), bool))
  if begins is not None:
    # i32[n, g, 1, chunks, c]: 0 up to the first segment that begins in the chunk
    run = jnp.cumsum(_in_chunks(begins, 2, chunk)[:, :, None], -1)
    same &= run[..., :, None] == run[..., None, :]
  # The logarithm of all decays since the beginning of the chunk, or of a segment within it.
  decay = jnp.einsum("...ij,...j->...i", same.astype(jnp.float32), log_decay, precision="highest")
  between = jnp.exp(jnp.where(same, decay[..., :, None] - decay[..., None, :], -jnp.inf))
  decayed = jnp.exp(decay)[..., None]
  scaled = beta[..., None] * k
  system = product("...ie,...je->...ij", scaled, k) * between
  sides = jnp.concatenate([beta[..., None] * v, scaled * decayed], -1)
  solved = _solve(system, sides, precision)
  values, reads = jnp.split(solved, [f], -1)  # corrections if the memory were 0; what they read
  queries = q * decayed
  # Towards the end of the chunk: what is left of each correction, and of the memory before it.
  last = decay[..., -1:]
  left = jnp.exp(jnp.where(same[..., -1, :], last - decay, -jnp.inf))
  kept = jnp.exp(last)[..., None]
  added = 0.0
  restarts = jnp.zeros((), bool)
  start = jnp.zeros((n, 1, h, e, f)) if initial is None else initial
  if begins is not None:
    later = (run > 0)[..., None]  # these read `initial`, the others what the last chunk has left
    if initial is not None:
      from_start = jnp.where(later, jnp.concatenate([reads, queries], -1), 0.0)
      from_reads, from_queries = jnp.split(from_start, 2, -1)
      shared = start.shape[1] == 1
      memory = start[:, 0] if shared else start
      at_start = functools.partial(product, f"nghcie,{'nhef' if shared else 'nghef'}->nghcif")
      values -= at_start(from_reads, memory)
      added = at_start(from_queries, memory)
    reads, queries = (jnp.where(later, 0.0, x) for x in (reads, queries))
    restarts = later[..., -1:, :]

  def advance(memory: jax.Array, chunk: tuple) -> tuple[jax.Array, tuple]:
    values, reads, k, kept, restarts = chunk
    corrections = values - product("...ie,...ef->...if", reads, memory)
    before = jnp.where(restarts, start, memory)
    after = kept * before + product("...ie,...if->...ef", k, corrections)
    return after, (memory, corrections)

  chunks = q.shape[3]
  restarts = jnp.broadcast_to(restarts, (n, g, 1, chunks, 1, 1))
  parts = (values, reads, k * left[..., None], kept, restarts)
  memory = jnp.broadcast_to(start, (n, g, h, e, f))
  final, (memories, corrections) = jax.lax.scan(
    advance, memory, tuple(jnp.moveaxis(x, 3, 0) for x in parts)
  )
  memories, corrections = (jnp.moveaxis(x, 0, 3) for x in (memories, corrections))
  within = product("...ie,...je->...ij", q, k) * between
  out = product("...ie,...ef->...if", queries, memories)
  out += product("...ij,...jf->...if", within, corrections) + added
  return out.reshape(n, g, h, -1, f)[:, :, :, :s], final


def rule_flops(sizes: DeltaSizes) -> int:
  """Returns the FLOP of the products of the chunked rule for one position of a layer."""
  e, f = sizes.key_dim, sizes.value_dim
  of_memory = 3 * e * f
  of_chunk = CHUNK * (2 * e + f + (e + f))
  of_blocks = 2 * (BLOCK.bit_length() - 1) * BLOCK**2
  of_inverse = of_blocks + (CHUNK**2 - BLOCK**2) // 3
  return 2 * sizes.value_heads * (of_memory + of_chunk + of_inverse)


def rule_bytes(sizes: DeltaSizes) -> int:
  """Estimates the bytes of the temporaries of the chunked rule for one position of a layer."""
  e, f = sizes.key_dim, sizes.value_dim
  numbers = VECTORS * max(e, f) + SQUARES * CHUNK + 2 * e * f // CHUNK
  return 4 * sizes.value_heads * numbers


def delta_step(
  q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Runs the rule over one position.

  The memory is read once for both products with it.

  Args:
    q, k: f32[..., e].
    v: f32[..., f].
    log_decay, beta: f32[...].
    memory: f32[..., e, f].

  Returns:
    The output f32[..., f], and the new memory.
  """
  decay = jnp.exp(log_decay)[..., None]
  recall = lambda x: decay * (memory * x[..., None]).sum(-2)
  correction = beta[..., None] * (v - recall(k))
  out = recall(q) + (q * k).sum(-1, keepdims=True) * correction
  return out, decay[..., None] * memory + k[..., None] * correction[..., None, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _solve(system: jax.Array, sides: jax.Array, precision: str) -> jax.Array:
  """Solves unit lower triangular systems by products with their inverses.

  Two of JAX's triangular solves that a program runs at once on a CPU can wait for each other
  forever (jaxlib 0.10.2: each occupies a thread of XLA's pool while it waits for others).

  Args:
    system: f32[..., c, c]; only read below the diagonal.
    sides: f32[..., c, m].
    precision: of the products, except in the inverse.
  """
  return _solved(system, sides, precision)[0]


def _solved(
  system: jax.Array, sides: jax.Array, precision: str
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  inverse = _inverse(system)
  solved = jnp.einsum("...ij,...jm->...im", inverse, sides, precision=precision)
  return solved, (inverse, solved)


def _gradients(
  precision: str, saved: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
  inverse, solved = saved
  d_sides = jnp.einsum("...ji,...jm->...im", inverse, d_out, precision=precision)
  d_system = -jnp.einsum("...im,...jm->...ij", d_sides, solved, precision=precision)
  return jnp.tril(d_system, -1), d_sides


_solve.defvjp(_solved, _gradients)


def _inverse(system: jax.Array) -> jax.Array:
  """Returns the inverses of unit lower triangular matrices f32[..., c, c].

  The inverses of the blocks on the diagonal give the inverses of blocks twice as large:
  [[A, 0], [C, B]]' = [[A', 0], [-B' C A', B']]. Powers of a matrix, whose sum it is too, may be
  larger than the sum by many orders of magnitude. Larger matrices than BLOCK are halved; within
  smaller ones, all blocks of a size are in one product.
  """
  c = system.shape[-1]
  product = functools.partial(jnp.einsum, "...ij,...jk->...ik", precision="highest")
  half = c // 2
  if c > BLOCK and c % 2 == 0:
    first, second = _inverse(jnp.stack([system[..., :half, :half], system[..., half:, half:]]))
    left = jnp.concatenate([first, -product(product(second, system[..., half:, :half]), first)], -2)
    right = jnp.concatenate([jnp.zeros_like(second), second], -2)
    return jnp.concatenate([left, right], -1)
  row, column = np.indices((c, c))
  inverse = jnp.eye(c)
  size = 1
  while size < c:
    is_pair = row // (2 * size) == column // (2 * size)
    below = np.where(is_pair & (row // size > column // size), 1.0, 0.0).astype(np.float32)
    inverse = inverse - product(product(inverse, system * below), inverse)
    size *= 2
  return jnp.broadcast_to(inverse, system.shape)


def _in_chunks(x: jax.Array, axis: int, chunk: int) -> jax.Array:
  """Splits an axis of `x` into [chunks, chunk], with zeros at the end."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, -x.shape[axis] % chunk)
  x = jnp.pad(x, widths)
  return x.reshape(*x.shape[:axis], -1, chunk, *x.shape[axis + 1 :])
