"""A batch-invariant engine gives a completion the same bits alone and beside any others."""

import dataclasses

import jax
import numpy as np
import pytest
from small import CONFIG, RAGGED_PROMPTS, build, sample

from gtpo_jax.sampling.completion import Completion, Prompt
from gtpo_jax.sampling.session import Pace, Session
from gtpo_jax.sampling.settings import Demand, EngineConfig

INVARIANT = EngineConfig(slots=16, chunk=4, batch_invariant=True)
MAX_TOKENS = 96
RNG = np.random.default_rng(1)
TEXTS = [RNG.integers(12, 48, RNG.integers(1, 180)).tolist() for _ in range(24)]


def built(dtype, config=INVARIANT):
  model = dataclasses.replace(CONFIG, compute_dtype=dtype)
  demand = Demand(serves=True)
  return build(None, model, MAX_TOKENS, (7,), 192, config, demand=demand)


def serve(served, indices, at_once):
  """Samples completions of TEXTS, of which `at_once` more come with each chunk.

  Returns:
    The tokens, and the bits of their log-probs and entropies, by index.
  """
  _, engine, params = served
  programs = engine.programs
  fixed = programs.config.batch_invariant
  session = Session(programs, params, programs.sizes.serving_scheduler(), Pace(4, None, fixed))
  waiting = list(indices)
  completions = {}
  while waiting or session.busy:
    for i in waiting[:at_once]:
      key = np.asarray(jax.random.key_data(jax.random.key(i)))
      limit = 8 + 11 * i % (MAX_TOKENS - 8)
      completions[i] = Completion(Prompt(TEXTS[i]), key, limit)
      session.submit(completions[i].prompt, [completions[i]])
    waiting = waiting[at_once:]
    session.step(more_may_come=True, some_wait=bool(waiting))
  arrays = {i: completion.arrays() for i, completion in completions.items()}
  names = ("tokens", "plain_log_probs", "entropy")
  return {i: [x[name].tolist() for name in names] for i, x in arrays.items()}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_request_does_not_depend_on_others(dtype):
  served = built(dtype)
  together = serve(served, range(24), 24)
  assert max(len(tokens) for tokens, *_ in together.values()) > 64  # the arrays have grown
  assert serve(served, range(24)[::-1], 3) == together
  for i in (0, 5, 11):
    assert serve(served, [i], 1)[i] == together[i]


@pytest.mark.slow
def test_slots_of_training_do_not_matter_to_the_last_bit():
  config = dataclasses.replace(CONFIG, compute_dtype="float32")
  make = lambda slots: build(
    None, config, engine_config=dataclasses.replace(INVARIANT, slots=slots)
  )
  fields = lambda x: (x.tokens, x.log_probs, x.entropy, x.mask)
  expected = fields(sample(make(16), RAGGED_PROMPTS, group=6))
  for prompts in (RAGGED_PROMPTS[:2], RAGGED_PROMPTS[:7]):
    got = fields(sample(make(16), prompts, group=6))
    jax.tree.map(np.testing.assert_array_equal, got, tuple(x[: len(prompts)] for x in expected))
