"""The trainer's scores of completions, compiled once for each model and shape."""

import functools

import jax

from gtpo_jax.training.log_probs import Reading, head_settings, score


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def jitted_score(model, params, prompts, tokens, temperature=1.0, chunk=64, packing=None):
  """Returns log-probs and entropies f32[n, g, t], as `score` does."""
  settings = head_settings(model, temperature, chunk)
  return score(model, params, Reading(prompts, tokens, packing), settings)
