"""Observes which tokens and turns of a batch decide its verdicts, on tasks that know it.

`rewards.truth` marks the characters of a completion; here the marks become one code per token. A
code is 0 for a token of which the truth is unknown. Otherwise it is 1 + the index of its class in
`CLASSES`, and 8 more if the token is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gtpo_jax.algorithms import segment_gains
from gtpo_jax.arrays import KeyStream
from gtpo_jax.config import Config
from gtpo_jax.data.chat import Chat
from gtpo_jax.environments.episodes import Rules
from gtpo_jax.environments.turns import Episode
from gtpo_jax.models.params import Params
from gtpo_jax.rewards import MARKS, knows_truth, truth_marks
from gtpo_jax.rollout.batch import Batch
from gtpo_jax.rollout.collector import group_keys
from gtpo_jax.rollout.continuations import ValueEstimator
from gtpo_jax.rollout.groups import Group
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.scoring.turn_signals import write_turns
from gtpo_jax.rollout.worker import RolloutWorker

CLASSES = ("inert", "filler", "copied", "decisive")
WRONG = 8
UNCERTAIN = 0.9  # completions are cut before tokens with a smaller probability
MOST_SEGMENTS = 8  # of a completion whose values are measured
# By whom a turn is followed in its true advantage: the best player, or the policy that played it.
PLAYERS = ("best", "policy")
_CODES = dict(zip(MARKS, (1, 2, 3, 4, 3 + WRONG, 4 + WRONG), strict=True))


def decides(codes: np.ndarray) -> np.ndarray:
  """Returns which tokens decide the verdict, bool like `codes`: decisive and copied ones."""
  return (codes & ~np.uint8(WRONG)) >= 3


def is_wrong(codes: np.ndarray) -> np.ndarray:
  """Returns which tokens are wrong, bool like `codes`."""
  return codes >= WRONG


def of_class(codes: np.ndarray, name: str) -> np.ndarray:
  """Returns which tokens are of a class of `CLASSES`, right or wrong, bool like `codes`."""
  return (codes & ~np.uint8(WRONG)) == 1 + CLASSES.index(name)


class Segments(NamedTuple):
  """What the segments of a group's completions gain in value, measured by continuations."""

  group: int  # the index of the group in its batch
  number: np.ndarray  # i32[g, t], the number of the segment of each token, from 0; -1 on others
  # f32[g, t], the value after its segment minus the value before it; NaN if unknown
  gain: np.ndarray
  error: float  # the mean standard error of the values
  tokens: int  # the tokens that were drawn


class BatchTruth(NamedTuple):
  """The truth of a batch, on the host."""

  # u8[n, g, t], the tokens' codes; None if no problem of the batch knows them
  tokens: np.ndarray | None
  # f32[n, g, t] by player, the true advantages of turns; only the players for whom some are known
  turns: Mapping[str, np.ndarray]
  # what segments of one group gain in value; None if that was not measured
  segments: Segments | None = None


def batch_truth(batch: Batch, worker: RolloutWorker, own_verifier: bool = False) -> BatchTruth:
  """Returns the truth of a batch.

  Args:
    batch: of a step.
    worker: sampled it.
    own_verifier: see `token_truth`.
  """
  groups = batch.groups
  t = batch.rollouts.tokens.shape[2]
  turns = turn_truth(
    np.stack([group.mask(t) for group in groups]),
    [group.problem.row for group in groups],
    [group.episodes for group in groups],
    worker.episodes.rules if worker.episodes else None,
  )
  return BatchTruth(token_truth(groups, t, worker.chat, own_verifier), turns)


