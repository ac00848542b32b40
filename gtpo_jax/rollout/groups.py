"""Groups on the host: the rows of a batch that are selected, kept for later steps and saved."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.algorithms import has_contrast
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.config import Config, recorded_routes
from gtpo_jax.data.records import Problem
from gtpo_jax.environments.metrics import Tallies
from gtpo_jax.environments.turns import Episode, load_episode, save_episode
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.completion import NUMBERS, Completion, Prompt, pad_completions

SNAPSHOTS = "snapshots"  # the name of the array of snapshots in a checkpoint


@dataclasses.dataclass(frozen=True)
class RewardResult:
  """The scores of one batch, in host arrays."""

  correct: np.ndarray  # bool[n, g]; False if not scored
  # bool[n, g]; whether the completion has a verdict and every part of its reward. A completion
  # that was cut off needs no verdict: it is wrong
  scored: np.ndarray
  reward: np.ndarray  # f32[n, g], the weighted sum of the parts
  # f32[n, g], the part of `reward` that is added to entropy-shaped rewards: the sum of the parts
  # other than "correct"; 0 for algorithms without entropy shaping
  added: np.ndarray
  penalty: np.ndarray  # f32[n, g] <= 0, the length penalty
  valid: np.ndarray  # bool[n, g]; `scored`, and not removed by the overlong filter
  # the mean of each part other than "correct", the number of completions that are not scored, and
  # the metrics of episodes and of a judge
  tallies: Tallies
  # f32[n, g, k], the parts without their weights; None unless the algorithm needs them
  parts: np.ndarray | None = None
  part_weights: np.ndarray | None = None  # f32[n, k], their weights; None likewise

  @property
  def metrics(self) -> dict[str, float]:
    """The metrics by name."""
    return self.tallies.metrics

  @property
  def rewards(self) -> Rewards:
    """What the update reads, in host arrays."""
    return Rewards(
      self.correct,
      self.reward - self.added,
      self.penalty + self.added,
      self.valid,
      self.scored,
      parts=self.parts,
      part_weights=self.part_weights,
    )


@dataclasses.dataclass(frozen=True)
class Group:
  """All completions of one prompt."""

  index: tuple[int, int]  # the generation batch that it belongs to, and its row there
  problem: Problem  # the problem
  version: int  # the number of updates when it began
  # the policy's, then a guide's once these have ended; () until it is sampled
  completions: Sequence[Completion] = ()
  # their rewards, in host arrays without the axis n; None until all completions have ended and
  # are scored
  rewards: Rewards | None = None
  # with an environment, a snapshot of the episodes of a group without rewards, as a text; "" if
  # there is none
  snapshot: str = ""

  @property
  def texts(self) -> list[str]:
    """The decoded completions, once they are scored."""
    return [completion.text for completion in self.completions]

  @property
  def episodes(self) -> list[Episode | None] | None:
    """The episodes of the completions that have ended; None if there are none."""
    return episodes_of(self.completions)

  @property
  def own(self) -> np.ndarray:
    """bool[g], whether the policy draws each completion, and no guide."""
    return np.asarray([not completion.guided for completion in self.completions])

  @property
  def has_contrast(self) -> bool:
    """Whether the group carries a signal; see `algorithms.has_contrast`."""
    rewards = self.rewards
    return bool(has_contrast(rewards.correct[None], rewards.valid[None], ~self.own[None])[0])

  def stale(self, version: int) -> np.ndarray:
    """Returns which completions have tokens from before update `version`, bool[g]."""
    drawn = [completion.versions[completion.mask] for completion in self.completions]
    return np.asarray([(versions < version).any() for versions in drawn])

  def mask(self, t: int) -> np.ndarray:
    """Returns the tokens that were drawn, bool[g, t]."""
    mask = np.zeros((len(self.completions), t), bool)
    for row, completion in zip(mask, self.completions, strict=True):
      row[: completion.length] = completion.mask
    return mask

  def as_filler(self) -> Group:
    """Returns the group with no valid completion, to fill up a batch without affecting the loss."""
    valid = np.zeros_like(self.rewards.valid)
    return dataclasses.replace(self, rewards=self.rewards.replace(valid=valid))


def episodes_of(completions: Sequence[Completion]) -> list[Episode | None] | None:
  """Returns the episode of each completion; None if there are none."""
  episodes = [completion.episode for completion in completions]
  return episodes if any(episodes) else None


def stack(rows: Sequence[Any]) -> Any:
  """Stacks pytrees of host arrays along a new first axis."""
  return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def rollouts_of(config: Config, groups: Sequence[Group], pad: int) -> Rollouts:
  """Returns the completions of groups as arrays [n, g, t] on the host."""
  return pad_completions(
    [group.completions for group in groups],
    config.sampling.max_tokens,
    config.data.max_prompt_tokens,
    pad,
    drawn_log_probs=config.needs_drawn_log_probs,
    versions=bool(config.sampling.staleness),
    conversations=config.conversations or 0,
  )


def batch_like(config: Config) -> tuple[Rollouts, Rewards]:
  """Returns the shapes and dtypes of one step's batch, without allocating it."""
  algorithm = config.resolved_algorithm
  settings = algorithm.settings
  taught = algorithm.recipe.distillation
  n = config.batch.prompts
  g = config.batch.group
  t = config.sampling.max_tokens
  p = config.data.max_prompt_tokens
  like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
  token_float = like(jnp.float32, n, g, t)
  completion_flag = like(jnp.bool_, n, g)
  completion_float = like(jnp.float32, n, g)
  prompts = lambda p: Prompts(like(jnp.int32, n, p), like(jnp.int32, n))
  shape = recorded_routes(config)
  routes = lambda *leading: shape and shape.like(*leading)
  teacher_prompts = prompts(config.teacher_prompt_tokens) if config.teacher.prompt else None
  c = config.conversations
  k = len(config.reward.weighted)
  by_part = "parts" in algorithm.recipe.needs
  rollouts = Rollouts(
    prompts=prompts(p).replace(routes=routes(n, p)),
    tokens=like(jnp.int32, n, g, t),
    present=like(jnp.bool_, n, g, t),
    mask=like(jnp.bool_, n, g, t),
    log_probs=token_float,
    entropy=token_float,
    finished=completion_flag,
    routes=routes(n, g, t),
    guided=completion_flag if settings.guide_completions else None,
    stale=completion_flag if settings.dynamic_sampling or config.sampling.staleness else None,
    versions=like(jnp.int32, n, g, t) if config.sampling.staleness else None,
    drawn_log_probs=token_float if config.needs_drawn_log_probs else None,
    rescored=token_float if algorithm.recipe.corrections.needs_rescoring else None,
    reference=token_float if settings.kl_weight else None,
    teacher=token_float if taught and taught.sampled else None,
    score_norms=token_float if "score_norms" in algorithm.recipe.needs else None,
    teacher_prompts=teacher_prompts,
    begins=like(jnp.int32, n, g, c) if c else None,
    gaps=None if config.env.is_used else False,  # with episodes, every batch decides by itself
  )
  rewards = Rewards(
    correct=completion_flag,
    reward=completion_float,
    penalty=completion_float,
    valid=completion_flag,
    scored=completion_flag,
    turn_reward=token_float if algorithm.recipe.turns else None,
    turn_state=like(jnp.int32, n, g, t) if algorithm.recipe.turns else None,
    parts=like(jnp.float32, n, g, k) if by_part else None,
    part_weights=like(jnp.float32, n, k) if by_part else None,
    value_gains=token_float if algorithm.recipe.continuations else None,
  )
  return rollouts, rewards


