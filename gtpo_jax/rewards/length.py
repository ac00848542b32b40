"""Length shaping: penalties f32 <= 0 from completion lengths in tokens."""
from __future__ import annotations

import numpy as np


def soft_overlong(lengths: np.ndarray, longest: int, buffer: int) -> np.ndarray:
  """DAPO's soft overlong punishment (2503.14476, eq. 13).

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
