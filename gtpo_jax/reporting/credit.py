"""Where a step's credit goes, kept for `gtpo report`: WORKDIR/credit/STEP.npz.

A file holds what the algorithms read of the whole batch, so that shares and z-scores can be made again exactly, by whichever method,
and the tokens of a few groups to look at.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
import zlib
from pathlib import Path

import numpy as np

from gtpo_jax.algorithms import informative
from gtpo_jax.data.chat import Chat
from gtpo_jax.rollout.experience import Experience
from gtpo_jax.runtime.distributed import fetch, is_first_process
from gtpo_jax.runtime.errors import UserError, first_line

FOLDER, FORMAT = "credit", 1


@dataclasses.dataclass(frozen=True)
class CreditRecord:
  """A step's batch of n groups, k of which are shown token by token."""

  step: int
  lengths: np.ndarray  # i32[n, g], sampled tokens
  entropy: np.ndarray  # f32[n, g, t], nats; 0 behind a completion's end
  correct: np.ndarray  # bool[n, g]
  reward: np.ndarray  # f32[n, g]
  penalty: np.ndarray  # f32[n, g]
  valid: np.ndarray  # bool[n, g]; False: no part in loss or statistics
  finished: np.ndarray  # bool[n, g]; False where the length ran out
  guided: np.ndarray  # bool[n, g]; a guide wrote the completion
  shown: np.ndarray  # i32[k], which groups
  ids: np.ndarray  # i32[k, g, t], 0 behind a completion's end, as the next two
  log_probs: np.ndarray  # f32[k, g, t], nats
  piece: np.ndarray  # i32[k, g, t], into `pieces`
  pieces: list[str]  # what a token adds to the text
  prompts: list[str]  # [k], the last message of each
  answers: list[str]  # [k]

  @property
  def mask(self) -> np.ndarray:
    """bool[n, g, t], sampled tokens."""
    return np.arange(self.entropy.shape[-1]) < self.lengths[..., None]

  def signals(self, guided: bool) -> dict[str, np.ndarray | None]:
    """What `Algorithm.advantages` takes, as the update gave it; who wrote a completion only where that is asked for."""
    return {
      "entropy": self.entropy,
      "mask": self.mask & self.valid[..., None],
      "correct": self.correct,
      "reward": self.reward,
      "penalty": self.penalty,
      "guided": self.guided if guided else None,
    }


PER_TOKEN = ("entropy", "ids", "log_probs", "piece")  # kept without the padding
TEXTS = ("pieces", "prompts", "answers")


def write_credit(workdir: Path, step: int, batch: Experience, chat: Chat, groups: int) -> None:
  """Keeps a step's batch, and the tokens of `groups` of its groups, the most mixed first. All processes call it, the first writes."""
  arrays = fetch({"rollouts": batch.rollouts.replace(prompts=None), "verdicts": batch.verdicts})
  if not is_first_process():
    return
  r = arrays["rollouts"]
  v = arrays["verdicts"]
  none = np.zeros(batch.correct.shape, bool)
  valid = ~none if v.valid is None else v.valid
  mixed = np.minimum((batch.correct & valid).sum(1), (~batch.correct & valid).sum(1)) * informative(
    batch.correct, valid, r.guided
  )
  shown = np.argsort(-mixed, kind="stable")[:groups].astype(np.int32)
  numbers: dict[str, int] = {}
  piece = np.zeros((len(shown), *r.tokens.shape[1:]), np.int32)
  for i, j in np.ndindex(piece.shape[:2]):
    texts = chat.pieces(r.tokens[shown[i], j, r.mask[shown[i], j]])
    piece[i, j, : len(texts)] = [numbers.setdefault(text, len(numbers)) for text in texts]
  problems = [batch.problems[i] for i in shown]
  save_credit(
    workdir,
    CreditRecord(
      step,
      r.mask.sum(-1),
      r.entropy,
      batch.correct,
      v.reward,
      v.penalty,
      valid,
      r.finished,
      none if r.guided is None else r.guided,
      shown,
      r.tokens[shown],
      r.log_probs[shown],
      piece,
      list(numbers),
      [p.messages[-1]["content"] for p in problems],
      [p.answer for p in problems],
    ),
  )


def save_credit(workdir: Path, credit: CreditRecord) -> None:
  """Writes the file of a step, whole or not at all."""
  arrays = {name: np.asarray(value) for name, value in vars(credit).items() if name not in TEXTS}
  for name in PER_TOKEN:
    arrays[name] = arrays[name][credit.mask if name == "entropy" else credit.mask[credit.shown]]
  texts = json.dumps({name: getattr(credit, name) for name in TEXTS})
  packed = io.BytesIO()
  np.savez_compressed(
    packed,
    format=FORMAT,
    width=credit.entropy.shape[-1],
    texts=np.frombuffer(texts.encode(), np.uint8),
    **arrays,
  )
  folder = workdir / FOLDER
  folder.mkdir(exist_ok=True)
  fresh = folder / f"{credit.step}.tmp"
  fresh.write_bytes(packed.getvalue())
  fresh.replace(folder / f"{credit.step}.npz")


def credit_files(workdir: Path) -> dict[int, Path]:
  """The files of a run by their steps, in order."""
  folder = workdir / FOLDER
  files = (
    {int(file.stem): file for file in folder.glob("*.npz") if file.stem.isdigit()}
    if folder.exists()
    else {}
  )
  return dict(sorted(files.items()))


def cut_credit_back(workdir: Path, step: int) -> None:
  """Removes the files of steps after `step`."""
  for number, file in credit_files(workdir).items():
    if number > step:
      file.unlink()


def read_credit(file: Path) -> CreditRecord:
  """A file of `write_credit`.

  Raises:
    UserError: it is damaged, or of another version.
  """
  try:
    with np.load(io.BytesIO(file.read_bytes())) as stored:
      arrays = dict(stored)
    if (form := int(arrays.pop("format"))) != FORMAT:
      raise UserError(
        f"{str(file)!r} is of format {form}, this version of gtpo_jax reads {FORMAT}; make the report with the version that "
        f"trained the run, or remove the folder {FOLDER!r}"
      )
    width = int(arrays.pop("width"))
    texts = json.loads(arrays.pop("texts").tobytes())
    mask = np.arange(width) < arrays["lengths"][..., None]
    for name in PER_TOKEN:
      where = mask if name == "entropy" else mask[arrays["shown"]]
      flat = arrays[name]
      arrays[name] = np.zeros(where.shape, arrays[name].dtype)
      arrays[name][where] = flat
    return CreditRecord(**arrays | texts | {"step": int(arrays["step"])})
  except UserError:
    raise
  except (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
  ) as error:
    raise UserError(
      f"{str(file)!r} is damaged ({first_line(error)[:100]}); remove it and give the command again"
    ) from error
