"""Per-step records for the credit viewer of `gtpo report`: WORKDIR/credit/STEP.npz.

A record stores the algorithm's inputs for the complete batch, so that the report can recompute
entropy terms and z-scores exactly, with any method. It stores the tokens of only a few groups.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.algorithms import Algorithm, has_contrast
from gtpo_jax.arrays import Rollouts, Signals
from gtpo_jax.data.chat import Chat
from gtpo_jax.logs.log_files import describe_steps
from gtpo_jax.logs.truth import PLAYERS, BatchTruth
from gtpo_jax.rollout.batch import Batch
from gtpo_jax.runtime.distributed import fetch, is_first_process
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.files import set_aside
from gtpo_jax.runtime.paths import write_atomically
from gtpo_jax.sampling.spans import Span

FOLDER = "credit"
FORMAT = 1
PHASES = ("prefill", "decode", "reward", "update")  # of a step; a record stores their indices
MAX_CHECKED_BYTES = 16 * 2**20
UNREADABLE = (  # errors that damaged records raise
  OSError,
  EOFError,
  ValueError,
  LookupError,
  TypeError,
  RuntimeError,
  zipfile.BadZipFile,
  zlib.error,
)


@dataclasses.dataclass(frozen=True)
class CreditRecord:
  """A step's batch of n groups of g completions with up to t tokens.

  The report shows k of the groups token by token.
  """

  step: int
  lengths: np.ndarray  # i32[n, g], tokens
  mask: np.ndarray  # bool[n, g, t], the tokens that the policy has drawn
  entropy: np.ndarray  # f32[n, g, t], nats; 0 after the end of a completion
  correct: np.ndarray  # bool[n, g]
  reward: np.ndarray  # f32[n, g]
  penalty: np.ndarray  # f32[n, g]
  parts: np.ndarray  # f32[n, g, parts], as in `Rewards`; no parts if the algorithm needs none
  part_weights: np.ndarray  # f32[n, parts]
  valid: np.ndarray  # bool[n, g]; False: excluded from loss and statistics
  finished: np.ndarray  # bool[n, g]; False: cut off at the length limit
  guided: np.ndarray  # bool[n, g]; True: sampled from the guide
  divergence: np.ndarray  # f32[n, g, t], nats, from the teacher; 0 without one
  turn_reward: np.ndarray  # f32[n, g, t], as in `Rewards`; 0 if turns are not compared
  turn_state: np.ndarray  # i32[n, g, t], as in `Rewards`; 0 if turns are not compared
  score_norms: np.ndarray  # f32[n, g, t], as in `Rollouts`; 0 unless the algorithm needs them
  value_gains: np.ndarray  # f32[n, g, t], as in `Rewards`; 0 unless the algorithm needs them
  turn_truth: np.ndarray  # f32[n, g, t], see `_turn_truth`; NaN if unknown
  truth: np.ndarray  # u8[n, g, t], the codes of `logs.truth`; all 0 if they are unknown
  shown: np.ndarray  # i32[k], indices of the groups shown
  ids: np.ndarray  # i32[k, g, t], token ids; 0 after the end of a completion, like the next two
  log_probs: np.ndarray  # f32[k, g, t], nats
  piece: np.ndarray  # i32[k, g, t], indices into `pieces`
  pieces: list[str]  # the distinct texts of tokens
  prompts: list[str]  # [k], the last message of each prompt
  answers: list[str]  # [k]
  stops: list[list[str]]  # [k][g], why episodes ended; "" without an environment
  timeline: np.ndarray  # f32[spans, 4], see `step_timeline`

  @property
  def present(self) -> np.ndarray:
    """bool[n, g, t], True on the tokens of completions, drawn or not."""
    return np.arange(self.entropy.shape[-1]) < self.lengths[..., None]

  def signals(self, algorithm: Algorithm) -> Signals:
    """Returns the inputs of the algorithm's advantages in an update."""
    recipe = algorithm.recipe
    signals = Signals(
      mask=self.mask,
      entropy=self.entropy,
      correct=self.correct,
      reward=self.reward,
      penalty=self.penalty,
      guided=self.guided if recipe.guide.guide_completions else None,
      divergence=self.divergence if recipe.distillation else None,
      turn_reward=self.turn_reward if recipe.turns else None,
      turn_state=self.turn_state if recipe.turns else None,
      parts=self.parts,
      part_weights=self.part_weights,
      score_norms=self.score_norms,
      value_gains=self.value_gains,
    )
    return signals.only(self.valid)


# Arrays [n, g, t] that are 0 unless the run computes them; records of runs before 0.4.0 lack them.
OPTIONAL = {
  "turn_reward": np.float32,
  "turn_state": np.int32,
  "score_norms": np.float32,
  "value_gains": np.float32,
}
# Stored for all tokens of the batch, without padding.
OF_BATCH = ("mask", "entropy", "divergence", *OPTIONAL, "turn_truth", "truth")
PER_TOKEN = (*OF_BATCH, "ids", "log_probs", "piece")  # the others only for the groups shown
TEXTS = ("pieces", "prompts", "answers", "stops")


