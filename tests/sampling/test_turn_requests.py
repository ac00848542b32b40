"""Completions of several turns: each joins its prompt again, with the tokens so far."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from meshes import mesh_of
from small import RAGGED_PROMPTS, STOP, assert_same, build, log_prob_errors, sample
from test_adding_rows import CHUNK, LIMIT, SHAPES, make_rows, make_scheduler

from gtpo_jax.data.chat import TextStream, load_chat
from gtpo_jax.logs.profile import compile_count
from gtpo_jax.sampling.chunk import Chunk
from gtpo_jax.sampling.completion import Completion, Prompt
from gtpo_jax.sampling.inventory import Workload, warm_up
from gtpo_jax.sampling.session import Pace, Session, up_to_stop_strings
from gtpo_jax.sampling.settings import EngineConfig, SamplingParams
from gtpo_jax.sampling.stop_strings import StopStrings

GROUP = 6
TOKENS = 40
KEY = 4
FEW_SLOTS = EngineConfig(slots=5, chunk=4)
MOST_TURNS = 4
PARAMS = SamplingParams()


# --- what is drawn ---


def answer(completion):
  """An environment that depends on what was drawn: returns tokens to read, None at the end."""
  turns = np.flatnonzero(np.diff(completion.mask.astype(int))).size + 1
  left = completion.limit - completion.length
  drawn = completion.tokens[completion.mask]
  tokens = [13 + (int(drawn.sum()) + k) % 30 for k in range(1 + int(drawn[-1] + len(drawn)) % 3)]
  done = not completion.finished or drawn.sum() % 4 == 0 or turns // 2 + 1 >= MOST_TURNS
  return None if done or len(tokens) >= left else tokens


def new_rows(engine):
  n = len(RAGGED_PROMPTS)
  return engine.completions(RAGGED_PROMPTS, engine.completion_keys(jax.random.key(KEY), n, GROUP))


def new_session(engine, layout, rows):
  session = engine.session(layout, rows, PARAMS)
  for row in rows:
    session.submit(row[0].prompt, row)
  return session


def converse(built, delay=lambda: 0, calls=()):
  """Samples all completions, answering each turn after `delay()` further steps, in any order.

  The k-th session is left after calls[k] steps.
  """
  _, engine, layout = built
  rows = new_rows(engine)
  playing = {completion for row in rows for completion in row}
  rng = np.random.default_rng(0)
  answered = 0
  waiting = {}  # completion -> steps until it is answered
  for count in [*calls, 10**6]:
    session = new_session(engine, layout, rows)
    while count and (session.busy or waiting):
      count -= 1
      turned = session.step(more_may_come=bool(waiting))
      waiting |= {x: waiting.get(x, delay()) for x in turned if x in playing}
      due = [completion for completion, left in waiting.items() if left <= 0]
      rng.shuffle(due)
      waiting = {x: left - 1 for x, left in waiting.items() if left > 0}
      answered += len(due)
      in_order = sorted(due, key=lambda x: (x.group, x.index), reverse=True)
      for completion in in_order:
        if has_next_turn(completion, playing):
          session.join(completion)
  assert not playing and not waiting and all(x.ended for row in rows for x in row)
  return rows, answered


def has_next_turn(completion, playing):
  """Lets a completion read the answer to its turn; returns False if it has ended."""
  tokens = answer(completion)
  if tokens is None:
    playing.discard(completion)
    return False
  completion.read(tokens)
  return True


def one_by_one(built, i, j):
  """The same completion without company, each turn sampled in a call of its own."""
  _, engine, layout = built
  keys = engine.completion_keys(jax.random.key(KEY), len(RAGGED_PROMPTS), GROUP)
  rows = engine.completions(RAGGED_PROMPTS[i : i + 1], keys[i : i + 1, j : j + 1])
  while True:
    for _ in engine.generate(layout, rows, sampling_params=PARAMS):
      pass
    tokens = answer(rows[0][0])
    if tokens is None:
      return rows
    rows[0][0].read(tokens)


@functools.cache
def expected():
  built = build(max_tokens=TOKENS, engine_config=FEW_SLOTS)
  rows, answered = converse(built)
  rollouts = built[1].rollouts(rows)
  assert answered > 1.4 * rollouts.finished.size and 0.2 < rollouts.finished.mean() < 1
  return rollouts


def test_tokens_are_those_of_each_completion_by_itself():
  built = build(max_tokens=TOKENS, engine_config=FEW_SLOTS)
  rollouts = expected()
  context = rollouts.present & ~rollouts.mask
  assert context.any(-1).mean() > 0.3
  for name in ("log_probs", "entropy"):
    assert not getattr(rollouts, name)[context].any()
  assert log_prob_errors(built, rollouts).max() <= 1e-4
  for i in range(0, len(RAGGED_PROMPTS), 4):
    alone = built[1].rollouts(one_by_one(built, i, i % GROUP))
    one = jax.tree.map(lambda x, i=i: x[i : i + 1], rollouts.replace(prompts=None))
    one = jax.tree.map(lambda x, i=i: x[:, i % GROUP : i % GROUP + 1], one)
    assert_same(one, alone)
    np.testing.assert_array_equal(one.present, alone.present)


@pytest.mark.parametrize(("longest", "calls"), [(7, ()), (3, (4, 1, 9)), (40, (2,))])
def test_delays_and_aborted_calls_do_not_matter(longest, calls):
  """With the longest delays, all completions wait at times, and there is nothing to sample."""
  rng = np.random.default_rng(longest)
  built = build(max_tokens=TOKENS, engine_config=FEW_SLOTS)
  rows, _ = converse(built, lambda: int(rng.integers(0, longest)), calls)
  assert_same(built[1].rollouts(rows), expected())


@pytest.mark.some(0, slow=2)
@pytest.mark.parametrize(
  ("mesh", "config"),
  [
    ((1, 1, 1, 1), EngineConfig(slots=1, chunk=3)),
    ((1, 1, 1, 1), EngineConfig(slots=64, chunk=16)),
    ((1, 1, 1, 1), EngineConfig(slots=6, chunk=4, attention="pallas", page_size=16)),
    (
      (1, 1, 1, 1),
      EngineConfig(slots=6, chunk=4, attention="pallas", page_size=16, cache_fraction=0.3),
    ),
    pytest.param((2, 2, 1, 2), EngineConfig(slots=16, chunk=4), marks=pytest.mark.devices),
  ],
)
def test_slots_pages_and_the_mesh_do_not_matter(mesh, config):
  rng = np.random.default_rng(1)
  built = build(mesh_of(*mesh), max_tokens=TOKENS, engine_config=config)
  rows, _ = converse(built, lambda: int(rng.integers(0, 4)))
  assert_same(built[1].rollouts(rows), expected())


@pytest.mark.parametrize("attention", ["xla", pytest.param("pallas", marks=pytest.mark.slow)])
def test_requests_that_are_cancelled_leave_and_others_stay(attention):
  """Some have a slot, others wait for one, and whole prompts go."""
  config = EngineConfig(slots=5, chunk=4, attention=attention, page_size=16)
  _, engine, layout = build(max_tokens=TOKENS, engine_config=config)
  rows = new_rows(engine)
  programs = engine.programs
  scheduler = programs.sizes.scheduler(len(rows), GROUP)
  session = Session(programs, layout, scheduler, Pace(4), PARAMS, max(map(len, RAGGED_PROMPTS)))
  for row in rows:
    session.submit(row[0].prompt, row)
  ended = session.step()
  left = [x for row in rows for x in row if x not in ended]
  goes = [x for x in left if (x.group + x.index) % 3 == 0 or x.group == 1]
  assert {session._places[x] in map(tuple, scheduler.slots.completions.tolist()) for x in goes} == {
    True,
    False,
  }
  for completion in goes:
    session.cancel(completion)
  session.forget(rows[1][0].prompt)
  while session.busy:
    ended += session.step()
  assert set(ended) == {x for row in rows for x in row} - set(goes)
  whole = sample(build(max_tokens=TOKENS), RAGGED_PROMPTS, group=GROUP, key=KEY)
  for completion in ended:
    place = (completion.group, completion.index)
    np.testing.assert_array_equal(completion.tokens, whole.tokens[place][whole.present[place]])
  assert not scheduler.has_waiting and not any(map(any, scheduler._entries))


@pytest.mark.slow
@pytest.mark.parametrize("attention", [pytest.param("xla", marks=pytest.mark.manual), "pallas"])
def test_nothing_is_compiled_after_the_warm_up(attention):
  config = EngineConfig(slots=5, chunk=4, attention=attention, page_size=16)
  built = build(max_tokens=TOKENS, engine_config=config)
  workload = Workload(len(RAGGED_PROMPTS), GROUP, PARAMS, turns=True)
  warm_up(built[1].programs, built[2], [workload])
  before = compile_count()
  for longest in (1, 9):
    rng = np.random.default_rng(longest)
    converse(built, lambda rng=rng, longest=longest: int(rng.integers(0, longest)))
  assert compile_count() == before


@pytest.mark.slow
def test_a_last_completion_returns_after_idle_slots_were_dropped():
  """The programs for fewer slots are in the inventory too."""
  config = EngineConfig(slots=64, chunk=4)
  built = build(max_tokens=TOKENS, engine_config=config)
  _, engine, layout = built
  warm_up(engine.programs, layout, [Workload(len(RAGGED_PROMPTS), GROUP, PARAMS, turns=True)])
  before = compile_count()
  rows = new_rows(engine)
  playing = {completion for row in rows for completion in row}
  answered = 0
  session = new_session(engine, layout, rows)
  while session.busy:
    turned = session.step()
    last = len(playing) - len(turned) < 8
    again = [x for x in turned if last and has_next_turn(x, playing)]
    playing -= set() if last else set(turned)
    for completion in again:
      session.join(completion)
    answered += len(again)
  assert answered > 1 and compile_count() == before


# --- what a completion accepts ---


def empty(strings=(), limit=12):
  """Returns a completion without tokens, and a function that encodes texts."""
  chat = load_chat()
  stop = StopStrings(strings, lambda: TextStream(chat.texts).add, chat.decode) if strings else None
  made = Completion(Prompt([5]), np.zeros(2, np.uint32), limit, stop)
  return made, lambda text: chat.encode_plain(text)


def draw(completion, tokens, stopped=False):
  """Draws a chunk of one slot; returns how many of its tokens are kept."""
  column = lambda dtype: np.ones((len(tokens), 1), dtype)
  floats = [column(np.float32) for _ in range(4)]
  chunk = Chunk(np.asarray(tokens)[:, None], column(bool), *floats, np.asarray([stopped]))
  assert completion.begin_turn()
  counts, finished = up_to_stop_strings([completion], chunk)
  completion.draw(chunk, 0, int(counts[0]), bool(finished[0]))
  return int(counts[0])


def test_a_completion_refuses_what_does_not_fit():
  completion, _ = empty()
  draw(completion, [1, 2, 3])
  assert not completion.ended
  draw(completion, [STOP[0]], stopped=True)
  assert completion.ended
  for tokens in ([], [5] * 8, [5] * 9):
    with pytest.raises(ValueError, match="has 4 of 12 tokens; from 1 to 7 can be added"):
      completion.read(tokens)
  completion.read([5] * 7)
  assert not completion.ended and completion.mask.sum() == 4 and completion.length == 11
  draw(completion, [6])
  assert completion.ended and not completion.finished  # its turn was cut off at the limit
  with pytest.raises(ValueError, match="from 1 to -1 can"):
    completion.read([5])


def test_stop_strings_are_found_in_turns_only():
  completion, encode = empty(("END", "<<"), limit=60)
  one, two = encode("12 END"), encode("a < b")
  assert draw(completion, [*one, *encode("3")]) == len(one)  # nothing is drawn after a match
  assert completion.ended
  completion.read(encode("END << <"))
  assert not completion.ended
  # The observation's < is not its first.
  assert draw(completion, encode("< b")) == len(encode("< b"))
  assert draw(completion, [STOP[0]], stopped=True) == 1
  completion.read(encode(" EN"))
  assert draw(completion, encode("D")) == len(encode("D"))
  assert not completion.ended
  assert draw(completion, [*two, *encode("<<")]) == len(two) + len(encode("<<"))
  assert completion.ended and completion.finished


def test_a_turn_that_is_searched_again_begins_after_the_observation():
  """A completion may resume another one's tokens: nothing was searched there."""
  completion, encode = empty(("END",), limit=60)
  draw(completion, [*encode("1"), STOP[0]], stopped=True)
  completion.read(encode("END"))
  copied, _ = empty(("END",), limit=60)
  copied.resume(completion)
  assert draw(copied, encode("2")) == len(encode("2")) and not copied.ended
  assert completion.length == len(copied.tokens) - len(encode("2"))  # it stays as it was


