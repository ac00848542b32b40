"""Keys and values in pages, and the tables that say which slots read and write which pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from gtpo_jax.models.attention.rope import Rope
from gtpo_jax.models.attention.sources import KV


class Pages(NamedTuple):
  """The keys and values of one layer, in pages of equal size.

  Keys and values are side by side, so that a page is contiguous and a head of 64 features fills a
  TPU vector register.
  """

  kv: jax.Array  # [pages, k, page, 2e]: e features of the key, then e of the value
  scale: jax.Array | None  # f32[pages, k, 2, page], scales of int8 keys and values; else None


class NewPosition(NamedTuple):
  """The new position of every slot in one layer. Queries and keys are not rotated yet."""

  q: jax.Array  # queries [s, 1, h, 1, e]
  kv: KV  # its keys [s, 1, k, e, 1] and values [s, 1, k, 1, e]
  # The rotary angles of all positions of the chunk, f32[s, 1, c, e/2] each; None to rotate nothing.
  rope: Rope | None
  step: jax.Array  # i32[], its place in the chunk


class PageRows(NamedTuple):
  """Runs of positions in pages, and the slots that attend to each.

  Rows are divided into equal shards, like slots and pages, and count both within the shard. In each
  shard the first `count` rows are in use.
  """

  count: Any  # i32[shards]
  slots: Any  # i32[rows, w]; unused places repeat the first slot
  pages: Any  # i32[rows, most pages]
  start: Any  # i32[rows], the first valid position
  end: Any  # i32[rows], the end of the valid positions


class PageTables(NamedTuple):
  """The pages that slots read and write during a chunk."""

  # Several slots each; a running slot is in one of them. Rows past the first `count` whose end is
  # -1 name the other slots, so that a kernel can give them a result too.
  prompts: PageRows
  completions: PageRows  # the tokens before the chunk, one slot each
  # The chunk, one row for each running slot, whose page is the slot itself. `end` is that of the
  # first token.
  running: PageRows
  # i32[s, pages that a chunk can touch], from the page of the first new position on; those past the
  # pool's last page are not written
  written: Any
  completion_rows: Any  # i32[s], the row of each slot in `completions`; -1 without one
