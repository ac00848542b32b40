"""`gtpo sample` with an environment: options, and how an episode is printed."""

import numpy as np
import pytest

from gtpo_jax.cli.parser import parse
from gtpo_jax.cli.samples import _outcome, _transcript, parse_row
from gtpo_jax.config import freeze, override
from gtpo_jax.data.chat import load_chat
from gtpo_jax.environments.turns import Episode, Stop, Turn
from gtpo_jax.runtime.errors import UserError


def test_overrides_change_the_config_of_a_policy():
  args, overrides = parse(
    ["sample", "--model=m", "--prompt=p", "--config.env.make=m:C", "--config.env.max_turns=3"]
  )
  assert args.row == "{}"
  config = override(freeze({"steps": 7}), overrides)
  assert (config.steps, config.env.make, config.env.max_turns) == (7, "m:C", 3)
  assert override(config, ()) is config
  for wrong, message in (
    ("--config.env.max_turn=3", "unknown config key 'env.max_turn', did you mean"),
    ("--config.env.max_turns=x", "config key 'env.max_turns' has no text as its value, got 'x'"),
    ("--config.env.max_turns=0", "env.max_turns must be at least 1, got 0"),
  ):
    with pytest.raises(UserError) as raised:
      override(config, [wrong])
    assert str(raised.value).startswith(message)


def test_a_row_is_a_json_object():
  assert parse_row('{"answer": "20"}') == {"answer": "20"}
  for text in ("[]", "3", "{", "answer=20"):
    with pytest.raises(UserError, match="--row"):
      parse_row(text)


def test_what_was_read_is_dim_on_a_terminal(monkeypatch):
  chat = load_chat()
  parts = [(True, "16<|im_end|>"), (False, "\nhigher"), (True, "24<|im_end|>")]
  tokens = [chat.encode(text) for _, text in parts]
  drawn = np.concatenate(
    [np.full(len(ids), part[0]) for part, ids in zip(parts, tokens, strict=True)]
  )
  ids = np.concatenate(tokens)
  assert _transcript(chat, ids, drawn, str) == "16\nhigher24"
  monkeypatch.setattr("sys.stdout.isatty", lambda: True)
  assert _transcript(chat, ids, drawn, str) == "16\x1b[2m\nhigher\x1b[0m24"
  assert _transcript(chat, ids[:0], drawn[:0], str) == ""


def test_the_outcome_is_one_line():
  episode = Episode((Turn("16"),), Stop.ENV_ERROR, 0.5, (0.5,), None, False, 2, 0.0, {}, "it broke")
  assert _outcome(episode) == "[env_error (it broke): no verdict, reward 0.5, 1 turns, 0 calls]"
