"""Completions that come at any time, with arrays and with pages, on one device and on eight."""

import threading
import time

import numpy as np
import pytest
from meshes import mesh_of
from toys import TOY, strong

from gtpo_jax.models.decode import params_bytes
from gtpo_jax.models.hf.config_json import read_config
from gtpo_jax.rollout import worker
from gtpo_jax.rollout.policies import ServingLimits, find_served
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import bytes_per_device
from gtpo_jax.sampling.completion import Prompt
from gtpo_jax.sampling.dense.state_shapes import StateShapes
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.filters import RowSampling
from gtpo_jax.sampling.programs import ProgramSettings
from gtpo_jax.sampling.settings import Demand, EngineConfig
from gtpo_jax.serving.generator import Full, Generator, ScoreJob, ServedCompletion

pytestmark = pytest.mark.slow

CONFIG = TOY
STOP = (7, 11)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(12, 48, 1 + i * 5 % 23).tolist() for i in range(40)]
WAYS = [
  RowSampling(),
  RowSampling(temperature=0.0),
  RowSampling(temperature=0.7, top_k=5),
  RowSampling(temperature=1.2, top_p=0.8, min_p=0.05),
]


def make_engine(attention="", mesh=None, slots=16, memory=None):
  """The same weights on any mesh."""
  model, params = strong(CONFIG, mesh)
  config = EngineConfig(slots=slots, chunk=4, attention=attention, page_size=16)
  demand = Demand(memory=memory, serves=True)
  engine = Engine(ProgramSettings(model, STOP, 3, 24, 40, config=config, demand=demand))
  return engine, engine.layout(params)


class Ask:
  """A completion, and what it has received."""

  def __init__(self, i):
    self.parts = []
    self.done = threading.Event()
    self.began = threading.Event()
    key = np.asarray([0, i], np.uint32)
    limit = 1 + i * 7 % 40
    self.completion = ServedCompletion(
      prompt=Prompt(PROMPTS[i]),
      key=key,
      limit=limit,
      sampling=WAYS[i % 4]._replace(lists_alternatives=i % 5 == 0),
      deliver=self.receive,
    )

  def receive(self, part):
    self.parts.append(part)
    self.began.set()
    if part.finish:
      self.done.set()

  @property
  def tokens(self):
    return [token for part in self.parts for token in part.tokens]


def generate(engine, params, together):
  """Generates all completions, alone or as they come; returns tokens and log-probs of each."""
  generator = Generator(engine, params, max_waiting=100)
  asks = [Ask(i) for i in range(len(PROMPTS))]
  try:
    for i, ask in enumerate(asks):
      generator.submit([ask.completion])
      if not together:
        assert ask.done.wait(120)
      elif i % 6 == 5:  # the next ones join while these run
        assert asks[i - 5].began.wait(120)
    assert all(ask.done.wait(120) for ask in asks)
  finally:
    generator.close()
  return asks


@pytest.fixture(scope="module")
def alone():
  return generate(*make_engine(), together=False)


def assert_same(asks, expected):
  for ask, other in zip(asks, expected, strict=True):
    assert ask.tokens == other.tokens
    log_probs, others = ([x for part in y.parts for x in part.log_probs] for y in (ask, other))
    np.testing.assert_allclose(log_probs, others, atol=1e-4)
    assert ask.parts[-1].finish == other.parts[-1].finish
    assert len(ask.tokens) <= ask.completion.limit


@pytest.mark.parametrize("slots", [3, pytest.param(16, marks=pytest.mark.manual)])
def test_company_does_not_matter(slots, alone):
  assert_same(generate(*make_engine(slots=slots), together=True), alone)
  assert {ask.parts[-1].finish for ask in alone} == {"stop", "length"}


def test_pages_do_not_matter(alone):
  assert_same(generate(*make_engine("pallas"), together=True), alone)


@pytest.mark.devices
@pytest.mark.parametrize(
  "shape", [pytest.param((8, 1, 1, 1), marks=pytest.mark.manual), (2, 2, 1, 2)]
)
def test_the_mesh_does_not_matter(shape, alone):
  assert_same(generate(*make_engine(mesh=mesh_of(*shape)), together=True), alone)


