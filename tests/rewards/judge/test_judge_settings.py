"""The settings of a judge: what is refused, in one line that says what to do."""

import json
import re

import pytest

from gtpo_jax.checkpoint.workdir import forbidden_changes
from gtpo_jax.config import Config, freeze
from gtpo_jax.loop.evaluation.evaluate import evaluation_settings
from gtpo_jax.rewards.judge.judge_settings import JudgeSettings
from gtpo_jax.runtime.errors import UserError

COMPARES = {"opponents": 1, "template": "{completion} {other}"}
HERE = {"base_url": "http://localhost:8000/v1", "model": "m"}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"template": "rate {answer}"}, "template must contain {completion}, got 'rate {answer}'"),
    ({"opponents": 1}, "opponents = 1 and {other} in reward.judge.template need each"),
    ({"template": "{completion} {other}"}, "opponents = 0 and {other} in"),
    (
      {"opponents": 1, "template": "{completion} {other} {answer}"},
      "template cannot have {answer} with reward.judge.opponents: evaluations",
    ),
    ({"pattern": "Grade: 5"}, r"pattern must have a group around the grade, such as"),
    ({"pattern": "(Grade"}, "pattern = '(Grade' is no pattern: missing )"),
    ({"scale": "ten"}, "scale must be two numbers, such as 0:10, or words"),
    ({"scale": "3:3"}, "scale must be two numbers"),
    ({"scale": "0:inf"}, "scale must be two numbers"),
    ({"scale": "no=0,no=1"}, "scale must be two numbers"),
    ({"scale": "no=0,yes=2"}, "scale must be two numbers"),
    ({"questions": ()}, "questions must be a tuple of 1 to 20 non-empty strings, got ()"),
    ({"questions": ("a", " ")}, "questions must be a tuple of 1 to 20"),
    ({"threshold": 0.0}, "threshold must be in (0, 1], got 0.0"),
    ({"concurrency": 0}, "concurrency must be from 1 to 1024, got 0"),
    ({"timeout_s": 0.0}, "timeout_s must be above 0"),
    ({"retries": -1}, "retries must be from 0 to 100, got -1"),
    ({"temperature": 2.5}, "temperature must be from 0 to 2, got 2.5"),
    ({"request": "[1]"}, "request must be a JSON object, such as '{\"reasoning_effort"),
    ({"request": '{"a": 1, "a": 2}'}, "(has the key 'a' twice (1 and 2); leave one out)"),
    ({"request": "{"}, "request must be a JSON object"),
    ({"model": ""}, "base_url = 'http://localhost:8000/v1' needs reward.judge.model too"),
    ({"base_url": ""}, "model = 'm' needs reward.judge.base_url too"),
    ({"base_url": "localhost:8000"}, "base_url must be an address such as http://localhost:8000"),
    ({"base_url": "ftp://a/v1"}, "base_url must be an address"),
    ({"base_url": "http://a:port/v1"}, "base_url must be an address"),
    ({"base_url": "http://[::1/v1"}, "base_url must be an address"),
    ({"base_url": "https://a/v1?key=sk-1"}, "base_url must not have a user, a password, a query"),
  ],
)
def test_invalid_settings_are_refused(changes, message):
  with pytest.raises(UserError, match=re.escape(message)) as raised:
    JudgeSettings(**{**HERE, **changes})
  text = str(raised.value)
  assert text.startswith(("reward.judge.", "both ")) and "\n" not in text
  with pytest.raises(UserError, match=re.escape(message)):
    freeze({"reward": {"judge": {**HERE, **changes}}})


@pytest.mark.parametrize("url", ["https://me:sk-1@a/v1", "sk-1@a", "https://me:sk-1@a:x/v1"])
def test_a_password_in_the_address_is_not_shown(url):
  with pytest.raises(UserError) as raised:
    JudgeSettings(base_url=url, model="m")
  assert "sk-1" not in str(raised.value)


@pytest.mark.parametrize("suffix", ["", "/", "/chat/completions"])
def test_the_endpoint(suffix):
  settings = JudgeSettings(base_url=f"http://a/v1{suffix}", model="m")
  assert settings.endpoint == "http://a/v1/chat/completions"


@pytest.mark.parametrize(
  ("reward", "message"),
  [
    ({"parts": "correct,judge"}, "has the part judge: set reward.judge.base_url"),
    ({"judge": {**HERE, "decides": False}}, "only has an effect with reward.judge.decides, or"),
    (
      {"parts": "correct,judge", "judge": {**HERE, "decides": False, **COMPARES}},
      "opponents = 1 only has an effect with reward.judge.base_url and reward.judge.decides",
    ),
    (
      {"judge": {**HERE, **COMPARES, "opponents": 16}},
      "reward.judge.opponents must be below batch.group = 16, got 16",
    ),
    (
      {"judge": {**HERE, "questions": ("a?", "b?"), "template": "{completion}"}},
      "only has an effect with reward.judge.base_url and {question} in reward.judge.template",
    ),
    ({"judge": HERE, "verifier": "m:f"}, "both reward.verifier = 'm:f' and the judge decide"),
  ],
)
def test_the_judge_and_the_rest_of_the_reward(reward, message):
  with pytest.raises(UserError, match=re.escape(message)):
    freeze({"reward": reward})


def test_who_decides():
  with_judge = lambda **more: freeze(
    {"reward": {"judge": {**HERE, **more.pop("judge", {})}, **more}}
  )
  assert not Config().reward.replaces_verifiers
  assert with_judge().reward.replaces_verifiers and not with_judge().reward.reads_grades
  assert with_judge(parts="correct,verifier").reward.reads_grades
  part = with_judge(parts="correct,judge*0.1", judge={"decides": False})
  assert part.reward.reads_grades and not part.reward.replaces_verifiers


def test_how_a_run_asks_may_change_when_it_resumes_but_not_what():
  saved = freeze({"reward": {"judge": HERE}})
  of = lambda **changes: freeze({"reward": {"judge": {**HERE, **changes}}})
  asks = {"concurrency": 4, "timeout_s": 9.0, "completion_timeout_s": 99.0, "retries": 1}
  assert forbidden_changes(saved, of(**asks)) == []
  assert forbidden_changes(saved, of(threshold=0.6)) == ["reward.judge.threshold was 0.5, now 0.6"]
  assert len(forbidden_changes(saved, Config())) == 2  # its address and its model


def test_evaluations_by_judges_with_other_rubrics_are_not_compared():
  of = lambda **changes: evaluation_settings(freeze({"reward": {"judge": {**HERE, **changes}}}))
  settings = of()
  assert json.loads(json.dumps(settings)) == settings
  assert of(concurrency=1, base_url="http://elsewhere/v1") == settings
  for changes in ({"scale": "0:5"}, {"threshold": 0.6}, {"questions": ("Short?",)}):
    assert of(**changes) != settings
  assert not [name for name in evaluation_settings(Config()) if "judge" in name]
