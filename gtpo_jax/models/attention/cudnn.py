"""Attention over full sequences with cuDNN's flash kernel, on GPU.

cuDNN treats a mask as a bias of [s, s], but skips the padding of rows whose lengths it knows. Each
completion therefore gets a row of its own (`own_rows.py`): causal masking, a window and a length
per row then suffice.
"""

from __future__ import annotations

import jax

from gtpo_jax.models.attention.own_rows import in_own_rows
from gtpo_jax.models.attention.sources import AttentionContext

# Rows are padded to a multiple of this many positions. The kernel refuses odd lengths in training,
# and computes tiles of at least 64 positions in any case.
ROW_MULTIPLE = 64


def attend_with_cudnn(
  q: jax.Array, context: AttentionContext, implementation: str = "cudnn", window: int | None = None
) -> jax.Array:
  """Softmax attention of `q` over `context`, in 16 bits.

  Args:
    q: [n, w, h, s, e].
    context: the keys, values and masks.
    implementation: passed to `jax.nn.dot_product_attention`.
    window: the most positions that a query attends to, its own included; None for all.

  Returns:
    [n, w, h, s, e] in q's dtype; 0 on padding.
  """
  own = in_own_rows(q, context, ROW_MULTIPLE)
  rows = lambda x: x.reshape(-1, *x.shape[2:])
  lengths = own.lengths.reshape(-1)
  attended = jax.nn.dot_product_attention(
    rows(own.queries),
    rows(own.keys),
    rows(own.values),
    is_causal=True,
    query_seq_lengths=lengths,
    key_value_seq_lengths=lengths,
    local_window_size=(window - 1, 0) if window else None,
    implementation=implementation,
  )
  return own.move_back(attended)
