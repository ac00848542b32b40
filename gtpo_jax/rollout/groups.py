"""Groups on the host: rows of a batch that dynamic sampling selects, keeps and saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.algorithms import has_contrast
from gtpo_jax.arrays import Prompts, Rewards, Rollouts
from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem
from gtpo_jax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class Group:
  """All completions of one prompt, in host arrays without the axis n.

  Attributes:
    index: the generation batch that it was sampled in, and its row there.
    problem: the problem.
    rollouts: its row of the batch's rollouts.
    rewards: its row of the batch's rewards.
    texts: g decoded completions.
  """

  index: tuple[int, int]
  problem: Problem
  rollouts: Rollouts
  rewards: Rewards
  texts: list[str]

  @property
  def has_contrast(self) -> bool:
    """Whether the group carries a signal; see `algorithms.has_contrast`."""
    guided = self.rollouts.guided
    batch_guided = None if guided is None else guided[None]
    return bool(has_contrast(self.rewards.correct[None], self.rewards.valid[None], batch_guided)[0])

  def as_stale(self) -> Group:
    """Returns the group marked as sampled by the policy of an earlier step."""
    stale = np.ones_like(self.rollouts.stale)
    return dataclasses.replace(self, rollouts=self.rollouts.replace(stale=stale))

  def as_filler(self) -> Group:
    """Returns the group with no valid completion: it fills a batch up and teaches nothing."""
    valid = np.zeros_like(self.rewards.valid)
    return dataclasses.replace(self, rewards=self.rewards.replace(valid=valid))


def split_groups(
  number: int, problems: Sequence[Problem], rollouts: Rollouts, rewards: Rewards, texts: Any
) -> list[Group]:
  """Returns the groups of generation batch `number`, from host arrays [n, g, ...]."""
  rollouts = rollouts.replace(stale=np.zeros(rewards.correct.shape, bool))
  return [
    Group((number, i), problem, _row(rollouts, i), _row(rewards, i), texts[i])
    for i, problem in enumerate(problems)
  ]


def stack(rows: Sequence[Any]) -> Any:
  """Stacks pytrees of host arrays along a new first axis."""
  return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def batch_like(config: Config) -> tuple[Rollouts, Rewards]:
  """Returns the shapes and dtypes of one step's batch, with nothing allocated."""
  settings = config.resolved_algorithm.settings
  n = config.batch.prompts
  g = config.batch.group
  t = config.sampling.max_tokens
  p = config.data.max_prompt_tokens
  like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
  token_float = like(jnp.float32, n, g, t)
  completion_flag = like(jnp.bool_, n, g)
  completion_float = like(jnp.float32, n, g)
  rollouts = Rollouts(
    prompts=Prompts(like(jnp.int32, n, p), like(jnp.int32, n)),
    tokens=like(jnp.int32, n, g, t),
    mask=like(jnp.bool_, n, g, t),
    log_probs=token_float,
    entropy=token_float,
    finished=completion_flag,
    guided=completion_flag if settings.guide_completions else None,
    stale=completion_flag if settings.dynamic_sampling else None,
    rescored=token_float if settings.tis_cap else None,
    reference=token_float if settings.kl_weight else None,
  )
  rewards = Rewards(
    correct=completion_flag,
    reward=completion_float,
    penalty=completion_float,
    valid=completion_flag,
    scored=completion_flag,
  )
  return rollouts, rewards


def leftovers_like(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of `save_groups`: space for one batch; `count` rows are used."""
  number = jax.ShapeDtypeStruct((), np.int32)
  return {
    "drawn": number,
    "count": number,
    "place": jax.ShapeDtypeStruct((config.batch.prompts, 2), np.int32),
    **_named_leaves(_saved_like(config)),
  }


def save_groups(config: Config, groups: Sequence[Group], drawn: int) -> dict[str, np.ndarray]:
  """Returns groups as arrays whose shapes depend on the config only, for a checkpoint.

  Args:
    config: the run's config.
    groups: at most `batch.prompts` of them.
    drawn: generation batches sampled so far.
  """
  arrays = {name: np.zeros(x.shape, x.dtype) for name, x in leftovers_like(config).items()}
  arrays["drawn"] = np.asarray(drawn, np.int32)
  arrays["count"] = np.asarray(len(groups), np.int32)
  for i, group in enumerate(groups):
    arrays["place"][i] = group.index
    for name, x in _named_leaves((group.rollouts, group.rewards)).items():
      arrays[name][i] = x
  return arrays


def restore_groups(
  config: Config, arrays: dict[str, np.ndarray]
) -> list[tuple[tuple[int, int], Rollouts, Rewards]]:
  """Returns the index, rollouts and rewards of each group that `save_groups` saved.

  Raises:
    UserError: the arrays were saved under a config with other shapes.
  """
  for name, x in leftovers_like(config).items():
    if name not in arrays or arrays[name].shape != x.shape:
      raise UserError(
        f"the groups kept from the previous step do not fit this config: {name} should have shape "
        f"{x.shape}; the algorithm and the sizes of batch, prompts and completions must not change"
      )
  like = _saved_like(config)
  leaves = [np.asarray(arrays[name]) for name in _named_leaves(like)]
  rollouts, rewards = jax.tree.unflatten(jax.tree.structure(like), leaves)
  indices = arrays["place"][: int(arrays["count"])]
  return [
    ((int(batch), int(row)), _row(rollouts, i), _row(rewards, i))
    for i, (batch, row) in enumerate(indices)
  ]


def _saved_like(config: Config) -> tuple[Rollouts, Rewards]:
  rollouts, rewards = batch_like(config)
  # The reference scores a group when it is trained on, not when it is kept.
  return rollouts.replace(reference=None), rewards


def _named_leaves(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a pytree by their paths, in order."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _row(tree: Any, i: int) -> Any:
  return jax.tree.map(lambda x: x[i], tree)
