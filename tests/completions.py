"""Completions with given tokens, for tests that sample nothing."""

import numpy as np

from gtpo_jax.sampling.completion import NUMBERS, Completion, Prompt


def completion(group, index, tokens, finished=True, episode=None, mask=None, **numbers):
  """Returns a completion that has ended; every token was drawn unless `mask` says otherwise."""
  made = Completion(Prompt([1]), np.zeros(2, np.uint32), len(tokens), group=group, index=index)
  arrays = {name: np.zeros(len(tokens), np.float32) for name in NUMBERS} | numbers
  arrays["tokens"] = np.asarray(tokens, np.int32)
  arrays["mask"] = np.ones(len(tokens), bool) if mask is None else np.asarray(mask, bool)
  made.replace(arrays, bool(finished))
  made.episode = episode
  return made
