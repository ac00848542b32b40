"""The batch of a step: how it is placed on the mesh, and what the update and the logs read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem
from gtpo_jax.environments.turns import Episode
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.rollout.groups import Group, batch_like, rollouts_of, stack, without_scores
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.mesh import axis_size, batch_shards, named_sharding, shard_batch
from gtpo_jax.sampling.spans import Span
from gtpo_jax.training.log_probs import make_scorer
from gtpo_jax.training.packing import abstract_packing, plan_rows, row_shapes


@dataclasses.dataclass(frozen=True)
class Batch:
  """A step's batch."""

  groups: Sequence[Group]  # n groups, with their problems, completions and rewards on the host
  rollouts: Rollouts  # [n, g, ...], on the mesh
  rewards: Rewards  # [n, g], on the mesh
  # statistics of all sampled completions, dropped ones included, and the time spent
  metrics: dict[str, float]
  # when the step's prompts were prefilled, its tokens decoded and its rewards awaited, in seconds
  # since the beginning of the step
  spans: list[Span]

  @property
  def problems(self) -> list[Problem]:
    """n problems."""
    return [group.problem for group in self.groups]

  @property
  def texts(self) -> list[list[str]]:
    """[n][g], decoded completions."""
    return [group.texts for group in self.groups]

  @property
  def episodes(self) -> list[list[Episode | None] | None]:
    """[n][g]; None for a group that has none."""
    return [group.episodes for group in self.groups]

  @property
  def correct(self) -> np.ndarray:
    """bool[n, g], on the host."""
    return np.stack([group.rewards.correct for group in self.groups])

  @property
  def scored(self) -> np.ndarray:
    """bool[n, g], on the host; False if there is no verdict."""
    return np.stack([group.rewards.scored for group in self.groups])

  def first_completion(self, i: int) -> tuple[str, str, bool | None]:
    """Returns problem i, its first completion, and whether it is correct (None: no verdict)."""
    group = self.groups[i]
    verdict = bool(group.rewards.correct[0]) if group.rewards.scored[0] else None
    return group.problem.messages[-1]["content"], group.completions[0].text, verdict

  def add_metrics(self, update: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of the update together with `metrics`.

    With dynamic sampling, some names occur in both. Metrics of all sampled groups keep the name;
    the groups that the update trained on have them as `kept/NAME`.
    """
    renamed = {f"kept/{name}" if name in self.metrics else name: update[name] for name in update}
    return {**renamed, **self.metrics}

  def to_arrays(self) -> dict[str, np.ndarray]:
    """Returns the problems' ids and everything the update reads, as host arrays by dotted name.

    Every process must call it.
    """
    batch = fetch({"rollouts": self.rollouts, "rewards": self.rewards})
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {"problems": np.asarray([problem.id for problem in self.problems]), **arrays}


def abstract_batches(config: Config, mesh: Mesh) -> list[tuple[Rollouts, Rewards]]:
  """Returns the shapes and shardings of every batch that the update may get, the largest last."""
  rollouts, rewards = batch_like(config)
  n, g, t = rollouts.tokens.shape
  packs = config.batch.packs(batch_shards(mesh))
  shapes = row_shapes(g, t, axis_size(mesh, "position")) if packs else [(g, t)]
  begins = rollouts.begins
  rollouts = rollouts.replace(begins=None)
  packings = [abstract_packing(n, g, t, *x, begins) for x in shapes]
  batches = [(rollouts.replace(packing=packing), rewards) for packing in packings]
  sharding = named_sharding(mesh, "batch")
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batches)


class Placement:
  """Places groups on the mesh as the batch of a step, with what the trainer computes before it.

  This is the packing (which completions share a row in the trainer's forward pass), the log-probs
  of the policy, if a correction needs them, and of the reference and the teacher, and the norms of
  the policy's scores, if a baseline per token needs them.
  """

  def __init__(
    self,
    config: Config,
    worker: RolloutWorker,
    scorers: Mapping[str, tuple[Transformer, Params | None]],
  ):
    """Args:
    config: the run's config.
    worker: encodes the teacher's prompts; its model is the trained one.
    scorers: from `FrozenPolicies`.
    """
    batch = config.batch
    model = worker.model
    corrections = config.resolved_algorithm.recipe.corrections
    scorer = lambda model, replays=False, norms=False: make_scorer(
      model, config.sampling.temperature, batch.parts, batch.head_chunk, replays, norms
    )
    self._config = config
    self._worker = worker
    self._mesh = model.mesh
    self._pack = batch.packs(batch_shards(model.mesh))
    self._rescore = scorer(model, True) if corrections.needs_rescoring else None
    self._scorers = {name: (scorer(model), params) for name, (model, params) in scorers.items()}
    if "score_norms" in config.resolved_algorithm.recipe.needs:
      self._scorers["score_norms"] = (scorer(model, True, True), None)
    self._keep_guided = jax.jit(
      lambda log_probs, rollouts: jnp.where(
        rollouts.guided[..., None], rollouts.log_probs, log_probs
      )
    )

  def batches(self) -> list[tuple[Rollouts, Rewards]]:
    """Returns the shapes and shardings of everything that `place` may return."""
    return abstract_batches(self._config, self._mesh)

  def scoring_programs(self, params: Params) -> list[Callable[[], jax.stages.Lowered]]:
    """Returns what lowers every program that scores a batch; `params` are the policy's."""
    unscored = [without_scores(rollouts) for rollouts, _ in self.batches()]
    scorers = [(self._rescore, params, unscored)] if self._rescore else []
    for name, (score, frozen) in self._scorers.items():
      read = [x.for_teacher for x in unscored] if name == "teacher" else unscored
      scorers.append((score, params if frozen is None else frozen, read))
    return [functools.partial(score.lower, x, y) for score, x, read in scorers for y in read]

  def place(
    self, params: Params, groups: Sequence[Group], version: int
  ) -> tuple[Rollouts, Rewards]:
    """Returns the rollouts and the rewards of groups, [n, g, ...].

    Args:
      params: the policy's parameters in training layout.
      groups: n complete groups.
      version: the number of updates that `params` have had.
    """
    config = self._config
    rollouts = rollouts_of(config, groups, self._worker.chat.pad)
    rollouts = rollouts.replace(gaps=None if config.env.is_used else False)
    if config.resolved_algorithm.settings.dynamic_sampling or config.sampling.staleness:
      rollouts = rollouts.replace(stale=np.stack([group.stale(version) for group in groups]))
    if self._config.teacher.prompt:
      rollouts = rollouts.replace(teacher_prompts=self._teacher_prompts(groups))
    if self._pack or rollouts.begins is not None:
      shards = axis_size(self._mesh, "position")
      t = rollouts.tokens.shape[2]
      packing = plan_rows(rollouts.lengths, t, shards, rollouts.begins, self._pack)
      rollouts = rollouts.replace(packing=packing, begins=None)
    rollouts = shard_batch(rollouts, self._mesh)
    scored = {}
    if self._rescore:
      log_probs = self._rescore(params, rollouts)
      if rollouts.guided is not None:  # the ratio of a guide's token uses the guide's log-probs
        log_probs = self._keep_guided(log_probs, rollouts)
      scored["rescored"] = jax.block_until_ready(log_probs)
    for name, (score, frozen) in self._scorers.items():
      read = rollouts.for_teacher if name == "teacher" else rollouts
      scored[name] = jax.block_until_ready(score(params if frozen is None else frozen, read))
    rollouts = rollouts.replace(**scored)
    return rollouts, shard_batch(stack([group.rewards for group in groups]), self._mesh)

  def _teacher_prompts(self, groups: Sequence[Group]) -> Prompts:
    """Returns the prompts that the teacher reads, padded on the left."""
    rows = [self._worker.encode_for_teacher(group.problem) for group in groups]
    tokens = np.full(
      (len(rows), self._config.teacher_prompt_tokens), self._worker.chat.pad, np.int32
    )
    for i, row in enumerate(rows):
      tokens[i, tokens.shape[1] - len(row) :] = row
    return Prompts(tokens, np.asarray([len(row) for row in rows], np.int32))
