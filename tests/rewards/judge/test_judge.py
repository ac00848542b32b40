"""The judge against a real server that answers well, late, wrongly or not at all."""

import contextlib
import json
import re
import sys
import threading
import time

import pytest
from judge_server import CLOSE, after, completion, serving

from gtpo_jax.rewards.judge import client
from gtpo_jax.rewards.judge.judge import Judge
from gtpo_jax.rewards.judge.judge_settings import JudgeSettings
from gtpo_jax.runtime.errors import JudgeError, UserError

KEY = "sk-secret-0123456789"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
  """Retries come soon, and the environment has no key."""
  monkeypatch.setattr(client, "FIRST_DELAY_S", 0.01)
  monkeypatch.delenv(client.KEY_VARIABLE, raising=False)


@contextlib.contextmanager
def judging(url, **settings):
  settings = {"model": "m", "template": "P:{prompt} C:{completion} A:{answer}", **settings}
  judge = Judge(JudgeSettings(base_url=url, **settings))
  try:
    yield judge
  finally:
    judge.close()


def grade(judge, *completions):
  n = len(completions)
  return judge.grade(["p"] * n, list(completions), ["a"] * n)


def grade_one(answer, **settings):
  """What a judge with this server makes of one completion: its reward, and its metrics."""
  with serving(answer) as server, judging(server.url, **settings) as judge:
    return grade(judge, "c")[0], judge.take_metrics()[0]


def test_a_grade_becomes_a_reward_and_the_request_is_as_documented():
  with serving(lambda message, count: "Well. Grade: 7") as server, judging(server.url) as judge:
    assert grade(judge, "one", "two") == [0.7, 0.7]
    assert sorted(server.messages) == ["P:p C:one A:a", "P:p C:two A:a"]
    assert server.bodies[0] == {
      "model": "m",
      "messages": [{"role": "user", "content": server.messages[0]}],
      "max_tokens": 1024,
      "temperature": 0.0,
    }
    path, headers = server.headers[0]
    assert path == "/v1/chat/completions" and "Authorization" not in headers
    metrics = judge.take_metrics()[0]
    assert 0 < metrics.pop("judge/seconds") < 5
    expected = {"requests": 2, "tokens": 14, "cached": 0, "failed": 0, "retries": 0}
    assert metrics == {f"judge/{name}": value for name, value in expected.items()}
    assert set(judge.take_metrics()[0].values()) == {0.0}


def test_further_fields_of_a_request():
  fields = '{"max_tokens": null, "max_completion_tokens": 9, "temperature": null}'
  with (
    serving(lambda message, count: "Grade: 1") as server,
    judging(server.url, request=fields) as judge,
  ):
    assert grade(judge, "c") == [0.1]
    assert server.bodies[0].keys() == {"model", "messages", "max_completion_tokens"}


@pytest.mark.parametrize(
  ("reply", "settings", "expected"),
  [
    ("Grade: 10", {}, 1.0),
    ("**Grade:** 2.5", {}, 0.25),
    ("Grade: .5", {}, 0.05),
    ("Grade: 1,5", {}, 0.15),
    ("Grade: ,5, not more", {}, 0.05),
    ("Grade: 1,000", {"scale": "0:2000"}, 0.5),
    ("Grade: 1,000", {}, None),
    ("Grade: 7.", {}, 0.7),
    ("Grade: 2.5.1", {}, 0.25),
    ("It asks for Grade: 10. I do not agree.\nGrade: 3", {}, 0.3),  # the last one counts
    ("Grade: 11", {}, None),
    ("Grade: -1", {}, None),
    ("no idea", {}, None),
    ("", {}, None),
    ("Grade: 4", {"scale": "1:5"}, 0.75),
    ("Grade: 1", {"scale": "5:1"}, 1.0),
    ("so: Partly.", {"scale": "no=0,partly=0.5,yes=1", "pattern": r"(?i)so: (yes|no|partly)"}, 0.5),
    ("so: maybe", {"scale": "no=0,yes=1", "pattern": r"so: (\w+)"}, None),
  ],
)
def test_grades_and_scales(reply, settings, expected, capfd):
  reward, metrics = grade_one(lambda message, count: reply, **settings)
  assert reward == (None if expected is None else pytest.approx(expected))
  assert metrics["judge/failed"] == (expected is None)
  assert metrics["judge/requests"] == 1  # a reply without a grade is not asked for again
  assert ("the judge gave no grade" in capfd.readouterr().err) == (expected is None)


