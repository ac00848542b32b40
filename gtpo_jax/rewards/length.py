"""Length shaping: penalties f32 <= 0 from completion lengths in tokens."""

from __future__ import annotations

import numpy as np


def soft_overlong(lengths: np.ndarray, longest: int, buffer: int) -> np.ndarray:
  """DAPO's soft overlong punishment (2503.14476, eq. 13), and R(i) of GTPO's v1, section 4.5.1, with L2 = longest and L1 = buffer.

  (The printed denominator of R(i) is L2; with it the penalty jumps where it should be continuous, so ours is L1.)

  Args:
    lengths: i32[...], tokens, stop token included.
    longest: L_max, the length limit in tokens.
    buffer: L_buffer, tokens before the limit over which the penalty grows; 0 gives no penalty at all.

  Returns:
    f32[...]: 0 up to longest - buffer, then linear to -1 at `longest`, and -1 beyond.
  """
  if buffer == 0:
    return np.zeros(np.shape(lengths), np.float32)
  return np.clip((longest - buffer - np.asarray(lengths)) / buffer, -1.0, 0.0).astype(np.float32)


def group_relative(
  lengths: np.ndarray, correct: np.ndarray, valid: np.ndarray, gamma: float
) -> np.ndarray:
  """The final paper's group-relative overlong punishment (appendix D): long for its group, not long as such.

  With the lengths compared, L = max((min + max) / 2, mean), and a completion that is punished gets -(1/2) (|o| - L) / L, from
  -1/2 at 2 L on. An easy group (n / G >= gamma right) compares and punishes its right completions; a hard one
  (n / G <= 1 - gamma) nobody; between them the lengths of all are compared, and the right ones are punished if they are
  the more, else the wrong ones. Gamma and the last rule are not printed: they are our choice.

  Args:
    lengths: i32[n, g], tokens.
    correct: bool[n, g].
    counted: bool[n, g], completions that take part.
    gamma: in (0.5, 1].

  Returns:
    f32[n, g] in [-1/2, 0].
  """
  right = correct & valid
  total = np.maximum(valid.sum(1), 1)
  winners = right.sum(1)
  slack = 1e-9  # (1 - 0.8) * 5 is a little under 1
  easy = winners >= gamma * total - slack
  hard = winners <= (1 - gamma) * total + slack
  compared = np.where(easy[:, None], right, valid)
  punished = (
    np.where((easy | (2 * winners > total))[:, None], right, valid & ~correct) & ~hard[:, None]
  )
  length = np.where(compared, lengths, np.nan)
  alone = ~compared.any(1)
  length[alone] = 1.0  # nobody to compare with; nobody is punished either
  border = np.maximum((np.nanmin(length, 1) + np.nanmax(length, 1)) / 2, np.nanmean(length, 1))[
    :, None
  ]
  penalty = -0.5 * np.clip((lengths - border) / border, 0.0, 1.0)
  return np.where(punished & ~alone[:, None], penalty, 0.0).astype(np.float32)
