"""Runs a scheduler without an engine: the tests choose the lengths of the completions."""

import numpy as np

NOTHING = lambda *_: None


def play(
  scheduler, lengths, chunk, most=2, *, join=NOTHING, assigned=NOTHING, shrink=NOTHING, ran=NOTHING
):
  """Runs every completion to its end.

  Args:
    scheduler: may have rows already.
    lengths: of the completions, i[prompts, group].
    chunk: the most tokens that a completion gets in a chunk.
    most: prompts that are assigned at once, per shard.
    join: (number of the chunk) -> whether more rows come later; it may add some.
    assigned: is called with what was assigned.
    shrink: is called before each chunk, and may drop slots.
    ran: is called with the inputs of each chunk, and the tokens that each slot gets.

  Returns:
    The completions in the order of their ends, and the number of chunks.
  """
  done = []
  chunks = 0
  for number in range(10_000):
    more = join(number)
    while any(pairs := scheduler.assign(most)):
      assigned(pairs)
    if scheduler.slots.active.any():
      shrink(scheduler)
      inputs = scheduler.inputs()
      assert inputs.active.any(), "no completion can go on"
      left = lengths[tuple(scheduler.slots.completions.T)] - inputs.generated
      tokens = np.where(inputs.active, np.minimum(left, chunk), 0)
      ran(inputs, tokens)
      ended = inputs.active & (tokens == left)
      done += map(tuple, scheduler.slots.completions[ended].tolist())
      scheduler.advance(tokens, ended)
      chunks += 1
    elif not more:
      break
  assert not scheduler.has_waiting
  return done, chunks
