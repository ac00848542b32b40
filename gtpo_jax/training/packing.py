"""Divides a batch: completions of a prompt into shared rows, and rows into micro-batches.

Shared rows are fewer or shorter, which saves work on padding. All completions in a row belong to
the same prompt. Each attends to the prompt's keys and values and to its own tokens. Packing
therefore moves nothing between devices, and every statistic is computed per completion, packed or
not.

Dimension letters: n prompts, g completions per prompt, t completion positions, w rows per prompt,
s positions per row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.arrays import Packing, array_lengths, max_per_row
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import axis_size, batch_shards, constrain

# A group is packed into 1/4, 2/4, 3/4 or 4/4 as many rows as it has completions, or 3/8. The fewest
# rows may also be 1/2, 1/8 or 1/32 as long. More choices would save more padding, but every shape
# needs a program of its own.
ROW_FRACTIONS = 4
SHORTER_LENGTHS = 3
OF_PROMPTS = {"prompts", "teacher_prompts", "part_weights"}  # fields without an axis of completions


class _Layout(NamedTuple):
  """Where each completion is placed."""

  row: np.ndarray  # i32[n, g], in [0, w)
  start: np.ndarray  # i32[n, g], its first position in the row, in [0, s)
  index: np.ndarray  # i32[n, g], number of completions before it in the row


def plan_rows(
  lengths: np.ndarray, t: int, shards: int = 1, begins: np.ndarray | None = None, share: bool = True
) -> Packing | None:
  """Plans, on the host, how the completions of arrays [n, g, t] are packed into rows [n, w, s].

  [w, s] is the smallest of `row_shapes` that fits every group. Completions are placed from the
  longest to the shortest, each in the row with the most space left. A row has at most `max_per_row`
  completions.

  Args:
    lengths: i32[n, g], tokens of each completion, at most t.
    t: maximum tokens of a completion.
    shards: number of devices that a row's positions are sharded over.
    begins: i32[n, g, c], where the conversations of each completion begin, as in `Rollouts`; None
      if each completion is one.
    share: whether completions may share rows.

  Returns:
    The packing, or None if it saves nothing and each completion is one conversation.
  """
  n, g = lengths.shape
  longest = lengths.max(initial=0)
  fitting = (
    (w, s, layout)
    for w, s in (row_shapes(g, t, shards) if share else [(g, t)])
    if s >= longest and (layout := _fill(lengths, w, s)) is not None
  )
  w, s, layout = next(fitting)
  if (w, s) == (g, t) and begins is None:
    return None
  conversations = 1 if begins is None else begins.shape[2]
  padding = max_per_row(g, w) * conversations
  segment = np.full((n, w, s), padding, np.int32)
  source = np.full((n, w, s), -1, np.int32)
  for i, j in np.ndindex(n, g):
    start = layout.start[i, j]
    positions = (i, layout.row[i, j], slice(start, start + lengths[i, j]))
    within = np.arange(lengths[i, j])
    segment[positions] = layout.index[i, j] * conversations
    if begins is not None:
      segment[positions] += np.searchsorted(begins[i, j], within, side="right") - 1
    source[positions] = j * t + within
  start = layout.row * s + layout.start
  return Packing(segment if padding > 1 else None, source, start, begins)


def row_shapes(g: int, t: int, shards: int = 1) -> list[tuple[int, int]]:
  """Returns the shapes (w, s) of the rows of completions [g, t], from the fewest positions on.

  There are at most eight. The last is (g, t), which is not packed.

  Args:
    g: completions of a prompt.
    t: maximum tokens of a completion.
    shards: number of devices that a row's positions are sharded over.
  """
  counts = [-(-numerator * g // ROW_FRACTIONS) for numerator in range(1, ROW_FRACTIONS + 1)]
  shorter = array_lengths(t, shards)[::-1][1:]
  shapes = {(w, t) for w in counts} | {(counts[0], s) for s in shorter[::2][:SHORTER_LENGTHS]}
  if 3 * g % 8 == 0:
    shapes.add((3 * g // 8, t))
  elif shorter and counts[0] * t < counts[2] * shorter[0] < counts[1] * t:
    shapes.add((counts[2], shorter[0]))
  return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))


def abstract_packing(
  n: int, g: int, t: int, w: int, s: int, begins: jax.ShapeDtypeStruct | None = None
) -> Packing | None:
  """Returns the shapes and dtypes that `plan_rows` returns for rows (w, s) of `row_shapes`."""
  if (w, s) == (g, t) and begins is None:
    return None
  rows = jax.ShapeDtypeStruct((n, w, s), np.int32)
  segment = rows if max_per_row(g, w) > 1 or (begins and begins.shape[2] > 1) else None
  return Packing(segment, rows, jax.ShapeDtypeStruct((n, g), np.int32), begins)


def _fill(lengths: np.ndarray, w: int, s: int) -> _Layout | None:
  """Places each group's completions in w rows of s positions; returns None if they do not fit."""
  n, g = lengths.shape
  max_completions = max_per_row(g, w)
  prompts = np.arange(n)
  used = np.zeros((n, w), np.int32)  # positions
  count = np.zeros((n, w), np.int32)  # completions
  layout = _Layout(*np.zeros((3, n, g), np.int32))
  for j in np.argsort(-lengths, axis=1, kind="stable").T:  # each prompt's next shorter completion
    row = np.where(count < max_completions, used, s + 1).argmin(1)
    layout.row[prompts, j] = row
    layout.start[prompts, j] = used[prompts, row]
    layout.index[prompts, j] = count[prompts, row]
    used[prompts, row] += lengths[prompts, j]
    count[prompts, row] += 1
    if used.max() > s or count.max() > max_completions:
      return None
  return layout


