"""What one step learns from: sampled, judged, and filled up with groups that carry signal."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.algorithms import informative
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.config import Config
from gtpo_jax.data.pipeline import Batches
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.models.causal import attention_kind
from gtpo_jax.models.qwen2 import Params
from gtpo_jax.rollout.policies import FrozenPolicies
from gtpo_jax.rollout.scoring import RewardResult
from gtpo_jax.rollout.worker import Policy, RolloutWorker, Stream, key_for
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import axis_size, shard_batch
from gtpo_jax.training.head import make_scorer
from gtpo_jax.training.packing import plan_rows


@dataclasses.dataclass(frozen=True)
class Experience:
  """A step's batch."""

  rollouts: Rollouts  # on the mesh
  verdicts: Rewards  # on the mesh
  problems: list[Problem]  # [n]
  texts: list[list[str]]  # [n][g]
  correct: np.ndarray  # bool[n, g]
  metrics: dict[str, float]  # what was sampled for it, and the seconds

  def to_arrays(self) -> dict[str, np.ndarray]:
    """Everything the update reads, as host arrays by dotted name, and the problems' ids. To be called on every process."""
    leaves = jax.tree_util.tree_leaves_with_path(
      fetch({"rollouts": self.rollouts, "verdicts": self.verdicts})
    )
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {"problems": np.asarray([problem.id for problem in self.problems]), **arrays}


@dataclasses.dataclass(frozen=True)
class _Group:
  """One prompt's completions on the host: a row of a batch."""

  place: tuple[int, int]  # the generation batch, and the row in it
  problem: Problem
  rollouts: Rollouts
  verdicts: Rewards
  texts: list[str]


class _Draw(NamedTuple):
  """One generation batch, sampled and judged."""

  number: int
  problems: list[Problem]
  rollouts: Rollouts  # on the mesh
  found: RewardResult
  texts: list[list[str]]  # [n][g]
  waited_s: float  # seconds waited for verdicts once all was written


