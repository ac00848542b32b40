"""The date in a chat template is the day of a run's start: on resuming, evaluating and serving."""

import datetime
import json

import pytest
from toys import ADDITIONS, Listener, config_of, even, save_llama

import gtpo_jax
from gtpo_jax.checkpoint.workdir import load_config
from gtpo_jax.config import freeze
from gtpo_jax.data.chat import load_chat
from gtpo_jax.rollout.policies import ServingLimits, find_policy, find_served
from gtpo_jax.runtime.errors import UserError

TEMPLATE = (
  "{{ strftime_now('%d %b %Y') }} {% for m in messages %}{{ m['content'] }}{% endfor %}"
  "{% if add_generation_prompt %}:{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
  """A model whose chat template writes the date."""
  out = tmp_path / "model"
  save_llama(out, load_chat().tokenizer)
  file = out / "tokenizer_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
  (out / "chat_template.jinja").unlink(missing_ok=True)
  return out


def prompt(worker):
  chat = worker.chat
  return chat.decode([chat.encode_prompt([{"role": "user", "content": "hi"}])])[0]


@pytest.mark.slow
def test_a_run_keeps_the_date_of_its_start(folder, tmp_path):
  workdir = tmp_path / "run"

  def train(steps, **changes):
    display = Listener()
    settings = {
      "steps": steps,
      "model.path": str(folder),
      "data.max_prompt_tokens": 30,
      "sampling.max_tokens": 8,
      "batch.prompts": 2,
      "batch.group": 2,
      "eval.every": 0,
      "eval.problems": 2,
      "eval.batch": 2,
      **changes,
    }
    gtpo_jax.train(
      config_of(**settings), workdir, display, lambda: False, reward=even, data=ADDITIONS
    )
    return [line for line in display.said if "reads the date" in line]

  before = datetime.date.today().isoformat()
  (line,) = train(1)
  date = load_config(workdir).data.date
  assert date in line and date in (before, datetime.date.today().isoformat())
  config = json.loads((workdir / "config.json").read_text())
  config["data"]["date"] = "2020-02-03"  # as if the run had started then
  (workdir / "config.json").write_text(json.dumps(config))
  assert train(2) == []
  assert load_config(workdir).data.date == "2020-02-03"
  with pytest.raises(UserError, match=r"data.date was '2020-02-03', now '2021-01-01'"):
    train(2, **{"data.date": "2021-01-01"})
  del config["data"]["date"]  # as an earlier version wrote it
  (workdir / "config.json").write_text(json.dumps(config))
  (line,) = train(3)
  assert load_config(workdir).data.date in line
  config["data"]["date"] = "2020-02-03"
  (workdir / "config.json").write_text(json.dumps(config))
  other = config_of(**{"model.path": str(folder), "sampling.max_tokens": 8})
  for source in (
    find_policy(workdir, None),
    find_policy(workdir, None, other),
    find_served(workdir, None, ServingLimits(16, 16)),
  ):
    assert prompt(source.worker) == "03 Feb 2020 hi:"
  assert prompt(find_policy(folder, None, other).worker).startswith(
    f"{datetime.date.today():%d %b %Y}"
  )


@pytest.mark.slow
def test_the_config_of_another_template_has_no_date(tmp_path):
  settings = {"steps": 1, "batch": {"prompts": 2, "group": 2}, "eval": {"problems": 2, "batch": 2}}
  settings |= {"data": {"max_prompt_tokens": 20}, "sampling": {"max_tokens": 8}}
  display = Listener()
  gtpo_jax.train(
    freeze(settings), tmp_path / "run", display, lambda: False, reward=even, data=ADDITIONS
  )
  assert load_config(tmp_path / "run").data.date == ""
  assert not [line for line in display.said if "reads the date" in line]


def test_a_date_that_is_none_is_refused():
  with pytest.raises(UserError, match=r"^data.date must be a day such as 2026-11-29, got '3 May'"):
    config_of(**{"data.date": "3 May"})