def write_credit(
  workdir: Path,
  step: int,
  batch: Batch,
  truth: BatchTruth,
  chat: Chat,
  groups: int,
  timeline: np.ndarray,
) -> None:
  """Writes the record of a step, with the tokens of `groups` groups, the most mixed first.

  A group is mixed if it has correct and incorrect completions, and most mixed if both are equally
  many. All processes must call this; only the first one writes.
  """
  arrays = fetch({"rollouts": batch.rollouts.replace(prompts=None), "rewards": batch.rewards})
  if not is_first_process():
    return
  rollouts = arrays["rollouts"]
  rewards = arrays["rewards"]
  none = np.zeros(batch.correct.shape, bool)
  valid = ~none if rewards.valid is None else rewards.valid
  shown = _most_mixed(batch.correct, valid, rollouts.guided)[:groups]
  piece, pieces = _pieces(rollouts, shown, chat)
  divergence = np.zeros_like(rollouts.entropy)
  if rollouts.teacher is not None:
    divergence = np.where(rollouts.mask, rollouts.divergence, divergence)
  problems = [batch.problems[i] for i in shown]
  g = batch.correct.shape[1]
  record = CreditRecord(
    step=step,
    lengths=rollouts.lengths,
    mask=rollouts.mask,
    entropy=rollouts.entropy,
    correct=batch.correct,
    reward=rewards.reward,
    penalty=rewards.penalty,
    parts=_or_zeros(rewards.parts, none[..., None][..., :0], np.float32),
    part_weights=_or_zeros(rewards.part_weights, none[:, :0], np.float32),
    valid=valid,
    finished=rollouts.finished,
    guided=none if rollouts.guided is None else rollouts.guided,
    divergence=divergence,
    **{
      name: _or_zeros(getattr(owner, name), rollouts.tokens, dtype)
      for name, dtype in OPTIONAL.items()
      for owner in (rewards, rollouts)
      if hasattr(owner, name)
    },
    turn_truth=_turn_truth(truth.turns, rollouts.tokens.shape),
    truth=_or_zeros(truth.tokens, rollouts.tokens, np.uint8),
    shown=shown,
    ids=rollouts.tokens[shown],
    log_probs=rollouts.log_probs[shown],
    piece=piece,
    pieces=pieces,
    prompts=[problem.messages[-1]["content"] for problem in problems],
    answers=[problem.answer for problem in problems],
    stops=[[str(x.stop) for x in batch.episodes[i] or ()] or [""] * g for i in shown],
    timeline=timeline,
  )
  save_credit(workdir, record)