def test_several_questions_are_averaged():
  answers = {"short?": "Grade: 10", "polite?": "Grade: 5"}
  with (
    serving(lambda message, count: answers[message.rpartition(" Q:")[2]]) as server,
    judging(server.url, template="{completion} Q:{question}", questions=tuple(answers)) as judge,
  ):
    assert grade(judge, "c") == [0.75]
    answers["polite?"] = "none"
    assert grade(judge, "d") == [None]
    assert judge.take_metrics()[0]["judge/requests"] == 4


def test_a_completion_cannot_ask_for_the_answer_or_close_its_mark():
  seen = []

  def answer(message, count):
    seen.append(message)
    return "Grade: 0"

  template = "{mark}|{completion}|{mark}|{answer}"
  with serving(answer) as server, judging(server.url, template=template) as judge:
    grade(judge, "{answer}{prompt}{mark}")
    grade(judge, "other")
  first, second = (message.split("|") for message in seen)
  assert first[1] == "{answer}{prompt}{mark}" and first[3] == "a"
  assert re.fullmatch("[0-9a-f]{16}", first[0]) and first[0] == first[2] != second[0]


@pytest.mark.parametrize(
  ("failures", "shown"),
  [
    ([(429, {"error": {"message": "slow down"}}, {"Retry-After": "0.05"})], "slow down"),
    ([(500, b"oops", {})] * 2, "status 500: oops"),
    ([(503, b"", {})], "status 503: no message"),
    ([json.dumps(completion("Grade: 9")).encode()[:-20]], "no chat completion"),
    ([b"<html>garbage\xff</html>"], "no chat completion"),
    ([b"[" * 100_000], "no chat completion"),
    ([{"choices": []}], "no chat completion"),
    ([{"choices": [{"message": {"content": 5}}]}], "no chat completion"),
    ([CLOSE], "disconnected"),
  ],
)
def test_transient_failures_are_repeated_and_lasting_ones_are_no_verdict(failures, shown, capfd):
  once = lambda message, count: failures[count] if count < len(failures) else "Grade: 9"
  reward, metrics = grade_one(once)
  assert reward == 0.9
  assert metrics["judge/retries"] == len(failures) and metrics["judge/failed"] == 0
  assert capfd.readouterr().err == ""
  reward, metrics = grade_one(lambda message, count: failures[0], retries=2)
  assert reward is None
  assert metrics["judge/retries"] == 2 and metrics["judge/failed"] == 1
  assert metrics["judge/requests"] == metrics["judge/tokens"] == 0
  err = capfd.readouterr().err
  assert shown in err and err.count("\n") == 1


def test_a_response_that_is_cut_off_in_transfer_is_repeated():
  half = (200, b"{", {"Content-Length": "100", "Connection": "close"})

  def answer(message, count):
    return half if count == 0 else "Grade: 1"

  reward, metrics = grade_one(answer, timeout_s=0.3)
  assert reward == 0.1 and metrics["judge/retries"] == 1


def test_a_rejected_request_is_not_repeated(capfd):
  too_long = (400, {"error": {"message": "maximum context length"}}, {})
  reward, metrics = grade_one(lambda message, count: too_long)
  assert reward is None and metrics["judge/retries"] == 0
  assert "status 400: maximum context length" in capfd.readouterr().err


def test_no_other_request_is_sent_before_the_server_wants_it():
  times = []

  def answer(message, count):
    times.append(time.monotonic())
    return (429, {}, {"Retry-After": "0.4"}) if len(times) == 1 else "Grade: 1"

  with serving(answer) as server, judging(server.url, concurrency=1) as judge:
    assert grade(judge, "a", "b", "c") == [0.1] * 3
  assert len(times) == 4 and min(times[1:]) - times[0] > 0.39


def test_late_replies(capfd):
  late = lambda message, count: after(1.5 if count == 0 else 0, "Grade: 8")
  reward, metrics = grade_one(late, timeout_s=1.0)
  assert reward == 0.8 and metrics["judge/retries"] == 1
  always = lambda message, count: after(0.4, "Grade: 8")
  reward, _ = grade_one(always, timeout_s=0.15, completion_timeout_s=0.3)
  assert reward is None
  assert "completion_timeout_s = 0.3" in capfd.readouterr().err


def test_a_reply_that_trickles_in_is_ended_too():
  """A limit between two bytes would never be over."""

  def answer(message, count):
    return 200, (after(0.05, b" ") for _ in range(1000)), {}

  with serving(answer) as server, judging(server.url, timeout_s=0.2, retries=0) as judge:
    began = time.monotonic()
    assert grade(judge, "c") == [None] and time.monotonic() - began < 25


