"""Forecasts the time of a step with `sampling.staleness`, from lengths and waits of completions.

The run's own scheduler assigns slots, with its chunks and the limits of its cache; no device is
used. A decode step is assumed to take the same time however many slots are busy, and reading
`READ_AT_ONCE` tokens takes as long as one. That is nearly so on TPUs and GPUs, which load the
weights once for either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gtpo_jax.config import Config
from gtpo_jax.rollout.group_pool import choose
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.dense.tables import DenseSpace
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.session import REFILL_FRACTION

STEPS = 10  # that are simulated
SETTLED = 3  # the first ones, which begin without groups of earlier steps, do not count
READ_AT_ONCE = 256  # tokens of a device, or one of each slot if there are more
WORTH = 1.1  # a smaller gain is not worth older tokens
DRAWN_GROUPS = 256  # of a given distribution
COMPLETIONS = 4096  # the most whose lengths are remembered

Path = Sequence[tuple[int, float]]  # of each turn its tokens, and the seconds of the wait after it


class Forecast(NamedTuple):
  """The means of steps."""

  step_s: float  # the time of one
  draws: float  # its decode steps
  idle: float  # the share of the slots' decode steps that draw no token


class _Playing:
  """A completion that is simulated.

  Attributes:
    left: tokens that its turn still draws.
    drawn: tokens so far.
    ready_s: when its wait ends, once its turn has.
  """

  def __init__(self, path: Path):
    self._turns = list(path[::-1])
    self.drawn = 0
    self.ready_s = 0.0
    self.left, self._wait_s = self._turns.pop()

  def draw(self, count: int, now_s: float) -> None:
    """Draws tokens; at the end of a turn, waits."""
    self.drawn += count
    self.left -= count
    if not self.left:
      self.ready_s = now_s + self._wait_s
      if self._turns:
        self.left, self._wait_s = self._turns.pop()

  def ended(self, now_s: float) -> bool:
    """Whether it has drawn all its turns, and waits no longer."""
    return not self.left and self.ready_s <= now_s


class Simulation:
  """A run whose completions have given lengths.

  Attributes:
    token_s: seconds of a decode step.
    update_s: seconds of an update.
  """

  def __init__(self, config: Config, engine: Engine, groups: Sequence[Sequence[Path]]):
    """Args:
    config: the run's config.
    engine: has the sizes of its cache.
    groups: the completions of prompts, which are repeated in random order.
    """
    self.token_s = 1.0
    self.update_s = 0.0
    self._config = config
    self._chunk = engine.programs.chunk
    self._scheduler: Callable[[int, int], Scheduler] = engine.programs.sizes.scheduler
    self._groups = groups

  def run(self, staleness: int) -> Forecast:
    """Simulates some steps with this `sampling.staleness`."""
    n = self._config.batch.prompts
    rng = np.random.default_rng(0)
    pool: list[tuple[int, list[_Playing]]] = []
    now_s = 0.0
    ends: list[float] = []
    busy = np.zeros(3, np.int64)
    for version in range(STEPS):
      for _ in range(n * (1 + staleness) - len(pool)):
        paths = self._groups[rng.integers(len(self._groups))]
        pool.append((version, list(map(_Playing, paths))))
      now_s, chosen, in_step = self._sample(pool, version, staleness, now_s)
      busy += in_step if version >= SETTLED else 0
      pool = [group for i, group in enumerate(pool) if i not in chosen]
      now_s += self.update_s
      ends.append(now_s)
    tokens, of_slots, draws = (busy / (STEPS - SETTLED)).tolist()
    step_s = (ends[-1] - ends[SETTLED - 1]) / (STEPS - SETTLED)
    return Forecast(step_s, draws, 1 - tokens / of_slots)

  def _sample(
    self, pool: Sequence[tuple[int, list[_Playing]]], version: int, staleness: int, now_s: float
  ) -> tuple[float, set[int], np.ndarray]:
    """Samples until there is a batch.

    Returns:
      The time, the indices of the chosen groups, and i64[3]: tokens drawn, decode steps of all
      slots together, and decode steps.
    """
    n = self._config.batch.prompts
    prompt = self._config.data.max_prompt_tokens
    longest = self._config.sampling.max_tokens
    scheduler = self._scheduler(n * (1 + staleness), len(pool[0][1]))
    slots = len(scheduler.slots.active)
    at_once = max(slots, READ_AT_ONCE * scheduler.capacity.shards)
    rows = [list(group) for _, group in pool]  # a completion that joins is in its row again
    ready = [[x.left > 0 and x.ready_s <= now_s for x in group] for group in rows]
    lengths = np.asarray([[x.drawn for x in group] for group in rows], np.int32)
    keys = np.zeros((*lengths.shape, 2), np.uint32)
    scheduler.add(np.full(len(rows), prompt), np.where(ready, longest, 0), keys, lengths)
    waiting = [
      (i, x)
      for i, group in enumerate(rows)
      for x, is_ready in zip(group, ready[i], strict=True)
      if not is_ready and not x.ended(now_s)
    ]
    busy = np.zeros(3, np.int64)
    joined = False
    while True:
      complete = [all(x.ended(now_s) for x in group) for _, group in pool]
      chosen = choose([begun for begun, _ in pool], complete, n, version, staleness)
      if chosen is not None:
        return now_s, set(chosen), busy
      for i, x in [pair for pair in waiting if pair[1].ready_s <= now_s]:
        waiting.remove((i, x))
        if x.left:
          scheduler.join(i, x.drawn, longest, keys[0, 0])
          rows[i].append(x)
          joined = True
      read = 0
      while True:
        while any(assigned := scheduler.assign(scheduler.capacity.entries)):
          read += prompt * sum(map(len, assigned))
        space = scheduler.space
        most = space.capacity.entries if isinstance(space, DenseSpace) else 0
        if not scheduler.lacks_entries or scheduler.capacity.entries >= most:
          break
        scheduler.add_entries(most)
      names = scheduler.slots.completions
      read += sum(rows[names[slot, 0]][names[slot, 1]].drawn for slot in scheduler.take_resumed())
      active = scheduler.inputs().active
      at = np.flatnonzero(active)
      if not at.size:
        now_s = min(x.ready_s for _, x in waiting)
        continue
      running = [(names[slot, 0], rows[names[slot, 0]][names[slot, 1]]) for slot in at]
      left = np.asarray([x.left for _, x in running])
      refills = scheduler.has_waiting or joined
      enough = max(at.size // REFILL_FRACTION, 1) if refills else at.size
      count = min(int(np.sort(left)[enough - 1]), self._chunk)
      tokens = np.zeros(slots, np.int32)
      tokens[at] = np.minimum(left, count)
      now_s += (count + read / at_once) * self.token_s
      has_ended = np.zeros(slots, bool)
      has_ended[at] = left <= count
      scheduler.advance(tokens, has_ended)
      for (i, x), drawn in zip(running, tokens[at].tolist(), strict=True):
        ends = x.left == drawn
        x.draw(drawn, now_s)
        if ends and not x.ended(now_s):
          waiting.append((i, x))
      busy += np.asarray([tokens.sum(), count * slots, count])


def advice(simulation: Simulation, source: str) -> str:
  """Returns one line: how idle slots are, and what staleness would change; see `Simulation`.

  Args:
    simulation: of the run.
    source: where the lengths are from.
  """
  whole, one, two = map(simulation.run, range(3))
  best = 2 if one.step_s / two.step_s >= WORTH else 1
  gain = whole.step_s / (one, two)[best - 1].step_s
  faster = f"would make a step about {gain:.1f}x faster"
  if gain < WORTH:
    faster = f"would not pay: a step would be {gain:.2f}x as fast"
  return f"slots idle {whole.idle:.0%} of sampling; sampling.staleness={best} {faster} ({source})"


def planned(
  config: Config, engine: Engine, groups: Sequence[Sequence[Path]], expected: dict[str, Any]
) -> Simulation:
  """Returns the simulation of a run that has not begun.

  Args:
    config: the run's config.
    engine: of the policy.
    groups: the completions of prompts.
    expected: from `measure` of `gtpo plan`, whose completions all have full length.
  """
  simulation = Simulation(config, engine, groups)
  full = [[[(config.sampling.max_tokens, 0.0)] for _ in groups[0]]]
  update_s = expected["update.expected_seconds"]
  steps = Simulation(config, engine, full).run(0).step_s
  simulation.token_s = (expected["step.expected_seconds"] - update_s) / steps
  simulation.update_s = update_s
  return simulation


def measured(
  config: Config,
  engine: Engine,
  groups: Sequence[Sequence[Path]],
  metrics: Sequence[Mapping[str, float]],
) -> Simulation:
  """Returns the simulation of a run without staleness, from some of its steps.

  Args:
    config: the run's config.
    engine: of the policy.
    groups: the completions of these steps.
    metrics: of the steps.
  """
  simulation = Simulation(config, engine, groups)
  without_waits = [[[(n, 0.0) for n, _ in path] for path in row] for row in groups]
  steps = Simulation(config, engine, without_waits).run(0).step_s
  sampling = [x["time/sample"] * (1 - x.get("env/idle_share", 0.0)) for x in metrics]
  simulation.token_s = float(np.median(sampling)) / steps
  simulation.update_s = float(np.median([x["time/update"] for x in metrics]))
  return simulation


class Observer:
  """Remembers the lengths and waits of some steps of a run, and then forecasts."""

  def __init__(self, config: Config, engine: Engine, first: int):
    """Args:
    config: the run's config.
    engine: of the policy.
    first: the first step that counts; earlier ones compile.
    """
    platform = engine.model.mesh.devices.flat[0].platform
    whole = not (config.sampling.staleness or config.resolved_algorithm.settings.dynamic_sampling)
    # The arrays of a CPU are as long as the longest completion: there only waits are worth it.
    self._counts = whole and (platform != "cpu" or config.env.is_used)
    self._config = config
    self._engine = engine
    self._steps = range(first, first + 6)
    self._groups: list[list[Path]] = []
    self._metrics: list[Mapping[str, float]] = []

  def observe(self, step: int, groups: Sequence[Any], metrics: dict[str, float]) -> str:
    """Takes the groups and the metrics of a step; returns a line once there are enough, or ""."""
    if not self._counts or step not in self._steps:
      return ""
    own = [[path_of(x) for x in group.completions if not x.guided] for group in groups]
    most = COMPLETIONS // len(self._steps) // max(len(own[0]), 1)
    self._groups += own[: max(most, 1)]
    self._metrics.append(metrics)
    if step != self._steps[-1] or len(self._metrics) < len(self._steps):
      return ""
    simulation = measured(self._config, self._engine, self._groups, self._metrics)
    line = advice(simulation, f"lengths of steps {self._steps[0]} to {step}")
    return "" if "would not pay" in line else line


def path_of(completion: Any) -> Path:
  """Returns the turns of a completion that has ended, their tokens and waits taken as equal."""
  turns = max(len(completion.episode.turns), 1) if completion.episode else 1
  seconds = completion.episode.seconds if completion.episode else 0.0
  tokens = max(completion.drawn, turns)
  edges = np.linspace(0, tokens, turns + 1).astype(int)
  return [(int(n), seconds / turns) for n in np.diff(edges)]


def lengths_from(text: str, longest: int, group: int) -> list[list[Path]]:
  """Returns completions whose lengths a file has, or that are drawn from a distribution.

  Args:
    text: a file with numbers of tokens between white space, or "lognormal:MEDIAN,SIGMA".
    longest: at which lengths are cut.
    group: completions per prompt.
  """
  number = r"(\d+(?:\.\d+)?)"
  if found := re.fullmatch(rf"lognormal:{number},{number}", text):
    median, sigma = map(float, found.groups())
    if median < 1:
      raise UserError(f"--lengths={text} has a median below 1 token; write it as lognormal:800,1")
    normal = np.random.default_rng(0).normal(size=(DRAWN_GROUPS, group))
    lengths = median * np.exp(sigma * normal)
  else:
    try:
      with open(text, encoding="utf-8") as file:
        lengths = np.asarray(file.read().split(), np.float64)
    except (OSError, ValueError):
      lengths = np.zeros(0)
    if not lengths.size or not (lengths >= 1).all():
      raise UserError(
        f"--lengths={text} is neither a file of numbers of tokens nor lognormal:MEDIAN,SIGMA, as "
        "in lognormal:800,1"
      )
    lengths = np.random.default_rng(0).choice(lengths, (DRAWN_GROUPS, group))
  whole = np.clip(lengths, 1, longest).astype(int)
  return [[[(n, 0.0)] for n in row] for row in whole.tolist()]
