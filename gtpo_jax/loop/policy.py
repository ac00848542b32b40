"""A trained policy, for a Python program to sample from and save."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from gtpo_jax.models.hf.save import save
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.rollout.sample import sample_prompt
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.settings import SamplingParams

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class TrainedPolicy:
  """A model with its parameters and tokenizer.

  Attributes:
    worker: samples completions, with the run's prompt format and limits.
    params: the parameters, in training layout.
  """

  worker: RolloutWorker = dataclasses.field(repr=False)
  params: Params = dataclasses.field(repr=False)

  @property
  def model(self) -> Transformer:
    """The architecture; `model.apply({"params": params}, tokens)` gives logits f32[b, s, v]."""
    return self.worker.model

  @property
  def tokenizer(self) -> PreTrainedTokenizerBase:
    """The tokenizer, from Transformers."""
    return self.worker.chat.tokenizer

  def sample(
    self,
    prompt: str,
    n: int = 1,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    row: Mapping[str, Any] | None = None,
  ) -> list[str]:
    """Returns `n` completions of a prompt, which gets the run's `data.system` and `data.template`.

    They end as in the run: at an end token, at `sampling.stop` or at `sampling.max_tokens`. If the
    run has an environment or tools, each is an episode, with all turns and what was answered to
    them; `row` has further fields of the row that the environment gets, such as its answer.

    Raises:
      UserError: the prompt is empty or over `data.max_prompt_tokens`, a number is out of bounds, or
        there is a row, but no environment.
    """
    if n < 1:
      raise UserError(f"n must be at least 1, got {n}")
    if not 0 <= seed < 2**32:
      raise UserError(f"seed must be in [0, 2**32), got {seed}")
    worker = self.worker
    if row and not worker.episodes:
      raise UserError("row is for an environment, and this policy has none; leave it out")
    policy = worker.policy(self.params)
    keys = policy.engine.completion_keys(jax.random.key(seed), 1, n)
    sampling_params = SamplingParams(temperature, top_p=top_p)
    completions = sample_prompt(worker, policy, prompt, row or {}, keys, sampling_params)
    return self.worker.decode([completion.tokens.tolist() for completion in completions])

  def save(self, folder: str | Path, dtype: str | None = None) -> None:
    """Writes a Hugging Face folder; see `models.save`."""
    save(
      self.model,
      self.params,
      self.tokenizer,
      folder,
      dtype=dtype,
      stop=self.worker.chat.stop,
      source=self.worker.model_folder,
    )
