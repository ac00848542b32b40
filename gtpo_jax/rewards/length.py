"""Length penalties: f32 <= 0 from completion lengths in tokens."""

from __future__ import annotations

import numpy as np

# Tolerance for comparing c / G with gamma: (1 - 0.8) * 5 is slightly below 1 in floats.
ROUNDING_SLACK = 1e-9


def soft_overlong(lengths: np.ndarray, max_length: int, buffer: int) -> np.ndarray:
  """Returns DAPO's soft overlong punishment (2503.14476, eq. 13).

  It equals R(i) of GTPO v1, section 4.5.1, with L2 = max_length and L1 = buffer. The paper prints
  L2 as the denominator of R(i), which makes the penalty jump where it should be continuous; this
  function divides by L1.

  Args:
    lengths: i32[...], tokens, stop token included.
    max_length: L_max, the length limit in tokens.
    buffer: tokens below the limit over which the penalty grows (L_cache of DAPO); 0 disables the
      penalty.

  Returns:
    f32[...]: 0 up to max_length - buffer, then linear to -1 at max_length, and -1 beyond.
  """
  if buffer == 0:
    return np.zeros(np.shape(lengths), np.float32)
  penalty = (max_length - buffer - np.asarray(lengths)) / buffer
  return np.clip(penalty, -1.0, 0.0).astype(np.float32)


def group_relative(
  lengths: np.ndarray, correct: np.ndarray, valid: np.ndarray, gamma: float
) -> np.ndarray:
  """Returns the group-relative overlong punishment (GTPO, final paper, appendix D).

  A completion is punished for being long compared with its group, not for its absolute length.
  Let L = max((min + max) / 2, mean) over the compared lengths. A punished completion receives
  -(1/2) (|o| - L) / L if it is longer than L, and -1/2 if it is at least 2 L long. If c of the G
  valid completions of a group are correct:

    - easy group, c / G >= gamma: the correct completions are compared and punished;
    - hard group, c / G <= 1 - gamma: there is no penalty;
    - any other group: all completions are compared. The correct ones are punished if they are the
      majority, otherwise the wrong ones.

  A re-implementation attributes gamma = 0.75 and the rule for the last case to the appendix.
  Neither was compared with its text.

  Args:
    lengths: i32[n, g], tokens per completion, for n groups of g completions.
    correct: bool[n, g].
    valid: bool[n, g], False for completions to ignore.
    gamma: bound between the three cases, in (0.5, 1].

  Returns:
    f32[n, g] in [-1/2, 0].
  """
  is_correct = correct & valid
  total = np.maximum(valid.sum(1), 1)
  num_correct = is_correct.sum(1)
  easy = num_correct >= gamma * total - ROUNDING_SLACK
  hard = num_correct <= (1 - gamma) * total + ROUNDING_SLACK
  compared = np.where(easy[:, None], is_correct, valid)
  punish_correct = easy | (2 * num_correct > total)
  punished = np.where(punish_correct[:, None], is_correct, valid & ~correct) & ~hard[:, None]

  compared_lengths = np.where(compared, lengths, np.nan)
  empty = ~compared.any(1)
  compared_lengths[empty] = 1.0  # avoids NaN; these groups get no penalty
  shortest = np.nanmin(compared_lengths, 1)
  longest = np.nanmax(compared_lengths, 1)
  threshold = np.maximum((shortest + longest) / 2, np.nanmean(compared_lengths, 1))[:, None]
  penalty = -0.5 * np.clip((lengths - threshold) / threshold, 0.0, 1.0)
  return np.where(punished & ~empty[:, None], penalty, 0.0).astype(np.float32)
