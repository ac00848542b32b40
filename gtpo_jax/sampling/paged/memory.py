"""How many pages of keys and values fit in the memory of a device."""

from __future__ import annotations

from gtpo_jax.models.config import DTYPES
from gtpo_jax.models.delta.rule import rule_bytes
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import axis_size, batch_shards, bytes_per_device
from gtpo_jax.sampling.cache import head_axis
from gtpo_jax.sampling.paged.cache import PagedCache
from gtpo_jax.sampling.paged.pool import PoolSizes
from gtpo_jax.sampling.prefill.batches import PREFILL_TOKENS
from gtpo_jax.sampling.programs import abstract

# Copies of a chunk's logits in float32 that a decode program has at once: the logits, their
# exponentials, and the cumulative sums of a draw.
LOGITS_COPIES = 4


def page_bytes(cache: PagedCache) -> int:
  """Returns the bytes of one page of all layers on one device."""
  shards = batch_shards(cache.model.mesh)
  kv = abstract(cache.model, lambda: cache.zeros(shards), "batch", head_axis(cache.model))
  return bytes_per_device(kv)


def temporary_bytes(model: Transformer, slots: int, sizes: PoolSizes) -> int:
  """Estimates the most bytes on one device of the temporaries of a decode or prefill program.

  Decoding has the chunk's keys and values, the old and the new content of the pages that it is
  written to, and the logits; a prefill has the activations of its tokens in one layer. Neither
  depends on the number of pages. The compiler needs less if it writes one layer after another.

  Args:
    model: the architecture, on the sampling mesh.
    slots: per shard.
    sizes: of the pool.
  """
  c = model.config
  itemsize = DTYPES[c.compute_dtype](0).itemsize
  heads = axis_size(model.mesh, "heads")
  kv_heads = c.kv_heads // heads if c.kv_heads % heads == 0 else c.kv_heads
  position = 2 * len(c.attention_kinds) * kv_heads * c.head_dim * itemsize
  logits = 4 * slots * c.vocab_size // axis_size(model.mesh, "vocab")
  written = 2 * sizes.touched * sizes.page
  decode = slots * position * (sizes.chunk + written) + LOGITS_COPIES * logits
  features = 2 * c.active_mlp + 2 * (c.heads + 2 * c.kv_heads) * c.head_dim
  residual = 4 * c.width
  if c.mixture:  # each expert of a token reads a row of its own, and returns one
    residual += 2 * c.mixture.per_token * c.width
  tokens = max(PREFILL_TOKENS, sizes.prompt_pages * sizes.page)
  rule = rule_bytes(c.delta) // heads if c.delta else 0
  prefill = tokens * (itemsize * (features // heads + residual) + rule)
  return max(decode, prefill)
