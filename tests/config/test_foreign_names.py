"""Names of settings of TRL, verl and Tunix are answered with what has their meaning here."""

import re
from pathlib import Path

import pytest
from toys import nested

from gtpo_jax.config import Config, default_config, flatten, freeze, load_config, to_dict
from gtpo_jax.config.describe import FOREIGN_NAMES
from gtpo_jax.runtime.errors import UserError

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "from_trl.md", DOCS / "from_verl.md"]
VALID = flatten(to_dict(Config()))


def refused(key):
  with pytest.raises(UserError) as caught:
    freeze(nested({key: 1}))
  return str(caught.value)


@pytest.mark.parametrize(
  ("key", "ours"),
  [
    ("beta", "algorithm.kl_weight"),
    ("num_train_epochs", "steps: a run counts updates, not passes over the data"),
    ("num_generations", "batch.group"),
    ("max_completion_length", "sampling.max_tokens"),
    ("optimizer.lr", "optimizer.learning_rate"),
    ("batch.gradient_accumulation_steps", "batch.prompts (larger) and batch.micro_batches"),
  ],
)
def test_a_name_of_another_library(key, ours):
  message = f"unknown config key {key!r}, which other libraries have; here it is {ours}"
  assert message in refused(key)


def test_the_right_name_without_its_section():
  assert "unknown config key 'temperature', did you mean 'sampling.temperature'?" in refused(
    "temperature"
  )


def test_every_answer_names_a_setting_that_exists():
  for name, ours in FOREIGN_NAMES.items():
    for key in re.findall(r"\b[a-z]+\.[a-z_0-9]+\b", ours):
      assert key in VALID, (name, key)
    assert name not in VALID


def test_names_in_the_tables_of_the_pages_are_known():
  """For a row with one foreign name and one setting of ours, the program gives the same answer."""
  text = "".join(page.read_text() for page in PAGES)
  pairs = re.findall(r"^\| `(?:\w+\.)*(\w+)` \| `(\w+\.\w+)` \|$", text, re.M)
  assert len(pairs) >= 5, pairs
  for name, ours in pairs:
    assert FOREIGN_NAMES[name].startswith(ours)


def test_a_config_that_was_read_can_be_changed():
  config = load_config("tiny", ["--config.steps=3"])
  assert type(config) is type(default_config())
  config.steps += 4
  config.sampling.stop = (".",)
  assert freeze(config).steps == 7