class Collector:
  """Samples and judges each step's batch.

  Generation batch number k holds the problems k of the data order and is drawn with the key of k: what is sampled depends on the
  seed and on how many batches came before. Without dynamic sampling that number is the step's.
  """

  def __init__(
    self,
    config: Config,
    worker: RolloutWorker,
    problems: Sequence[tuple[Problems, float]],
    frozen: FrozenPolicies,
    drawn: int = 0,
  ):
    self._config = config
    self._actor = worker
    self._frozen = frozen
    self._settings = config.algorithm_built.settings
    self._n = config.batch.prompts
    self._batches = Batches(problems, self._n, config.seed)
    self._drawn = drawn
    self._kept = []
    scorer = lambda model: make_scorer(
      model, config.sampling.temperature, config.batch.parts, config.batch.head_chunk
    )
    self._rescore = scorer(worker.model) if self._settings.tis_cap else None
    self._refer = scorer(frozen.reference[0]) if frozen.reference else None
    self._joined = jax.jit(_joined)

  def warm_up(self, policy: Policy) -> None:
    """Compiles every program that sampling a batch by `policy` (and the guide) may need."""
    config = self._config
    guide = self._frozen.guide
    policy.engine.warm_up(
      policy.params,
      self._n,
      group=config.policy_completions,
      sampling_params=config.sampling_params,
    )
    if guide:
      guide.engine.warm_up(
        guide.params,
        self._n,
        group=self._settings.guide_completions,
        sampling_params=config.sampling_params,
      )

  def collect(self, params: Params, say: Callable[[str], None]) -> Experience:
    """The next step's batch, written by the policy with `params` (and by the guide)."""
    began = time.perf_counter()
    policy = self._actor.policy(params)
    if not self._settings.dynamic_sampling:
      _, problems, rollouts, found, texts, waited_s = self._draw(params, policy)
      verdicts = found.verdicts
      correct = found.correct
      metrics = found.metrics
    else:
      groups, metrics, waited_s = self._fill(params, policy, say)
      rollouts = _stack([group.rollouts for group in groups])
      verdicts = _stack([group.verdicts for group in groups])
      problems = [group.problem for group in groups]
      texts = [group.texts for group in groups]
      correct = verdicts.correct
      rollouts = shard_batch(rollouts, self._actor.model.mesh)
    rollouts = self._packed(rollouts)
    if self._refer:
      rollouts = rollouts.replace(
        reference=jax.block_until_ready(self._refer(self._frozen.reference[1], rollouts))
      )
    metrics |= {"time/sample": time.perf_counter() - began - waited_s, "time/reward": waited_s}
    return Experience(
      rollouts, shard_batch(verdicts, self._actor.model.mesh), problems, texts, correct, metrics
    )

  def _draw(self, params: Params, policy: Policy) -> _Draw:
    """Samples and judges the next generation batch."""
    config = self._config
    worker = self._actor
    number = self._drawn
    problems = self._batches[number]
    key = key_for(config.seed, Stream.SAMPLE, number)
    pending = worker.pending(problems, config.batch.group)
    rollouts = shard_batch(
      worker.generate(
        policy, problems, key, config.policy_completions, config.sampling_params, pending
      ),
      worker.model.mesh,
    )
    if self._rescore:
      rollouts = rollouts.replace(
        rescored=jax.block_until_ready(self._rescore(params, self._packed(rollouts)))
      )
    if self._frozen.guide:
      key = key_for(config.seed, Stream.GUIDE, number)
      guided = worker.generate(
        self._frozen.guide,
        problems,
        key,
        self._settings.guide_completions,
        config.sampling_params,
        pending,
        first=config.policy_completions,
      )
      rollouts = self._joined(rollouts, shard_batch(guided, worker.model.mesh))
    self._drawn += 1
    began = time.perf_counter()
    return _Draw(
      number, problems, rollouts, pending.result(), pending.texts, time.perf_counter() - began
    )

  def _packed(self, rollouts: Rollouts) -> Rollouts:
    """With the rows that the trainer lays the completions in."""
    model = self._actor.model
    if not self._config.batch.pack:
      return rollouts
    shared = attention_kind(model.config, model.mesh) != "cudnn"  # which knows no segments
    packing = plan_rows(
      fetch(rollouts.lengths), rollouts.tokens.shape[2], shared, axis_size(model.mesh, "position")
    )
    return rollouts.replace(packing=packing and shard_batch(packing, model.mesh))

  def _fill(
    self, params: Params, policy: Policy, say: Callable[[str], None]
  ) -> tuple[list[_Group], dict[str, float], float]:
    """Draws until there are n groups with contrast, those kept from the step before first (DAPO's dynamic sampling).

    Where `max_gen_batches` do not suffice, groups without contrast fill the batch up; they do not count. The metrics are of what was
    sampled, not of the batch.
    """
    n = self._n
    good = list(self._kept)
    spare = []
    waited_s = 0.0
    drawn = []
    parts = []
    for _ in range(self._config.batch.max_gen_batches):
      draw = self._draw(params, policy)
      groups = _groups(draw)
      drawn = drawn + groups
      waited_s = waited_s + draw.waited_s
      parts = [*parts, draw.found.metrics]
      for group in groups:
        (good if _has_contrast(group) else spare).append(group)
      if len(good) >= n:
        break
    short = max(n - len(good), 0)
    if short:
      say(
        f"dynamic sampling: batch.max_gen_batches = {self._config.batch.max_gen_batches} reached, {len(drawn)} groups sampled, "
        f"{len(spare)} without contrast; {n - short} of {n} groups of this step are trained on"
      )
    self._kept = [
      dataclasses.replace(
        group, rollouts=group.rollouts.replace(stale=np.ones_like(group.rollouts.stale))
      )
      for group in good[n:]
    ]
    own = ~_stack([group.rollouts.guided for group in drawn]) if self._frozen.guide else True
    correct = _stack([group.verdicts.correct for group in drawn])
    earned = _stack([group.verdicts.reward + group.verdicts.penalty for group in drawn])
    metrics = {
      "reward/accuracy": float(correct.mean(where=own)),
      "reward/mean": float(earned.mean(where=own)),
      "tokens/sampled": float(sum(group.rollouts.mask.sum() for group in drawn)),
      "groups/all_correct": float(correct.all(1, where=own).mean()),
      "groups/all_wrong": float((~correct).all(1, where=own).mean()),
      "groups/sampled": float(len(drawn)),
      "groups/dropped": float(len(spare)),
      "groups/kept": float(len(self._kept)),
      "groups/short": float(short),
      **{
        name: float(
          (np.nansum if name == "reward/no_verdict" else np.nanmean)([part[name] for part in parts])
        )
        for name in parts[0]
      },
    }
    filler = [
      dataclasses.replace(
        group, verdicts=group.verdicts.replace(valid=np.zeros_like(group.verdicts.valid))
      )
      for group in spare[len(spare) - short :]
    ]
    return good[:n] + filler, metrics, waited_s

  def leftovers(self) -> dict[str, np.ndarray] | None:
    """What the next step needs of this one, as arrays of shapes that do not change; None without dynamic sampling."""
    if not self._settings.dynamic_sampling:
      return None
    empty = leftovers_like(self._config)
    arrays = {name: np.zeros(x.shape, x.dtype) for name, x in empty.items()}
    arrays["drawn"] = np.asarray(self._drawn, np.int32)
    arrays["count"] = np.asarray(len(self._kept), np.int32)
    for i, group in enumerate(self._kept):
      arrays["place"][i] = group.place
      for name, x in _named((group.rollouts, group.verdicts)).items():
        arrays[name][i] = x
    return arrays

  def restore(self, leftovers: dict[str, np.ndarray]) -> None:
    """Takes up what `leftovers` gave.

    Raises:
      UserError: it was of a config with other shapes.
    """
    like = _pool(self._config)
    count = int(leftovers["count"])
    for name, x in leftovers_like(self._config).items():
      if name not in leftovers or leftovers[name].shape != x.shape:
        raise UserError(
          f"the groups left over from the step before do not fit this config: {name} should be of shape {x.shape}; the "
          f"sizes of batch, prompts and completions, and the algorithm, must stay what they were"
        )
    rollouts, verdicts = jax.tree.unflatten(
      jax.tree.structure(like), [np.asarray(leftovers[name]) for name in _named(like)]
    )
    texts = [
      self._actor.chat.decode([row[keep] for row, keep in zip(*group, strict=True)])
      for group in zip(rollouts.tokens, rollouts.mask, strict=True)
    ]
    places = [(int(batch), int(row)) for batch, row in leftovers["place"][:count]]
    self._kept = [
      _Group(
        (batch, row), self._batches[batch][row], _row(rollouts, i), _row(verdicts, i), texts[i]
      )
      for i, (batch, row) in enumerate(places)
    ]
    self._drawn = int(leftovers["drawn"])


