"""A completion: one draw of the policy, from its request to its reward.

Training, evaluation, agents, serving and Tinker submit the same object to a `Session`, which
appends the tokens that it draws. Arrays are padded once, where a batch is made (`pad_completions`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from gtpo_jax.arrays import Rollouts
from gtpo_jax.models.experts.routing import RouteShape
from gtpo_jax.sampling.filters import PLAIN, RowSampling
from gtpo_jax.sampling.prefill.batches import pad_prompts
from gtpo_jax.sampling.stop_strings import StopSearch

# What is known of each token that was drawn, in nats; see `Chunk`.
NUMBERS = ("log_probs", "entropy", "drawn_log_probs", "plain_log_probs")
Tokens = dict[str, np.ndarray]  # arrays [length, ...] by name: "tokens", "mask", `NUMBERS`, ...


class Stop(Protocol):
  """Finds where a turn ends, such as `StopStrings`."""

  def search(self) -> StopSearch:
    """Returns a search in a turn that begins."""


@dataclasses.dataclass(eq=False)
class Prompt:
  """A prompt, whose keys and values its completions share."""

  tokens: Sequence[int]  # its ids
  # the experts that computed its tokens when it was last read, [length, layers with experts, k],
  # as in `Rollouts`; None until then, and without experts
  routes: np.ndarray | None = None


@dataclasses.dataclass(eq=False)
class Completion:
  """A completion of a prompt; it may have several turns, with tokens that are read between them.

  Attributes:
    prompt: shared with the other completions of the group.
    key: u32[2], PRNG key data. Token i is drawn with it and i.
    limit: the most tokens after the prompt.
    stop: ends each turn; None if only stop tokens do.
    sampling: how its tokens are drawn, in a session whose completions differ in it; and whether
      `Chunk.alternatives` are kept.
    route_shape: of the experts that are kept for each token; None for none.
    group, index: which completion of which group it is.
    guided: whether a guide draws it.
    length: the tokens so far, those that were read included.
    finished: whether a stop token or `stop` ended its latest turn.
    begins: where its conversations begin, if it is an agent's.
    conversations: of an agent's episode in flight; they are joined when it ends.
    versions: i32[length], after how many updates each token was drawn; `mark_version` extends it.
    episode: what its environment or agent says, once it has ended.
    text: decoded, once it was scored.
  """

  prompt: Prompt
  key: np.ndarray
  limit: int
  stop: Stop | None = None
  sampling: RowSampling = PLAIN
  route_shape: RouteShape | None = None
  group: Hashable = None
  index: int = 0
  guided: bool = False
  length: int = dataclasses.field(default=0, init=False)
  finished: bool = dataclasses.field(default=False, init=False)
  begins: list[int] = dataclasses.field(default_factory=lambda: [0], init=False)
  conversations: list[Completion] = dataclasses.field(default_factory=list, init=False)
  versions: np.ndarray = dataclasses.field(
    default_factory=lambda: np.zeros(0, np.int32), init=False
  )
  episode: Any = dataclasses.field(default=None, init=False)
  text: str = dataclasses.field(default="", init=False)

  def __post_init__(self) -> None:
    self.search: StopSearch | None = None  # in the turn that is being drawn
    self._pieces: list[Any] = []  # arrays, or a chunk with a slot and a count

  @property
  def ended(self) -> bool:
    """Whether its latest turn draws no more tokens."""
    return self.finished or self.length >= self.limit

  @property
  def tokens(self) -> np.ndarray:
    """i32[length], the ids."""
    return self.arrays()["tokens"]

  @property
  def mask(self) -> np.ndarray:
    """bool[length], whether the policy drew each token."""
    return self.arrays()["mask"]

  @property
  def answer(self) -> str:
    """What is judged: the text, or the last turn of an episode."""
    return self.episode.text if self.episode else self.text

  @property
  def drawn(self) -> int:
    """How many tokens the policy drew, once the completion has ended."""
    return self.episode.tokens if self.episode else self.length

  @property
  def turn_begin(self) -> int:
    """How many tokens there were when the latest turn began."""
    read = np.flatnonzero(~self.mask)
    return int(read[-1]) + 1 if read.size else 0

  def arrays(self, begin: int = 0) -> Tokens:
    """Returns all that is known of the tokens from `begin` on, [length - begin, ...] by name."""
    at = self.length
    parts: list[Tokens] = []
    for piece in reversed(self._pieces):
      if at <= begin:
        break
      parts.insert(0, self._arrays(piece))
      at -= len(parts[0]["tokens"])
    if not parts:
      return self._undrawn(())
    joined = parts[0]
    if len(parts) > 1:
      joined = {name: np.concatenate([x[name] for x in parts]) for name in joined}
    if not at:
      self._pieces = [joined]
    return {name: x[begin - at :] for name, x in joined.items()}

  def replace(self, tokens: Tokens, finished: bool) -> None:
    """Replaces the tokens; none of them is being drawn."""
    self._pieces = [tokens]
    self.length = len(tokens["tokens"])
    self.finished = finished

  def resume(self, other: Completion) -> None:
    """Continues with the tokens of another completion, which stays as it is."""
    self.replace(other.arrays(), other.finished)
    self.versions = other.versions
    self.begins = other.begins
    self.prompt.routes = other.prompt.routes
    self.conversations = other.conversations
    for conversation in self.conversations:
      conversation.prompt = self.prompt

  def begin_turn(self) -> bool:
    """Prepares to draw the next tokens; returns False if the turn has ended already.

    A turn that resumes may contain a stop string: then it ends there.
    """
    if not self.ended and self.stop:
      begin = self.turn_begin
      self.search = self.stop.search()
      end = self.search.add(self.tokens[begin:].tolist())
      if end is not None:
        self.replace({name: x[: begin + end] for name, x in self.arrays().items()}, True)
    return not self.ended

  def draw(self, chunk: Any, slot: int, count: int, finished: bool) -> None:
    """Appends the first `count` tokens of a slot of a chunk, which is in host arrays."""
    if count:
      self._pieces.append((chunk, slot, count))
      self.length += count
    self.finished = finished

  def read(self, tokens: Sequence[int]) -> None:
    """Appends tokens that were not drawn, so that the completion has another turn.

    Raises:
      ValueError: there is none, or no token would be left for the turn.
    """
    if not 0 < len(tokens) < self.limit - self.length:
      raise ValueError(
        f"completion {self.index} of group {self.group} has {self.length} of {self.limit} tokens; "
        f"from 1 to {self.limit - self.length - 1} can be added, got {len(tokens)}"
      )
    self._pieces.append(self._undrawn(tokens))
    self.length += len(tokens)
    self.finished = False

  def keep_routes(self, read: np.ndarray) -> None:
    """Keeps the experts of tokens that were read, the first ones of the completion.

    Drawn tokens keep the experts of their drawing, with which the log-prob of the next token was
    computed.
    """
    if self.route_shape:
      arrays = self.arrays()
      is_context = ~arrays["mask"][: len(read)]
      routes = arrays["routes"].copy()
      routes[: len(read)][is_context] = read[is_context]
      self._pieces = [arrays | {"routes": routes}]

  def mark_version(self, version: int) -> None:
    """Says that all tokens without a version were drawn after `version` updates."""
    for conversation in self.conversations:
      conversation.mark_version(version)
    new = self.mask[len(self.versions) :]
    self.versions = np.append(self.versions, np.where(new, version, 0).astype(np.int32))

  def _undrawn(self, tokens: Sequence[int]) -> Tokens:
    count = len(tokens)
    arrays = {"tokens": np.asarray(tokens, np.int32), "mask": np.zeros(count, bool)}
    arrays |= {name: np.zeros(count, np.float32) for name in NUMBERS}
    return arrays | ({"routes": self.route_shape.empty(count)} if self.route_shape else {})

  def _arrays(self, piece: Any) -> Tokens:
    if isinstance(piece, dict):
      return piece
    chunk, slot, count = piece
    arrays = {name: getattr(chunk, name)[:count, slot] for name in ("tokens", *NUMBERS)}
    arrays["mask"] = np.ones(count, bool)
    if self.sampling.lists_alternatives:
      arrays["alternatives"] = chunk.alternatives.tokens[:count, slot]
      arrays["alternative_log_probs"] = chunk.alternatives.log_probs[:count, slot]
    return arrays | ({"routes": chunk.routes[:count, slot]} if self.route_shape else {})


def pad_completions(
  rows: Sequence[Sequence[Completion]],
  t: int,
  prompt_width: int,
  pad: int,
  *,
  drawn_log_probs: bool = False,
  versions: bool = False,
  conversations: int = 0,
) -> Rollouts:
  """Returns completions as arrays [n, g, t] on the host, with their prompts padded on the left.

  The log-probs of a guide count as the drawn distribution's: the ratio of a guide's token always
  uses its own log-probs. Another router chose the guide's experts, so these are left out.

  Args:
    rows: n rows of g completions, each row with one prompt.
    t: the positions, at least as many as tokens.
    prompt_width: p.
    pad: the padding id.
    drawn_log_probs: whether to include `drawn_log_probs`.
    versions: whether to include `versions`.
    conversations: the most conversations of a completion; 0 for no `begins`.
  """
  shape = (len(rows), len(rows[0]) if rows else 0, t)
  prompts = [row[0].prompt for row in rows]
  tokens = np.full(shape, pad, np.int32)
  present = np.zeros(shape, bool)
  numbers = {name: np.zeros(shape, np.float32) for name in NUMBERS}
  mask = np.zeros(shape, bool)
  updates = np.zeros(shape, np.int32) if versions else None
  begins = np.full((*shape[:2], conversations), t, np.int32) if conversations else None
  route_shape = rows[0][0].route_shape if rows else None
  routes = route_shape and route_shape.empty(*shape)
  prompt_routes = route_shape and route_shape.empty(len(rows), prompt_width)
  for i, row in enumerate(rows):
    if route_shape and prompts[i].routes is not None:
      prompt_routes[i, prompt_width - len(prompts[i].tokens) :] = prompts[i].routes
    for j, completion in enumerate(row):
      arrays = completion.arrays()
      at = (i, j, slice(completion.length))
      tokens[at] = arrays["tokens"]
      present[at] = True
      mask[at] = arrays["mask"]
      for name, x in numbers.items():
        x[at] = arrays[name]
      if completion.guided:
        numbers["drawn_log_probs"][at] = arrays["log_probs"]
      elif route_shape:
        routes[at] = arrays["routes"]
      if versions:
        updates[at] = completion.versions
      if conversations:
        begins[i, j, : len(completion.begins)] = completion.begins
  flags = lambda name: np.asarray([[getattr(x, name) for x in row] for row in rows], bool).reshape(
    shape[:2]
  )
  guided = flags("guided")
  return Rollouts(
    prompts=pad_prompts([x.tokens for x in prompts], prompt_width, pad).replace(
      routes=prompt_routes
    ),
    tokens=tokens,
    present=present,
    mask=mask,
    log_probs=numbers["log_probs"],
    entropy=numbers["entropy"],
    finished=flags("finished"),
    routes=routes,
    guided=guided if guided.any() else None,
    versions=updates,
    drawn_log_probs=numbers["drawn_log_probs"] if drawn_log_probs else None,
    begins=begins,
  )
