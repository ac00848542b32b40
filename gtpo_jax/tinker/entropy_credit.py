"""Entropy-shaped credit for data that were sampled here: advantages by any recipe of the package.

Whether a sequence is correct is the sign of the advantage that the client has given it, a group are
the sequences with the same prompt, and the entropies are those recorded when the tokens were drawn.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from gtpo_jax.algorithms import RECIPES, Algorithm, make
from gtpo_jax.arrays import Signals
from gtpo_jax.runtime.errors import did_you_mean
from gtpo_jax.serving.requests import bad, shown
from gtpo_jax.tinker.datum_batches import by_prompt, doubled, loss_begins
from gtpo_jax.tinker.losses import SETTINGS
from gtpo_jax.tinker.wire import Datum, Sample, of_each

CREDIT = "credit"  # the setting of a loss that names a recipe
SHAPED = ("importance_sampling", "ppo", "cispo")


def split_credit(
  loss: str, config: Mapping[str, float | str]
) -> tuple[Algorithm | None, dict[str, float | str]]:
  """Returns the recipe that a loss's settings ask for, and the settings of the loss itself.

  Raises:
    ApiError: the loss has no credit, or the recipe or a setting is unknown.
    UserError: a value is out of bounds.
  """
  rest = dict(config)
  name = rest.pop(CREDIT, None)
  if name is None:
    return None, rest
  if loss not in SHAPED:
    raise bad(f"{loss} takes no credit; use {', '.join(SHAPED)}", CREDIT)
  if name not in RECIPES:
    hint = did_you_mean(str(name), RECIPES)
    raise bad(f"unknown credit {shown(name)}{hint}; there are {', '.join(RECIPES)}", CREDIT)
  recipe = RECIPES[name]
  if recipe.distillation or recipe.guide.guide_completions:
    raise bad(f"credit {name!r} needs a second model, which this server does not have", CREDIT)
  if recipe.needs:
    raise bad(f"credit {name!r} needs {recipe.needs[0]}, which requests do not have", CREDIT)
  own = {key: value for key, value in rest.items() if key not in SETTINGS[loss]}
  values = {
    # The protocol has floats only.
    key: int(value) if isinstance(recipe.settings.get(key), int) and value == int(value) else value
    for key, value in own.items()
    if not isinstance(value, str)
  }
  parts = (recipe.shaping, recipe.normalisation, recipe.modulation)
  read = {"contrast"}.union(*(dataclasses.asdict(part) for part in parts))
  if unread := [key for key in own if key not in read and key in recipe.settings]:
    raise bad(
      f"{unread[0]} does not change advantages, and has no effect on credit; leave it out",
      unread[0],
    )
  algorithm = make(str(name), **(own | values))
  return algorithm, {key: value for key, value in rest.items() if key not in own}


def recorded(data: Sequence[Datum], find: Callable[[str], Sample]) -> list[np.ndarray]:
  """Returns the entropies of each sequence's targets, f32[s], NaN where none was drawn or is paid.

  `find` returns a sampled sequence by its id.
  """

  def recorded_of(datum: Datum) -> np.ndarray:
    paid = datum.inputs["advantages"] != 0
    drawn = np.zeros(len(paid), bool)
    entropy = np.zeros(len(paid), np.float32)
    for span in datum.spans or ():
      sample = find(span.sequence)
      there = slice(span.start, span.start + span.length)
      place = slice(span.offset, span.offset + span.length)
      if not np.array_equal(datum.targets[there], sample.tokens[place]):
        raise bad(f"the span of sample {span.sequence[:80]!r} has other tokens than were drawn")
      drawn[there] = True
      entropy[there] = sample.entropy[place]
    if (paid & ~drawn).any():
      raise bad(
        "credit needs spans that name the samples of all tokens with an advantage "
        "(Datum.with_provenance)"
      )
    return np.where(drawn & paid, entropy, np.float32(np.nan))

  return list(of_each(recorded_of, data))


def shape(
  algorithm: Algorithm, data: Sequence[Datum], entropies: Sequence[np.ndarray]
) -> tuple[list[Datum], dict[str, float]]:
  """Returns the data with the advantages of a recipe, and its metrics.

  Args:
    algorithm: the recipe.
    data: with advantages whose sign says which sequences are correct.
    entropies: of `recorded`.
  """
  drawn = [~np.isnan(x) for x in entropies]
  entropy = [np.nan_to_num(x) for x in entropies]
  begins = [loss_begins(datum) for datum in data]
  rows = by_prompt(data, begins)
  n, g = len(rows), max(map(len, rows))
  longest = max(len(datum.tokens) - begin for datum, begin in zip(data, begins, strict=True))
  t = doubled(longest)
  mask = np.zeros((doubled(n), doubled(g), t), bool)
  padded = np.zeros(mask.shape, np.float32)
  correct = np.zeros(mask.shape[:2], bool)
  for row, group in enumerate(rows):
    for column, i in enumerate(group):
      begin = begins[i]
      length = len(data[i].tokens) - begin
      mask[row, column, :length] = drawn[i][begin:]
      padded[row, column, :length] = entropy[i][begin:]
      correct[row, column] = data[i].inputs["advantages"].sum() > 0
  advantages, metrics = jax.device_get(_advantages(algorithm, mask, padded, correct))
  shaped = list(data)
  for row, group in enumerate(rows):
    for column, i in enumerate(group):
      begin = begins[i]
      values = np.zeros(len(data[i].tokens), np.float32)
      values[begin:] = advantages[row, column, : len(values) - begin]
      shaped[i] = dataclasses.replace(data[i], inputs={**data[i].inputs, "advantages": values})
  means = {f"{name.replace(':', '/')}:mean": float(x) for name, x in metrics.items()}
  return shaped, {name: x for name, x in means.items() if np.isfinite(x)}


@functools.partial(jax.jit, static_argnums=0)
def _advantages(
  algorithm: Algorithm, mask: jax.Array, entropy: jax.Array, correct: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  wrong, right = algorithm.recipe.rewards
  reward = correct * (right - wrong) + wrong
  signals = Signals(mask=mask, entropy=entropy, correct=correct, reward=reward)
  return algorithm.advantages(signals), algorithm.credit_metrics(signals)