def segment_truth(
  config: Config,
  batch: Batch,
  worker: RolloutWorker,
  reward_manager: RewardManager,
  params: Params,
  stopping: Callable[[], bool],
) -> Segments:
  """Measures what segments of the group with the most mixed verdicts gain in value.

  Completions are cut before uncertain tokens, into `MOST_SEGMENTS` segments at most.
  """
  correct, scored = batch.correct, batch.scored
  index = int(np.argmax(np.minimum((correct & scored).sum(1), (~correct & scored).sum(1))))
  group = batch.groups[index]
  policy = worker.policy(params)
  keys = group_keys(config, policy.engine, KeyStream.MEASURE, [group], config.batch.group)
  cuts = []
  for completion in group.completions:
    uncertain = np.exp(completion.arrays()["log_probs"][1:]) < UNCERTAIN
    points = 1 + np.flatnonzero(uncertain & completion.mask[1:])
    places = np.linspace(0, len(points), MOST_SEGMENTS + 1)[1:-1].astype(int)
    cuts.append(points.tolist() if len(points) < MOST_SEGMENTS else points[places].tolist())
  prefixes = [[[0, *x] for x in cuts]]
  estimator = ValueEstimator(worker, reward_manager, policy, config.sampling_params, stopping)
  values = estimator.values([group], prefixes, config.log.continuations, keys)
  shape = (len(cuts), config.sampling.max_tokens)
  number = np.full(shape, -1, np.int32)
  gain = np.full(shape, np.nan, np.float32)
  rewards = group.rewards
  for j, completion in enumerate(group.completions):
    m = completion.length
    if rewards.scored[j]:
      last = rewards.reward[j] + rewards.penalty[j]
      gain[j, :m] = segment_gains([*values.mean[0, j, : len(cuts[j]) + 1], last], cuts[j], m)
      number[j, :m] = np.searchsorted(cuts[j], np.arange(m), side="right")
  known = values.error[~np.isnan(values.error)]
  error = float(known.mean()) if known.size else np.nan
  return Segments(index, number, gain, error, values.tokens)


def token_truth(
  groups: Sequence[Group], t: int, chat: Chat, own_verifier: bool = False
) -> np.ndarray | None:
  """Returns the truth codes of a batch, u8[n, g, t]; None if no problem knows them.

  A token of several characters takes the strongest of their marks. A stop token is inert. The truth
  of tokens that were not drawn is unknown.

  If a function of the user decides (`own_verifier`), instead of the verifier for the problem's
  kind, only a problem's column `truth` has marks.
  """
  kind_of = lambda problem: "" if own_verifier else problem.kind
  if not any(knows_truth(kind_of(x.problem), x.problem.extra) for x in groups):
    return None
  codes = np.zeros((len(groups), len(groups[0].completions), t), np.uint8)
  for i, group in enumerate(groups):
    problem = group.problem
    prompt = problem.messages[-1]["content"]
    for j, completion in enumerate(group.completions):
      text = completion.text
      marks = truth_marks(kind_of(problem), prompt, text, problem.answer, problem.extra)
      if marks is not None:
        found = completion_codes(completion.tokens, text, marks, chat)
        codes[i, j, : completion.length] = np.where(completion.mask, found, 0)
  return codes


def completion_codes(ids: np.ndarray, text: str, marks: str, chat: Chat) -> np.ndarray:
  """Returns the codes of a completion's tokens, u8[m], from the marks of its characters.

  A text may be cut before a stop string; tokens after the cut are inert. The codes are all 0 if the
  texts of the tokens do not add up to a text that begins with `text`.
  """
  stop = np.isin(ids, chat.stop)
  pieces = chat.pieces(ids[~stop])
  codes = np.full(len(ids), _CODES["i"], np.uint8)
  if not "".join(pieces).startswith(text) or len(marks) != len(text):
    return np.zeros_like(codes)
  ends = np.cumsum([len(piece) for piece in pieces], dtype=int)
  codes[~stop] = [
    max((_CODES[mark] for mark in marks[end - len(piece) : end]), default=_CODES["i"])
    for piece, end in zip(pieces, ends, strict=True)
  ]
  return codes


def turn_truth(
  mask: np.ndarray,
  rows: Sequence[Mapping[str, Any]],
  episodes: Sequence[Sequence[Episode] | None],
  rules: Rules | None,
) -> dict[str, np.ndarray]:
  """Returns the true advantages of the turns of a batch by `PLAYERS`, f32[n, g, t].

  They are on all tokens of a turn, and NaN elsewhere and where they are unknown. Players for whom
  all are unknown are left out.

  Episodes, of n rows of the data, are None for a group without any; the mask bool[n, g, t] has the
  tokens that were drawn.
  """
  played = [i for i, group in enumerate(episodes) if group]
  if not played or rules is None:
    return {}
  of_played = [episodes[i] for i in played]
  by_policy = rules.policy_truth([rows[i] for i in played], of_played)
  by_best = [[episode.truths for episode in group] for group in of_played]
  found = {}
  for player, groups in zip(PLAYERS, (by_best, by_policy), strict=True):
    truth = np.full(mask.shape, np.nan, np.float32)
    for i, group in zip(played, groups or (), strict=bool(groups)):
      for j, values in enumerate(group):
        write_turns(values, mask[i, j], truth[i, j])
    if not np.isnan(truth).all():
      found[player] = truth
  return found
