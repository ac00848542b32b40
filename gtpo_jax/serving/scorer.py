"""Scores texts: the log-prob of every token given those before it, as evaluation harnesses ask."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import Prompts, array_lengths
from gtpo_jax.models.decode import DecodeParams, next_logits, sequence_states
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import batch_shards
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.filters import Alternatives, alternatives
from gtpo_jax.sampling.prefill.batches import pad_prompts
from gtpo_jax.serving.jobs import ScoreJob
from gtpo_jax.serving.outputs import Part

ROWS = 4  # texts that are scored together on a device, unless there is one
POSITIONS = 64  # of which logits exist at once


class Scorer:
  """The compiled programs, for a few lengths.

  Attributes:
    rows: how many texts are scored together.
  """

  def __init__(self, engine: Engine, params: DecodeParams | None):
    model = engine.model
    longest = min(engine.max_prompt_tokens + engine.max_tokens, model.config.max_length)
    self._shards = batch_shards(model.mesh)
    self.rows = ROWS * self._shards
    self._params = params
    self._pad = engine.pad
    self._fixed = engine.programs.config.batch_invariant
    self._widths = [-(-x // POSITIONS) * POSITIONS for x in array_lengths(longest)[::-2][::-1]]
    self._score = jax.jit(functools.partial(_score, model))

  def fit_together(self, job: ScoreJob, other: ScoreJob) -> bool:
    """Whether two texts of one policy may be scored together."""
    return not self._fixed or self._width(job) == self._width(other)

  def _width(self, *jobs: ScoreJob) -> int:
    longest = max(len(job.tokens) for job in jobs)
    return next(width for width in self._widths if width >= longest)

  def run(self, jobs: Sequence[ScoreJob]) -> None:
    """Scores at most `rows` texts with the policy of the first, and delivers the results."""
    params = jobs[0].params or self._params
    rows = self._shards if len(jobs) <= self._shards and not self._fixed else self.rows
    ids = [job.tokens for job in jobs] + [[self._pad]] * (rows - len(jobs))
    width = self._width(*jobs)
    log_probs, others = jax.device_get(self._score(params, pad_prompts(ids, width, self._pad)))
    for i, job in enumerate(jobs):
      last = slice(width - len(job.tokens), width - 1)  # what predicts the second token, and so on
      tops = zip(others.tokens[i, last].tolist(), others.log_probs[i, last].tolist(), strict=True)
      job.deliver(Part(list(job.tokens[1:]), log_probs[i, last].tolist(), list(tops), "stop"))


def _score(
  model: Transformer, params: DecodeParams, texts: Prompts
) -> tuple[jax.Array, Alternatives]:
  """Returns for each position of texts [b, w] the log-prob of the next token, and alternatives."""
  hidden = sequence_states(model, params, texts)
  b, w, d = hidden.shape
  following = jnp.roll(texts.tokens, -1, axis=1)

  def part(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Alternatives]:
    hidden, following = inputs  # [b, POSITIONS, ...]
    logits = next_logits(model, params, hidden.reshape(-1, d))
    normaliser = jax.nn.logsumexp(logits, -1)
    at = jnp.take_along_axis(logits, following.reshape(-1, 1), -1)[:, 0]
    split = lambda x: x.reshape(b, POSITIONS, *x.shape[1:])
    return jax.tree.map(split, (at - normaliser, alternatives(logits, normaliser)))

  parts = lambda x: jnp.moveaxis(x.reshape(b, w // POSITIONS, POSITIONS, *x.shape[2:]), 1, 0)
  scored = jax.lax.map(part, (parts(hidden), parts(following)))
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(b, w, *x.shape[3:]), scored)
