"""The truth codes of sampled tokens: which of them decide the verdict, and which are wrong.

`rewards.truth` marks the characters of a completion; here the marks become one code per token. A
code is 0 for a token of which the truth is unknown. Otherwise it is 1 + the index of its class in
`CLASSES`, and 8 more if the token is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gtpo_jax.data.chat import Chat
from gtpo_jax.rewards import MARKS, knows_truth, truth_marks
from gtpo_jax.rollout.groups import Group

CLASSES = ("inert", "filler", "copied", "decisive")
WRONG = 8
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


def token_truth(
  groups: Sequence[Group], chat: Chat, own_verifier: bool = False
) -> np.ndarray | None:
  """Returns the truth codes of a batch, u8[n, g, t]; None if no problem knows them.

  A token of several characters takes the strongest of their marks. A stop token is inert. The truth
  of tokens that were not drawn is unknown.

  Args:
    groups: n groups.
    chat: decodes single tokens.
    own_verifier: whether a function of the user decides, instead of the verifier for the problem's
      kind. Then only a problem's column `truth` has marks.
  """
  kind_of = lambda problem: "" if own_verifier else problem.kind
  if not any(knows_truth(kind_of(x.problem), x.problem.extra) for x in groups):
    return None
  codes = np.zeros((len(groups), *groups[0].rollouts.tokens.shape), np.uint8)
  for i, group in enumerate(groups):
    problem = group.problem
    prompt = problem.messages[-1]["content"]
    rollouts = group.rollouts
    for j, text in enumerate(group.texts):
      marks = truth_marks(kind_of(problem), prompt, text, problem.answer, problem.extra)
      if marks is not None:
        present = rollouts.present[j]
        codes[i, j, present] = completion_codes(rollouts.tokens[j, present], text, marks, chat)
    codes[i][~rollouts.mask] = 0
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