def test_cancelled_completions_leave_and_others_stay(alone):
  generator = Generator(*make_engine(slots=4), max_waiting=100)
  asks = [Ask(i) for i in range(len(PROMPTS))]
  generator.submit([ask.completion for ask in asks])
  assert asks[1].began.wait(120)
  generator.cancel([ask.completion for ask in asks[::2]])
  assert all(ask.done.wait(120) for ask in asks[1::2])
  assert_same(asks[1::2], alone[1::2])
  generator.close()
  assert generator.running == generator.waiting == 0
  assert sum(not ask.parts for ask in asks[::2]) > 10


def test_completions_wait_for_memory(alone):
  """There is memory for the arrays of 8 completions, not for those of all 16 slots."""
  programs = make_engine()[0].programs
  position = bytes_per_device(StateShapes(programs.cache, False).kv(1, 1))
  assert (programs.sizes.prompt_widths, programs.sizes.cache_lengths) == ([24], [44])
  memory = params_bytes(programs.model, programs.model).copied + int(1.5 * position * 8 * (24 + 44))
  engine, params = make_engine(memory=memory)
  assert [engine.programs.sizes.hold([(24, 40)] * count) for count in (8, 9)] == [True, False]
  asks = generate(engine, params, together=True)
  assert_same(asks, alone)


def test_requests_that_come_together_are_sampled_together(monkeypatch):
  """Without a time limit of chunks, the first of four requests does not run ahead of the others."""
  monkeypatch.setattr("gtpo_jax.serving.generator.GRACE_S", 1.0)
  monkeypatch.setattr("gtpo_jax.serving.generator.LONGEST_GRACE_S", 3.0)
  generator = Generator(*make_engine(), max_waiting=100, chunk_s=None)
  asks = [Ask(i) for i in (0, 6, 12, 18)]
  for ask in asks:
    ask.completion.limit = 4  # a chunk
    generator.submit([ask.completion])
    time.sleep(0.01)
  assert all(ask.done.wait(120) for ask in asks)
  assert generator.counts["chunks"] == 1
  generator.close()


def test_a_full_queue_takes_nothing():
  generator = Generator(*make_engine(slots=2), max_waiting=3)
  asks = [Ask(i) for i in range(6)]
  with pytest.raises(Full):
    generator.submit([ask.completion for ask in asks])
  generator.submit([ask.completion for ask in asks[:5]])
  assert all(ask.done.wait(120) for ask in asks[:5]) and not asks[5].parts
  generator.close()


def test_a_failure_ends_what_runs_and_nothing_else(alone, capfd):
  """The devices fail once: those that were under way get an error, later ones their tokens."""
  engine, params = make_engine()
  generator = Generator(engine, params, max_waiting=100)
  generator._params = None
  failed = Ask(0)
  score = ScoreJob(PROMPTS[0], failed.receive)
  generator.submit([failed.completion])
  assert failed.done.wait(120) and failed.parts[-1].finish == "error"
  generator._params = params
  again = Ask(0)
  generator.submit([again.completion], [score])
  assert again.done.wait(120) and again.tokens == alone[0].tokens
  generator.close()
  assert "generation failed" in capfd.readouterr().err


def test_lengths_follow_the_context_and_the_memory(folder, monkeypatch):
  context = read_config(folder, "float32").max_length

  def lengths(**limits):
    engine = find_served(folder, None, ServingLimits(**limits)).worker.engine
    return engine.max_prompt_tokens, engine.max_tokens

  assert lengths() == (context - 2, context - 1)
  assert lengths(max_tokens=9) == (context - 2, 9)
  with pytest.raises(UserError, match=f"--max_tokens={context} is not below the model's context"):
    lengths(max_tokens=context)
  monkeypatch.setattr(worker, "usable_memory", lambda device, count: 100 * 2**20)
  assert lengths() == (context // 4 - 2, context // 4 - 1)
  with pytest.raises(UserError, match="no memory for the keys and values of a prompt of 10 tokens"):
    lengths(max_prompt_tokens=10, max_tokens=context - 1)