def batch_like(config: Config) -> tuple[Rollouts, Rewards]:
  """The shapes and dtypes of one step's batch, with nothing allocated."""
  s = config.algorithm_built.settings
  n = config.batch.prompts
  g = config.batch.group
  t = config.sampling.max_tokens
  p = config.data.max_prompt_tokens
  like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
  token = like(jnp.int32, n, g, t)
  number = like(jnp.float32, n, g, t)
  flag = like(jnp.bool_, n, g)
  rollouts = Rollouts(
    Prompts(like(jnp.int32, n, p), like(jnp.int32, n)),
    token,
    like(jnp.bool_, n, g, t),
    number,
    number,
    flag,
    guided=flag if s.guide_completions else None,
    stale=flag if s.dynamic_sampling else None,
    rescored=number if s.tis_cap else None,
    reference=number if s.kl_weight else None,
  )
  return rollouts, Rewards(flag, like(jnp.float32, n, g), like(jnp.float32, n, g), flag)


def leftovers_like(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
  """The shapes of `Collector.leftovers`: room for a whole batch, of which `count` rows are filled."""
  number = jax.ShapeDtypeStruct((), np.int32)
  return {
    "drawn": number,
    "count": number,
    "place": jax.ShapeDtypeStruct((config.batch.prompts, 2), np.int32),
    **_named(_pool(config)),
  }


def _pool(config: Config) -> tuple[Rollouts, Rewards]:
  rollouts, verdicts = batch_like(config)
  return rollouts.replace(
    reference=None
  ), verdicts  # the reference scores what is learned from, not what is put by


def _named(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by their paths, in order."""
  return {
    jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _joined(rollouts: Rollouts, guided: Rollouts) -> Rollouts:
  """The guide's completions behind the policy's own, [n, g_own + g_guide, ...]."""
  flags = [jnp.full(x.finished.shape, value) for x, value in ((rollouts, False), (guided, True))]
  parts = [
    x.replace(prompts=None, guided=flag) for x, flag in zip((rollouts, guided), flags, strict=True)
  ]
  if rollouts.rescored is not None:
    parts[1] = parts[1].replace(rescored=guided.log_probs)
  joined = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
  return joined.replace(prompts=rollouts.prompts)


def _groups(draw: _Draw) -> list[_Group]:
  """A generation batch as groups on the host."""
  rollouts = fetch(draw.rollouts).replace(stale=np.zeros(draw.found.correct.shape, bool))
  verdicts = draw.found.verdicts
  return [
    _Group((draw.number, i), problem, _row(rollouts, i), _row(verdicts, i), draw.texts[i])
    for i, problem in enumerate(draw.problems)
  ]


def _has_contrast(group: _Group) -> bool:
  v = group.verdicts
  guided = group.rollouts.guided
  return bool(
    informative(v.correct[None], v.valid[None], None if guided is None else guided[None])[0]
  )


def _row(tree: Any, i: int) -> Any:
  return jax.tree.map(lambda x: x[i], tree)


def _stack(rows: Sequence[Any]) -> Any:
  return jax.tree.map(lambda *x: np.stack(x), *rows)