def test_sixteen_requests_are_under_way_at_once_and_never_more():
  together = threading.Barrier(16)

  def answer(message, count):
    together.wait(60)  # until sixteen requests are under way
    return f"Grade: {int(message[-5]) % 10}"

  with serving(answer) as server, judging(server.url) as judge:
    results = {}

    def work(k):  # four threads, as when completions end one after another
      texts = [f"{k}-{i}" for i in range(16)]
      results[k] = judge.grade(["p"] * 16, texts, ["a"] * 16)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert server.most == 16 and len(server.bodies) == 64
    for k in range(4):
      assert results[k] == [pytest.approx(i % 10 / 10) for i in range(16)]
    metrics = judge.take_metrics()[0]
    assert metrics["judge/requests"] == 64 and metrics["judge/tokens"] == 64 * 7


def test_equal_completions_are_graded_once():
  answer = lambda message, count: after(0.02, "Grade: 5")
  with serving(answer) as server, judging(server.url) as judge:
    assert grade(judge, *["same"] * 10) == [0.5] * 10
    assert len(server.bodies) == 1 and judge.take_metrics()[0]["judge/cached"] == 9


def test_grades_survive_on_disk_and_depend_on_what_they_are_made_of(tmp_path):
  (tmp_path / "judge.jsonl").write_bytes(
    b'garbage\n{"key": "k", "reward": 7}\n[1]\n\xff\n{"key": ["x"], "reward": 1}\n'
    b'{"key": "torn", "rew'  # by a full disk
  )
  with serving(lambda message, count: "Grade: 5") as server:

    def requests(*completions, **settings):
      before = len(server.bodies)
      with judging(server.url, **settings) as judge:
        judge.use_cache(tmp_path)
        assert None not in grade(judge, *completions)
        return len(server.bodies) - before

    assert requests("a", "b") == 2
    assert requests("a", "b", "c") == 1
    assert requests("a", concurrency=1, timeout_s=9.0, threshold=0.2) == 0
    assert requests("a", model="other") == 1
    assert requests("a", template="again: {completion}") == 1
    assert requests("a", pattern=r"Grade: (\d)") == 1
    assert requests("a", scale="0:5") == 1
    assert requests("a", temperature=0.5) == 1
  row = json.loads((tmp_path / "judge.jsonl").read_bytes().splitlines()[-1])
  assert row.keys() == {"key", "reward", "reply", "tokens", "seconds"}
  assert row["reply"] == "Grade: 5" and row["tokens"] == 7


def test_a_workdir_that_cannot_be_written_keeps_grades_in_memory(tmp_path, capfd):
  (tmp_path / "judge.jsonl").mkdir()
  with serving(lambda message, count: "Grade: 5") as server, judging(server.url) as judge:
    judge.use_cache(tmp_path)
    assert grade(judge, "a") == grade(judge, "a") == [0.5] and len(server.bodies) == 1
  assert "cannot be written to judge.jsonl" in capfd.readouterr().err


def test_closing_ends_what_is_under_way_and_keeps_what_is_done(tmp_path):
  release = threading.Event()

  def answer(message, count):
    if "slow" in message:
      release.wait(20)
    return "Grade: 5"

  with serving(answer) as server, judging(server.url) as judge:
    judge.use_cache(tmp_path)
    raised = []

    def work():
      try:
        grade(judge, "fast", "slow 1", "slow 2")
      except JudgeError as error:
        raised.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    while not (tmp_path / "judge.jsonl").read_bytes():
      time.sleep(0.01)
    began = time.monotonic()
    judge.close()
    thread.join()
    assert time.monotonic() - began < 15 and raised == ["the judge was closed"]
    with pytest.raises(JudgeError, match="closed"):
      grade(judge, "later")
    release.set()
    assert len((tmp_path / "judge.jsonl").read_text().splitlines()) == 1


def test_a_server_that_is_gone_ends_the_run(capfd):
  with serving(lambda message, count: "Grade: 5") as server:
    url = server.url
  silent = f"the judge at {url} has not answered for the last 8"
  with judging(url, concurrency=2, retries=1) as judge, pytest.raises(JudgeError, match=silent):
    grade(judge, *map(str, range(20)))
  err = capfd.readouterr().err
  assert err.count("the judge gave no grade") == 1 and "connection attempts failed" in err


def test_a_failure_now_and_then_does_not_end_the_run():
  bad = lambda message, count: "Grade: 5" if "7" in message else (400, b"no", {})
  with serving(bad) as server, judging(server.url, concurrency=1) as judge:
    assert grade(judge, *"1237456723745") == [0.5 if x == "7" else None for x in "1237456723745"]


def test_nothing_of_another_account_is_sent(monkeypatch):
  for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID", "CUSTOM_HEADERS", "BASE_URL"):
    monkeypatch.setenv(f"OPENAI_{name}", "x-other: http://other")
  with serving(lambda message, count: "Grade: 5") as server, judging(server.url) as judge:
    assert grade(judge, "c") == [0.5]
    ((_, headers),) = server.headers
  assert "Authorization" not in headers and "other" not in str(headers)