def without_scores(rollouts: Rollouts) -> Rollouts:
  """Returns rollouts without what is computed when the batch is placed."""
  return rollouts.replace(rescored=None, reference=None, teacher=None, score_norms=None)


def leftovers_like(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of what `save_groups` returns: space for all groups that may be kept.

  `count` rows of it are used.
  """
  like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
  rows = kept_rows(config)
  return {
    "begun": like(np.int32),
    "count": like(np.int32),
    "place": like(np.int32, rows, 2),
    "version": like(np.int32, rows),
    "complete": like(np.bool_, rows),
    **_named_leaves(_saved_like(config)),
  }


def save_groups(config: Config, groups: Sequence[Group], begun: int) -> dict[str, np.ndarray]:
  """Returns groups as arrays for a checkpoint.

  Their shapes depend only on the config, except for snapshots of episodes.

  Args:
    config: the run's config.
    groups: the groups kept for later steps.
    begun: the number of groups that the run has begun.
  """
  arrays = {name: np.zeros(x.shape, x.dtype) for name, x in leftovers_like(config).items()}
  arrays["begun"] = np.asarray(begun, np.int32)
  arrays["count"] = np.asarray(len(groups), np.int32)
  for i, group in enumerate(groups):
    arrays["place"][i] = group.index
    arrays["version"][i] = group.version
    arrays["complete"][i] = group.rewards is not None
    rollouts = row_of(rollouts_of(config, [group], pad=0), 0)
    for name, x in _named_leaves((rollouts, group.rewards)).items():
      arrays[name][(i, *map(slice, x.shape))] = x  # the guide's completions may be missing
  of_group = lambda x: (
    json.dumps(list(map(save_episode, x.episodes))) if x.rewards and x.episodes else x.snapshot
  )
  if any(snapshots := list(map(of_group, groups))):
    arrays[SNAPSHOTS] = np.frombuffer(json.dumps(snapshots).encode(), np.uint8)
  return arrays


def restore_groups(
  config: Config,
  arrays: dict[str, np.ndarray],
  problem_at: Callable[[tuple[int, int]], Problem],
  decode: Callable[[Sequence[np.ndarray]], list[str]],
) -> list[Group]:
  """Returns the groups that `save_groups` saved.

  Args:
    config: the run's config.
    arrays: from `save_groups`.
    problem_at: returns the problem of a group's index.
    decode: turns rows of token ids into texts.
  """
  for name, x in leftovers_like(config).items():
    if name not in arrays or arrays[name].shape != x.shape:
      raise UserError(
        f"the groups kept from the previous step do not fit this config: {name} should have shape "
        f"{x.shape}; the algorithm, sampling.staleness and the sizes of batch, prompts and "
        "completions must not change"
      )
  like = _saved_like(config)
  leaves = [np.asarray(arrays[name]) for name in _named_leaves(like)]
  rollouts, rewards_of = jax.tree.unflatten(jax.tree.structure(like), leaves)
  count = int(arrays["count"])
  saved = arrays.get(SNAPSHOTS)
  snapshots = [""] * count if saved is None else json.loads(np.asarray(saved, np.uint8).tobytes())
  groups = []
  for i in range(count):
    index = tuple(arrays["place"][i].tolist())
    complete = bool(arrays["complete"][i])
    version = int(arrays["version"][i])
    size = config.batch.group if complete else config.policy_completions
    completions = _restored(config, row_of(rollouts, i), size, index, version)
    if complete:
      episodes = (
        list(map(load_episode, json.loads(snapshots[i]))) if snapshots[i] else [None] * size
      )
      texts = decode([completion.tokens for completion in completions])
      for completion, text, episode in zip(completions, texts, episodes, strict=True):
        completion.text = text
        completion.episode = episode
    rewards = row_of(rewards_of, i) if complete else None
    snapshot = "" if complete else snapshots[i]
    groups.append(Group(index, problem_at(index), version, completions, rewards, snapshot))
  return groups


def _restored(
  config: Config, rollouts: Rollouts, size: int, index: tuple[int, int], version: int
) -> list[Completion]:
  """Returns the first `size` completions of a group from its row of a checkpoint."""
  prompts = rollouts.prompts
  width = len(prompts.tokens) - int(prompts.lengths)
  routes = None if prompts.routes is None else prompts.routes[width:]
  prompt = Prompt(prompts.tokens[width:].tolist(), routes)
  completions = []
  for j in range(size):
    present = rollouts.present[j]
    completion = Completion(
      prompt,
      np.zeros(2, np.uint32),
      limit=int(present.sum()),
      route_shape=recorded_routes(config),
      group=index,
      index=j,
      guided=rollouts.guided is not None and bool(rollouts.guided[j]),
    )
    arrays = {name: getattr(rollouts, name) for name in ("tokens", "mask", *NUMBERS[:2])}
    drawn = rollouts.drawn_log_probs
    arrays["drawn_log_probs"] = np.zeros_like(rollouts.log_probs) if drawn is None else drawn
    arrays["plain_log_probs"] = np.zeros_like(rollouts.log_probs)  # no turn is continued with them
    if rollouts.routes is not None:
      arrays["routes"] = rollouts.routes
    tokens = {name: np.array(x[j, present]) for name, x in arrays.items()}
    completion.replace(tokens, bool(rollouts.finished[j]))
    if rollouts.versions is None:  # all its tokens were drawn in one step
      completion.mark_version(version)
    else:
      completion.versions = np.array(rollouts.versions[j, present])
    if rollouts.begins is not None:
      completion.begins = [x for x in rollouts.begins[j].tolist() if x < len(present)]
    completions.append(completion)
  return completions


def kept_rows(config: Config) -> int:
  """Returns the most groups that are kept for later steps."""
  return config.batch.prompts * max(config.sampling.staleness, 1)


def _saved_like(config: Config) -> tuple[Rollouts, Rewards]:
  rows = kept_rows(config)
  rollouts, rewards = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch_like(config)
  )
  # These are only known when the group is trained on.
  unplaced = without_scores(rollouts).replace(stale=None, teacher_prompts=None, gaps=None)
  return unplaced, rewards


def _named_leaves(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a pytree by their paths, in order."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def row_of(tree: Any, i: int) -> Any:
  """Returns row i of a pytree of arrays."""
  return jax.tree.map(lambda x: x[i], tree)
