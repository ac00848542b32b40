"""Sentences: write one sentence about a topic that uses a word, for pretrained models."""

from __future__ import annotations

import itertools

import numpy as np

from gtpo_jax.data.records import Problem, user
from gtpo_jax.data.tasks.task import split

SENTENCE_SLIP = 0.7  # the teacher leaves the word out, at `slips` = 1
TOPICS = """
ant apple baker balloon barn bear bicycle bird boat bridge bus cake camel candle car castle cat
chair church city cloud cook cow desert doctor dog dolphin dragon duck eagle farmer fire fish flower
forest fox frog garden ghost goat guitar hammer hat horse hotel island kitchen lake lamp lion market
moon mountain mouse owl painter park piano pirate planet pond queen rabbit river robot rose sailor
school sheep ship soldier spider star storm teacher tiger tower train tree turtle village volcano
whale wolf
"""
WORDS = """
arrow basket bell blanket bottle bowl box brush bucket button coat coin corner cotton cup curtain
drum dust fence flag floor gift glass glove gold hill hole ice iron key knife ladder leaf letter
line map metal milk mirror money mud nail needle net newspaper paint paper path pencil picture
pillow plate pocket powder ring road roof rope salt sand shadow shelf shoe silver smoke soap song
spoon stone story string sugar table thread ticket tool toy wall water wheel whistle window wire
wood wool
"""
TEMPLATES = (
  "The {topic} was near the {word} this morning.",
  "Nobody knew why the {topic} had a {word} at home.",
  "Behind the {word} they saw a {topic} at night.",
  "Last winter the {topic} lost its {word} for good.",
)


class Sentences:
  """Sentences: "Write one short sentence about a whale. Use the word rope in it."

  An answer is one sentence of 6 to 20 words with the topic and the word, neither quoted nor talked
  about (`rewards.synthetic.sentence_correct`). The task is for pretrained models; it needs no
  download besides the model. The teacher knows a few sentences by heart and often leaves the word
  out.
  """

  name = "sentences"
  terms = 1
  largest = 1

  def __init__(self):
    self._pairs = list(itertools.product(TOPICS.split(), WORDS.split()))
    self.size = len(self._pairs)
    self.train_ids, self.held_out_ids = split(self, np.arange(self.size))

  def problem(self, index: int) -> Problem:
    """Returns the topic and the word as an instruction; the answer is the word."""
    topic, word = self._pairs[index]
    article = "an" if topic[0] in "aeiou" else "a"
    instruction = f"Write one short sentence about {article} {topic}. Use the word {word} in it."
    extra = {"topic": topic, "word": word}
    return Problem(f"sentences-{index}", user(instruction), word, "sentence", extra)

  def demonstration(self, index: int, rng: np.random.Generator, slips: float) -> str:
    """Returns one of the teacher's sentences, some of which have another word."""
    topic, word = self._pairs[index]
    if rng.random() < slips * SENTENCE_SLIP:
      word = "thing"
    return str(rng.choice(TEMPLATES)).format(topic=topic, word=word)
