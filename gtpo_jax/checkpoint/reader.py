"""Reads one checkpoint from disk and verifies that it contains what was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from gtpo_jax.checkpoint.digests import digest_leaves, leaf_types
from gtpo_jax.checkpoint.integrity import IntegrityRecord, check_integrity
from gtpo_jax.runtime.distributed import broadcast_from_first, first_nonempty_text
from gtpo_jax.runtime.errors import CorruptCheckpoint, UserError, first_line

MAX_MESSAGE = 200  # characters of another library's message that are shown


def read_checkpoint(
  folder: epath.Path, targets: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads the items of a step's folder and checks them against its integrity record.

  All processes reach the same result: if one of them finds damage, for example on its own disk or
  in its own cache, every process raises the error.

  Args:
    folder: the folder of one step.
    targets: maps the name of each item to abstract arrays with the shardings to restore, to a
      function from the item's saved leaves to such arrays, or to None to read host arrays. An item
      that was not saved is skipped.

  Returns:
    The items by name, and the metadata saved with them.

  Raises:
    CorruptCheckpoint: the checkpoint differs from what was saved.
    UserError: the checkpoint is intact, but its arrays differ from `targets` in paths, dtypes or
      shapes.
  """
  values = broadcast_from_first(lambda: check_integrity(folder, targets)._asdict())
  record = IntegrityRecord(**values)
  wanted = {
    name: target(record.leaves[name]) if callable(target) else target
    for name, target in targets.items()
    if name in record.leaves
  }
  for name, target in wanted.items():
    if target is not None:
      _check_types(folder, name, record.leaves[name], leaf_types(target))
  items = _read_items(folder, wanted)
  for name, item in items.items():
    _check_digests(name, record.leaves[name], digest_leaves(item))
  return items, record.metadata


def _read_items(folder: epath.Path, targets: Mapping[str, Any]) -> dict[str, Any]:
  # CheckpointManager would wait for processes that failed; StandardCheckpointHandler does not.
  handler = ocp.StandardCheckpointHandler()
  items = {}
  damage = ""
  try:
    for name, target in targets.items():
      items[name] = handler.restore(folder / name, args=ocp.args.StandardRestore(target))
  except Exception as error:  # Orbax, TensorStore and JSON raise various types
    damage = first_line(error)
  finally:
    handler.close()
  _raise_everywhere(damage[:MAX_MESSAGE])
  return items


def _check_types(
  folder: epath.Path, item: str, saved: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
  """Raises UserError if an item's saved arrays and `wanted` differ in paths, dtypes or shapes."""
  types = {leaf: digest.partition(":")[0] for leaf, digest in saved.items()}
  for leaf in sorted(types.keys() | wanted.keys()):
    actual = types.get(leaf, "missing")
    expected = wanted.get(leaf, "missing")
    if actual != expected:
      raise UserError(
        f"the checkpoint in {str(folder)!r} belongs to another model or optimizer: {item}{leaf} is "
        f"{actual}, but {expected} in this config; use the config that it was written with, or "
        f"another workdir"
      )


def _check_digests(item: str, saved: Mapping[str, str], restored: Mapping[str, str]) -> None:
  changed = [leaf for leaf, digest in saved.items() if restored.get(leaf) != digest]
  _raise_everywhere(f"{item}{changed[0]} differs from what was saved" if changed else "")


def _raise_everywhere(damage: str) -> None:
  """Raises CorruptCheckpoint on every process if `damage` is not empty on one of them."""
  if message := first_nonempty_text(damage):
    raise CorruptCheckpoint(message)