def group_parts(prompts: int, parts: int, shards: int) -> int:
  """Returns in how many parts a group is divided; 1 if each part of a batch has whole groups.

  Args:
    prompts: n.
    parts: the number of parts of the batch.
    shards: the number of batch shards, each of which has prompts of every part.
  """
  return max(parts * shards // prompts, 1)


def split_batch(batch: Any, parts: int, model: Transformer) -> Any:
  """Splits arrays [n, g, ...] into [parts, n / parts, g, ...].

  Every part contains prompts of every batch shard, which keeps all devices busy. If there are more
  parts than prompts of a shard, groups are divided too, and their prompts are repeated. Completions
  must then not share rows.
  """
  n = jax.tree.leaves(batch)[0].shape[0]
  count = group_parts(n, parts, batch_shards(model.mesh))

  def split_array(path: Any, x: jax.Array) -> jax.Array:
    if {getattr(key, "name", "") for key in path} & OF_PROMPTS:
      x = jnp.repeat(x, count, axis=0)
    else:
      x = x.reshape(n * count, x.shape[1] // count, *x.shape[2:])
    x = jnp.moveaxis(x.reshape(len(x) // parts, parts, *x.shape[1:]), 1, 0)
    return constrain(x, model.mesh, None, "batch")

  return jax.tree.map_with_path(split_array, batch)


def merge_parts(x: jax.Array, n: int) -> jax.Array:
  """Merges one array [parts, n / parts, g, ...] into [n, g, ...]: the inverse of `split_batch`."""
  return jnp.moveaxis(x, 0, 1).reshape(n, -1, *x.shape[3:])


def check_positions_divisible(max_tokens: int, model: Transformer) -> None:
  """Checks that completion positions can be sharded over context and tensor."""
  shards = axis_size(model.mesh, "sequence")
  if axis_size(model.mesh, "position") > 1 and max_tokens % shards:
    raise UserError(
      f"sampling.max_tokens = {max_tokens} is not a multiple of mesh.context x mesh.tensor = "
      f"{shards}; change sampling.max_tokens or the mesh"
    )


def check_batch_divisible(name: str, size: int, parts: int, model: Transformer) -> None:
  """Checks that a batch can be split into equal parts, each sharded over the mesh's batch axes.

  Args:
    name: the config key of the batch size, for the message.
    size: the batch size.
    parts: the number of parts.
    model: the model on its mesh.
  """
  shards = batch_shards(model.mesh)
  if size % (parts * shards):
    raise UserError(
      f"{name} = {size} is not a multiple of {parts * shards}: {parts} part(s) x {shards} batch "
      f"shard(s) of mesh {dict(model.mesh.shape)}; change {name} or the mesh"
    )