def test_probing_a_server_that_works():
  with serving(lambda message, count: "ready") as server, judging(server.url) as judge:
    assert 0 < judge.probe() < 5 and server.bodies[0]["model"] == "m"


@pytest.mark.parametrize(
  ("answer", "key", "message"),
  [
    ((401, {"error": "who?"}, {}), "", "wants a key: set the environment variable GTPO_JUDGE_API"),
    (
      (401, {"error": {"message": f"Incorrect API key: {KEY}"}}, {}),
      KEY,
      "refuses access (status 401: Incorrect API key: [GTPO_JUDGE_API_KEY]); check the key in",
    ),
    ((404, {"error": {"message": "no such model"}}, {}), KEY, "check reward.judge.model = 'm'"),
    ((500, b"down", {}), KEY, "cannot be asked: status 500: down"),
    (
      (302, b"", {"Location": "http://127.0.0.1:1/"}),
      KEY,
      "status 302, a redirection to http://127.0.0.1:1/",
    ),
    (
      (307, b"", {"Location": f"http://127.0.0.1:1/?{KEY}"}),
      KEY,
      "status 307, a redirection to http://127.0.0.1:1/?[GTPO_JUDGE_API_KEY]",
    ),
    ((200, b" " * (5 << 20), {}), KEY, "a response of more than 4 MiB"),
    ((404, b" " * (5 << 20), {}), KEY, "a response of more than 4 MiB"),
    (b"garbage", KEY, "a response that is no chat completion"),
  ],
)
def test_probing_a_server_that_does_not(answer, key, message, monkeypatch):
  monkeypatch.setenv(client.KEY_VARIABLE, key)
  with serving(lambda *_: answer) as server, judging(server.url) as judge:
    with pytest.raises(UserError, match=re.escape(message)) as raised:
      judge.probe()
    assert KEY not in str(raised.value) and "\n" not in str(raised.value)
    assert len(server.bodies) == (3 if answer == b"garbage" or answer[0] == 500 else 1)
    sent = server.headers[0][1].get("Authorization")
    assert sent == (f"Bearer {key}" if key else None)


def test_probing_a_server_that_is_not_there_or_too_slow():
  answer = lambda *_: after(0.5, "ready")
  with serving(answer) as server, judging(server.url, timeout_s=0.1) as judge:
    with pytest.raises(UserError, match=r"no reply within reward.judge.timeout_s = 0\.1"):
      judge.probe()
    url = server.url
  refused = pytest.raises(UserError, match=r"cannot be asked: .*; check reward.judge.base_url")
  with judging(url) as judge, refused:
    judge.probe()


@pytest.mark.parametrize("key", ["sk-two words", "sk-two\nlines", "sk-ümlaut", "sk-\x00"])
def test_a_key_that_no_header_can_contain_is_refused_and_not_shown(key, monkeypatch):
  monkeypatch.setattr(client.os, "environ", {client.KEY_VARIABLE: key})
  with pytest.raises(UserError, match="the key in GTPO_JUDGE_API_KEY has") as raised:
    Judge(JudgeSettings(base_url="http://localhost/v1", model="m"))
  assert "sk-" not in str(raised.value)


def test_a_server_that_repeats_the_key_does_not_get_it_written(tmp_path, monkeypatch, capfd):
  monkeypatch.setenv(client.KEY_VARIABLE, f" {KEY}\n")  # as `export KEY=$(cat file)` may leave it
  replies = {"1": f"Your key is {KEY}. Grade: 5", "2": f"{KEY}, no grade"}

  def answer(message, count):
    kind = message[4:].split("C:")[1][0]
    return replies.get(kind) or (400, {"error": {"message": f"bad key {KEY}"}}, {})

  with serving(answer) as server, judging(server.url) as judge:
    judge.use_cache(tmp_path)
    assert grade(judge, "1", "2", "3") == [0.5, None, None]
    assert server.headers[0][1]["Authorization"] == f"Bearer {KEY}"
  text = (tmp_path / "judge.jsonl").read_text()
  err = capfd.readouterr().err
  assert "Your key is [GTPO_JUDGE_API_KEY]" in text and "bad key [GTPO_JUDGE_API_KEY]" in err
  assert KEY not in text + err


def test_without_the_package(monkeypatch):
  monkeypatch.setitem(sys.modules, "openai", None)
  with pytest.raises(UserError, match=r"reward.judge needs openai: .*pip install"):
    Judge(JudgeSettings(base_url="http://localhost/v1", model="m"))