# --- the schedule ---


@pytest.mark.parametrize("paged", [False, True])
@settings(max_examples=40, deadline=None)
@given(**SHAPES)
def test_completions_that_leave_their_slots_return(
  paged, prompts, group, shards, slots, spare, seed
):
  """Each runs to its end, and only prompts with a completion that runs or waits have an entry."""
  rng = np.random.default_rng(seed)
  rows, lengths = make_rows(rng, prompts, group)
  _, limits, keys, drawn = rows
  scheduler = make_scheduler(paged, spare, prompts, group, shards, slots)
  scheduler.add(*rows)
  tokens_of = drawn.copy()
  pair_of = {pair: pair for pair in np.ndindex(drawn.shape)}  # by the scheduler's (prompt, index)
  away = []
  done = []
  for chunk in range(10_000):
    for pair in [pair for pair in away if rng.random() < 0.3]:
      away.remove(pair)
      tokens_of[pair] += 1  # an observation
      index = scheduler.join(pair[0], int(tokens_of[pair]), int(limits[pair]), keys[pair])
      pair_of[pair[0], index] = pair
    while any(scheduler.assign(2)):
      pass
    for entry in (entry for entries in scheduler._entries for entry in entries if entry):
      assert entry.waiting or max(entry.slots) >= 0
    for slot in scheduler.take_resumed():
      pair = pair_of[tuple(scheduler.slots.completions[slot].tolist())]
      assert scheduler.slots.generated[slot] == tokens_of[pair] > 0
    if not scheduler.slots.active.any():
      assert not scheduler.has_waiting
      if not away:
        break
      continue
    inputs = scheduler.inputs()
    assert inputs.active.any(), "no completion can go on"
    pairs = [pair_of.get(tuple(pair)) for pair in scheduler.slots.completions.tolist()]
    tokens = np.zeros(len(pairs), int)
    left = np.zeros(len(pairs), bool)
    for slot in np.flatnonzero(inputs.active):
      pair = pairs[slot]
      np.testing.assert_array_equal(inputs.keys[slot], keys[pair])
      assert inputs.generated[slot] == tokens_of[pair]
      to_end = max(int(lengths[pair] - tokens_of[pair]), 1)
      tokens[slot] = rng.integers(1, min(to_end, CHUNK) + 1)
      tokens_of[pair] += tokens[slot]
      ended = tokens_of[pair] >= lengths[pair] or tokens_of[pair] >= LIMIT - 1
      parked = not ended and tokens_of[pair] + 1 < limits[pair] and rng.random() < 0.4
      left[slot] = ended or parked
      done += [pair] * bool(ended)
      away += [pair] * bool(parked)
    scheduler.advance(tokens, left)
    assert chunk < 9_999
  assert sorted(done) == [tuple(pair) for pair in np.argwhere(limits).tolist()]
