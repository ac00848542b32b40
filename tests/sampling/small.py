"""A model small enough to sample from many times, engines for it, and comparisons."""

import functools

import jax
import numpy as np
from scores import jitted_score
from toys import TOY, strong

from gtpo_jax.runtime.mesh import shard_batch
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.programs import ProgramSettings
from gtpo_jax.sampling.settings import Demand, EngineConfig, SamplingParams

DEFAULT_DEMAND = Demand()
CONFIG = TOY
ENGINE_CONFIG = EngineConfig(chunk=4)
STOP = (7, 11)
PAD = 3
MAX_TOKENS = 10
LOGIT_SCALE = 4  # scales the random weights, so that distributions are peaked and lengths vary
PROMPTS = [[5, 9, 1], [2], [4, 4, 8, 30, 21], [40, 41]]
RAGGED_PROMPTS = [np.random.default_rng(i).integers(12, 48, 1 + i % 6).tolist() for i in range(11)]


@functools.cache
def build(
  mesh=None,
  config=CONFIG,
  max_tokens=MAX_TOKENS,
  stop=STOP,
  max_prompt_tokens=6,
  engine_config=ENGINE_CONFIG,
  stop_strings=None,
  demand=DEFAULT_DEMAND,
  logit_scale=LOGIT_SCALE,
):
  """Returns random weights, an engine, and the weights in sampling layout.

  The weights have the same values on every mesh. Tests that ask for the same engine share it and
  its programs.
  """
  model, params = strong(config, mesh, logit_scale)
  settings = ProgramSettings(
    model, stop, PAD, max_prompt_tokens, max_tokens, config=engine_config, demand=demand
  )
  engine = Engine(settings, stop_strings)
  return params, engine, engine.layout(params)


def places(completions):
  """Returns the (row, index) of completions."""
  return [(completion.group, completion.index) for completion in completions]


def sample(built, prompts=PROMPTS, key=4, group=5, **settings):
  _, engine, layout = built
  return engine.sample(
    layout, prompts, jax.random.key(key), group=group, sampling_params=SamplingParams(**settings)
  )


def trainer_scores(built, rollouts, temperature=1.0):
  """The trainer's log-probs and entropy of the sampled tokens."""
  params, engine, _ = built
  batch = shard_batch((rollouts.prompts, rollouts.tokens), engine.model.mesh)
  return jitted_score(engine.model, params, *batch, temperature, 64)


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens):
  """The logits of a full forward pass."""
  return model.apply({"params": params}, tokens)


def log_prob_errors(built, rollouts):
  """The absolute difference between the engine's and the trainer's log-prob of each token."""
  log_probs, _ = trainer_scores(built, rollouts)
  return np.abs(np.asarray(log_probs) - rollouts.log_probs)[rollouts.mask]


def assert_same(rollouts, expected):
  np.testing.assert_array_equal(rollouts.tokens, expected.tokens)
  np.testing.assert_array_equal(rollouts.mask, expected.mask)
  np.testing.assert_array_equal(rollouts.finished, expected.finished)
  np.testing.assert_allclose(rollouts.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(rollouts.entropy, expected.entropy, rtol=1e-5, atol=1e-5)
