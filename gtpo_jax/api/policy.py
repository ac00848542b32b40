"""A policy in the hands of a Python program."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from gtpo_jax.data.records import Problem, user
from gtpo_jax.models.qwen2 import Params, Qwen2
from gtpo_jax.models.save import save
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.filters import SamplingParams

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class TrainedPolicy:
  """A model with its parameters and its tokenizer.

  Attributes:
    actor: what samples from it, as the run's config says.
    params: of the model.
  """

  worker: RolloutWorker = dataclasses.field(repr=False)
  params: Params = dataclasses.field(repr=False)

  @property
  def model(self) -> Qwen2:
    """The architecture: `model.apply({"params": params}, tokens)` gives logits f32[b, s, v] of i32[b, s]."""
    return self.worker.model

  @property
  def tokenizer(self) -> PreTrainedTokenizerBase:
    """Of transformers."""
    return self.worker.chat.tokenizer

  def sample(
    self, prompt: str, n: int = 1, *, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0
  ) -> list[str]:
    """`n` completions of a prompt, which is put as the prompts that were learned from (`data.system`, `data.template`).

    Raises:
      UserError: an empty prompt or one over `data.max_prompt_tokens`, or a number out of its bounds.
    """
    if n < 1:
      raise UserError(f"n must be at least 1, got {n}")
    if not 0 <= seed < 2**32:
      raise UserError(f"seed must be in [0, 2**32), got {seed}")
    rollouts = self.worker.generate(
      self.worker.policy(self.params),
      [Problem("0", user(prompt), "", "")],
      jax.random.key(seed),
      n,
      SamplingParams(temperature, top_p=top_p),
    )
    tokens = np.asarray(rollouts.tokens[0])
    mask = np.asarray(rollouts.mask[0])
    return self.worker.chat.decode([row[kept] for row, kept in zip(tokens, mask, strict=True)])

  def save(self, folder: str | Path, dtype: str | None = None) -> None:
    """Writes a Hugging Face folder; see `models.save`."""
    save(self.model, self.params, self.tokenizer, folder, dtype=dtype, stop=self.worker.chat.stop)
