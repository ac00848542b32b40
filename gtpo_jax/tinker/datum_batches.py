"""The data of a request as batches of prompts and completions, of few shapes.

A sequence is divided where its loss begins: what precedes is its prompt, which sequences with the
same one share. Lengths of completions and numbers of rows are powers of two, and lengths of prompts
also the means of two neighbours, so that few programs are compiled.
The batches of a request depend on nothing but the request.

Dimension letters: n prompts, g sequences of a prompt, p and t positions of prompts and completions.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

import flax.struct
import jax
import numpy as np

from gtpo_jax.arrays import Prompts
from gtpo_jax.sampling.prefill.batches import pad_prompts
from gtpo_jax.tinker.losses import PER_TOKEN, RATIO_MASK, Loss, LossInputs
from gtpo_jax.tinker.wire import Datum

SHORTEST_PROMPT = 32
SHORTEST_COMPLETION = 8
LARGEST_GROUP = 32
BATCH_TOKENS = {"cpu": 4096}  # positions of a batch on a device, by platform
DEVICE_TOKENS = 32_768


@flax.struct.dataclass
class Rows:
  """Sequences that are computed together."""

  prompts: Prompts  # [n, p]
  # i32[n, g, t], what the model reads after each prompt; the last one is not read
  tokens: jax.Array
  targets: jax.Array  # i32[n, g, t]
  inputs: LossInputs  # of the loss


# Where each sequence of a batch is: its index in the request, its prompt, its place in the group.
Places = list[tuple[int, int, int]]


def loss_begins(datum: Datum) -> int:
  """Returns the first position at which any input of the loss is not 0; the last if all are."""
  used = np.zeros(len(datum.tokens), bool)
  for x in datum.inputs.values():
    used |= x != 0
  return int(used.argmax()) if used.any() else len(used) - 1


def by_prompt(data: Sequence[Datum], begins: Sequence[int]) -> list[list[int]]:
  """Returns the indices of data by what the model reads before the loss begins."""
  groups: dict[bytes, list[int]] = collections.defaultdict(list)
  for i, datum in enumerate(data):
    groups[datum.tokens[: begins[i] + 1].tobytes()].append(i)
  return list(groups.values())


def divide(
  data: Sequence[Datum], begins: Sequence[int], loss: Loss, shards: int, pad: int, platform: str
) -> Iterator[tuple[Rows, Places]]:
  """Yields the batches of a request, in host arrays; the same ones for the same request.

  Args:
    data: the sequences.
    begins: where the loss of each begins; its prompt is what the model has read until then.
    loss: what is computed.
    shards: devices along the batch axes; n is a multiple of it.
    pad: the padding id.
    platform: "cpu", "gpu" or "tpu".
  """
  shapes: dict[tuple[int, int, int], list[list[int]]] = collections.defaultdict(list)
  for group in by_prompt(data, begins):
    p = prompt_width(begins[group[0]] + 1)
    longest = lambda i: len(data[i].tokens) - begins[i]
    by_length: dict[int, list[int]] = collections.defaultdict(list)
    for i in group:
      by_length[doubled(longest(i), SHORTEST_COMPLETION)].append(i)
    for t, members in by_length.items():
      for g, piece in _pieces(members):
        shapes[p, g, t].append(piece)
  budget = BATCH_TOKENS.get(platform, DEVICE_TOKENS) * shards
  for (p, g, t), pieces in sorted(shapes.items()):
    most = max(doubled(budget // (p + g * t) // shards + 1, 1) // 2, 1) * shards
    for start in range(0, len(pieces), most):
      chosen = pieces[start : start + most]
      n = doubled(-(-len(chosen) // shards), 1) * shards
      yield _part(data, begins, chosen, loss, (n, g, p, t), pad)


def prompt_width(length: int) -> int:
  """Returns the positions of prompts of up to `length` tokens."""
  power = doubled(length, SHORTEST_PROMPT)
  between = power * 3 // 4
  return between if power > SHORTEST_PROMPT and length <= between else power


def doubled(size: int, least: int = 1) -> int:
  """Returns the first of `least`, twice `least`, four times and so on that is at least `size`."""
  power = least
  while power < size:
    power *= 2
  return power


def _pieces(members: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
  """Yields (g, members) such that at most a quarter of each group of g is padding."""
  left = list(members)
  while left:
    g = min(doubled(len(left), 1), LARGEST_GROUP)
    if 4 * len(left) < 3 * g:
      g //= 2
    yield g, left[:g]
    left = left[g:]


def _part(
  data: Sequence[Datum],
  begins: Sequence[int],
  pieces: Sequence[Sequence[int]],
  loss: Loss,
  shape: tuple[int, int, int, int],
  pad: int,
) -> tuple[Rows, Places]:
  n, g, p, t = shape
  prompts = [data[piece[0]].tokens[: begins[piece[0]] + 1] for piece in pieces]
  prompts += [np.full(1, pad, np.int32)] * (n - len(pieces))
  tokens, targets = np.full((2, n, g, t), pad, np.int32)
  arrays = {name: np.zeros((n, g, t), np.float32) for name in FIELDS}
  present = np.zeros((n, g, t), np.float32)
  places = []
  for i, piece in enumerate(pieces):
    for j, index in enumerate(piece):
      datum = data[index]
      begin = begins[index]
      length = len(datum.tokens) - begin
      tokens[i, j, : length - 1] = datum.tokens[begin + 1 :]
      targets[i, j, :length] = datum.targets[begin:]
      present[i, j, :length] = 1
      for name, array in arrays.items():
        if name in datum.inputs:
          array[i, j, :length] = datum.inputs[name][begin:]
      if RATIO_MASK not in datum.inputs:
        arrays[RATIO_MASK][i, j, :length] = 1
      places.append((index, i, j))
  kind = PER_TOKEN.index(loss.name) if loss.per_token else 0
  settings = (kind, loss.low, loss.high, loss.beta)
  constants = (np.full((n, g, t), value, np.float32) for value in settings)
  inputs = LossInputs(present, *(arrays[name] for name in FIELDS), *constants)
  return Rows(pad_prompts(prompts, p, pad), tokens, targets, inputs), places


FIELDS = ("weights", "logprobs", "advantages", RATIO_MASK)  # of `LossInputs`, in order