def _turn_truth(turns: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
  """Returns the true advantages of turns, f32[n, g, t], for the policy where that is known."""
  truth = np.full(shape, np.nan, np.float32)
  for player in PLAYERS:  # the policy comes last
    known = turns.get(player, truth)
    truth = np.where(np.isnan(known), truth, known)
  return truth


def _or_zeros(x: np.ndarray | None, like: np.ndarray, dtype: type) -> np.ndarray:
  return np.zeros(like.shape, dtype) if x is None else x


def batch_signals(batch: Batch) -> Signals:
  """Returns the inputs of the advantages of a step's batch, as host arrays.

  Every process must call it.
  """
  rewards = batch.rewards
  signals, valid = fetch((Signals.of(batch.rollouts, rewards), rewards.valid))
  return signals.replace(gaps=None).only(valid)


@functools.partial(jax.jit, static_argnums=0)
def shaped_and_advantages(algorithm: Algorithm, signals: Signals) -> tuple[jax.Array, jax.Array]:
  """Returns the shaped rewards and the advantages of a batch, f32[n, g, t] each.

  They are 0 on tokens outside the mask.
  """
  shaped, _ = algorithm.shaped(signals)
  advantages = algorithm.advantages(signals)
  return jnp.where(signals.mask, shaped.plus + shaped.minus, 0.0), advantages


def _most_mixed(correct: np.ndarray, valid: np.ndarray, guided: np.ndarray | None) -> np.ndarray:
  """Returns all group indices i32[n], the most mixed first.

  The order is by the number of correct or of incorrect completions, whichever is smaller. Groups
  for which `has_contrast` is False come last.
  """
  smaller_side = np.minimum((correct & valid).sum(1), (~correct & valid).sum(1))
  mixed = smaller_side * has_contrast(correct, valid, guided)
  return np.argsort(-mixed, kind="stable").astype(np.int32)


def _pieces(rollouts: Rollouts, shown: np.ndarray, chat: Chat) -> tuple[np.ndarray, list[str]]:
  """Returns the texts of all tokens shown: indices i32[k, g, t] into a list, and the list."""
  numbers: dict[str, int] = {}
  piece = np.zeros((len(shown), *rollouts.tokens.shape[1:]), np.int32)
  for i, j in np.ndindex(piece.shape[:2]):
    present = rollouts.present[shown[i], j]
    texts = chat.pieces(rollouts.tokens[shown[i], j, present])
    piece[i, j, : len(texts)] = [numbers.setdefault(text, len(numbers)) for text in texts]
  return piece, list(numbers)


def step_timeline(spans: Sequence[Span], metrics: Mapping[str, float]) -> np.ndarray:
  """Returns the timeline of a step, of which `spans` has sampling and waiting for rewards.

  It is f32[spans, 4]: the index of the phase in `PHASES`, its begin and end in seconds from the
  beginning of the step, and the share of the slots that are busy, 0 for phases other than decode.
  """
  end = metrics["time/step"]
  update = Span("update", end - metrics["time/update"], end, 0.0)
  rows = [(PHASES.index(span.phase), *span[1:]) for span in [*spans, update]]
  return np.asarray(rows, np.float32)


def save_credit(workdir: Path, record: CreditRecord) -> None:
  """Writes a record to its file atomically."""
  arrays = {name: np.asarray(value) for name, value in vars(record).items() if name not in TEXTS}
  for name in PER_TOKEN:
    present = record.present if name in OF_BATCH else record.present[record.shown]
    arrays[name] = arrays[name][present]
  texts = json.dumps({name: getattr(record, name) for name in TEXTS})
  packed = io.BytesIO()
  np.savez_compressed(
    packed,
    format=FORMAT,
    width=record.entropy.shape[-1],
    texts=np.frombuffer(texts.encode(), np.uint8),
    **arrays,
  )
  folder = workdir / FOLDER
  folder.mkdir(exist_ok=True)
  write_atomically(folder / f"{record.step}.npz", packed.getvalue())


def credit_files(workdir: Path) -> dict[int, Path]:
  """Returns the record files of a run by step, in ascending order."""
  folder = workdir / FOLDER
  if not folder.is_dir():
    return {}
  files = {int(file.stem): file for file in folder.glob("*.npz") if file.stem.isdigit()}
  return dict(sorted(files.items()))


def repair_credit(workdir: Path, last_step: int, is_recorded: Callable[[int], bool]) -> list[str]:
  """Makes the records agree with the checkpoint of `last_step` when a run resumes.

  Removes the records of later steps, and renames files that are not records. Returns lines for the
  user on damaged records, and on missing ones of the steps that the run records.
  """
  lines = []
  folder = workdir / FOLDER
  if folder.exists() and not folder.is_dir():
    lines.append(f"{FOLDER} was not a folder and was renamed to {set_aside(folder).name}")
  found = credit_files(workdir)
  for step, file in found.items():
    if step > last_step:
      file.unlink()
    elif not _is_intact(file):
      name = set_aside(file).name
      lines.append(f"{FOLDER}/{file.name} is damaged and was renamed to {name}")
  missing = [step for step in range(1, last_step + 1) if is_recorded(step) and step not in found]
  if missing:
    lines.append(f"{FOLDER} lacks {describe_steps(missing)}, which cannot be known again")
  return lines


def _is_intact(file: Path) -> bool:
  """Whether a file is a complete archive; up to `MAX_CHECKED_BYTES`, its contents are checked too.

  Damage to a larger record shows when it is read.
  """
  if not file.is_file():
    return False
  try:
    with zipfile.ZipFile(file) as archive:
      return os.path.getsize(file) > MAX_CHECKED_BYTES or archive.testzip() is None
  except UNREADABLE:
    return False


def read_credit(file: Path) -> CreditRecord:
  """Reads a record that `write_credit` wrote."""
  try:
    with np.load(io.BytesIO(file.read_bytes())) as stored:
      arrays = dict(stored.items())
    if (version := int(arrays.pop("format"))) == FORMAT:
      return _record(arrays)
  except UNREADABLE as error:
    raise UserError(
      f"{str(file)!r} is damaged ({first_line(error)[:100]}); remove it and run the command again"
    ) from error
  raise UserError(
    f"{str(file)!r} has format {version}, but this version of gtpo_jax reads {FORMAT}; make the "
    f"report with the version that trained the run, or remove the folder {FOLDER!r}"
  )


def _record(arrays: dict[str, Any]) -> CreditRecord:
  """Returns the record of the arrays in a file."""
  width = int(arrays.pop("width"))
  texts = json.loads(arrays.pop("texts").tobytes())
  k, g = len(arrays["shown"]), arrays["lengths"].shape[1]
  texts.setdefault("stops", [[""] * g] * k)  # of runs before 0.2.0
  present = np.arange(width) < arrays["lengths"][..., None]
  arrays.setdefault("divergence", np.zeros_like(arrays["entropy"]))  # of runs before 0.2.0
  for name, dtype in OPTIONAL.items():
    arrays.setdefault(name, np.zeros(arrays["entropy"].shape, dtype))
  arrays.setdefault("parts", np.zeros((*arrays["lengths"].shape, 0), np.float32))
  arrays.setdefault("part_weights", np.zeros((len(arrays["lengths"]), 0), np.float32))
  arrays.setdefault("turn_truth", np.full(arrays["entropy"].shape, np.nan, np.float32))
  for name in PER_TOKEN:
    where = present if name in OF_BATCH else present[arrays["shown"]]
    flat = arrays[name]
    arrays[name] = np.zeros(where.shape, flat.dtype)
    arrays[name][where] = flat
  return CreditRecord(**arrays | texts | {"step": int(arrays["step"])})
