"""Damaged files, weights that are gone, and restarts: one line for who asked, and others go on."""

import errno
import json
import os
import shutil
import threading
import time

import pytest
from live import options_for, running
from protocol import backward, create, post, result, send, step

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.tinker import ledger as ledgers
from gtpo_jax.tinker import models, saved_weights, trainer

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


def outcome(url, path, /, **fields):
  """The result of a request that is acknowledged."""
  status, answer = post(url, path, **fields)
  assert status == 200, answer
  status, data = result(url, answer["request_id"])
  assert status == 200, data
  return json.loads(data) if data[:1] == b"{" else data


def save(url, model, seq, path="a", op="save_weights", **more):
  return outcome(url, op, model_id=model, seq_id=seq, path=path, **more)


def load(url, model, seq, path, optimizer=True):
  return outcome(url, "load_weights", model_id=model, seq_id=seq, path=path, optimizer=optimizer)


def sampled(url, session, number, **source):
  """A sample from a new sampler."""
  given = {"session_id": session, "sampling_session_seq_id": number}
  status, answer = post(url, "create_sampling_session", **given, **source)
  assert status == 200, answer
  ask = {"sampling_session_id": answer["sampling_session_id"], "seq_id": 0, "prompt": PROMPT}
  return outcome(url, "asample", **ask, sampling_params={"max_tokens": 2})


def flip(file, place=0.5):
  content = bytearray(file.read_bytes())
  content[int(len(content) * place)] ^= 4
  file.write_bytes(content)


DAMAGES = {
  "a flipped bit of the adapters": lambda x: flip(x / "adapter_model.safetensors"),
  "a flipped bit of the arrays": lambda x: flip(x / "training.arrays", 0.9),
  "a flipped bit of their header": lambda x: flip(x / "training.arrays", 0.001),
  "half of the arrays": lambda x: (x / "training.arrays").write_bytes(
    (x / "training.arrays").read_bytes()[:5000]
  ),
  "empty arrays": lambda x: (x / "training.arrays").write_bytes(b""),
  "no arrays": lambda x: (x / "training.arrays").unlink(),
  "no manifest": lambda x: (x / "SHA256SUMS").unlink(),
  "an empty manifest": lambda x: (x / "SHA256SUMS").write_bytes(b""),
  "a short manifest": lambda x: (x / "SHA256SUMS").write_text(
    "\n".join((x / "SHA256SUMS").read_text().splitlines()[:1])
  ),
  "no manifest but zeros": lambda x: (x / "SHA256SUMS").write_bytes(bytes(100)),
  "another rank": lambda x: (x / "tinker.json").write_text(
    (x / "tinker.json").read_text().replace('"rank": 2', '"rank": 4')
  ),
}
NOTES = [
  b"",
  b"\0" * 50,
  b"[]",
  b"{}",
  b"null",
  b"\xff",
  b"[" * 10_000,
  b'{"run": 1}',
  b'{"run": "a", "owner": "b", "created": "now", "spec": {}}',
  b'{"run": "a", "owner": "b", "created": 1e300, "spec": {"base_model": "tiny", "rank": 2}}',
  b'{"run": "a", "owner": "b", "created": NaN, "spec": {"base_model": "tiny", "rank": 2}}',
]


@pytest.mark.slow
def test_damaged_weights(model, tmp_path):
  with running(options_for(model, tmp_path)) as (url, _):
    session, name = create(url)
    backward(url, name, 1)
    step(url, name, 2)
    path = save(url, name, 3)["path"]
    good = save(url, name, 4, "good")["path"]
    for_sampler = save(url, name, 5, op="save_weights_for_sampler")["path"]
    (folder,) = tmp_path.glob("runs/*/weights/a")
    (other,) = tmp_path.glob("runs/*/sampler_weights/a")
    seq, number = 6, 0
    for damage, change in DAMAGES.items():
      for place, named in ((folder, path), (other, for_sampler)):
        kept = tmp_path / "kept"
        shutil.copytree(place, kept)
        change(place)
        answer = load(url, name, seq, named)
        told = ("damaged", "other adapters")[damage == "another rank"]
        assert told in answer["error"] and answer["category"] == "user", (damage, answer)
        answer = sampled(url, session, number, model_path=named)
        assert "damaged" in answer["error"], (damage, answer)
        seq, number = seq + 1, number + 1
        shutil.rmtree(place)
        shutil.move(kept, place)
    assert load(url, name, seq, path, True)["path"] == path
    for note in NOTES:
      (folder / "tinker.json").write_bytes(note)
      assert post(url, "weights_info", tinker_path=path)[0] == 404
      listed = json.loads(send(url, "GET", "checkpoints")[1])["checkpoints"]
      assert {x["tinker_path"] for x in listed} == {good, for_sampler}, note
    assert load(url, name, seq + 1, good)["path"] == good
  with running(options_for(model, tmp_path)) as (url, _):
    assert step(url, name, seq + 2) == 0


@pytest.mark.parametrize(
  "how",
  [
    "a flipped bit",
    *(
      pytest.param(x, marks=pytest.mark.slow) for x in ("an empty note", "no arrays", "a stray one")
    ),
  ],
)
def test_a_damaged_state(model, tmp_path, how):
  with running(options_for(model, tmp_path)) as (url, _):
    session, name = create(url)
    _, other = create(url, number=1, session=session)
    backward(url, name, 1)
    step(url, name, 2)
  (state,) = tmp_path.glob(f"runs/{name.replace(':', '-')}/state/*")
  {
    "a flipped bit": lambda: flip(state / "training.arrays", 0.9),
    "an empty note": lambda: (state / "tinker.json").write_bytes(b""),
    "no arrays": lambda: (state / "training.arrays").unlink(),
    "a stray one": lambda: state.with_name("7 (copy)").mkdir(),
  }[how]()
  with running(options_for(model, tmp_path)) as (url, _):
    answer = outcome(url, "optim_step", model_id=name, seq_id=3, adam_params={})
    assert ("metrics" if "stray" in how else "error") in answer
    assert "stray" in how or "damaged" in answer["error"]
    assert step(url, other, 1) == 0
    create(url, number=2, session=session)


def test_weights_stay_if_no_others_can_take_their_place(model, tmp_path, monkeypatch):
  with running(options_for(model, tmp_path)) as (url, _):
    _, name = create(url)
    path = save(url, name, 1)["path"]
    (folder,) = tmp_path.glob("runs/*/weights/a")
    before = {x.name: x.read_bytes() for x in folder.iterdir()}
    backward(url, name, 2)
    step(url, name, 3)

    def fill(model, params, out, *rest):
      out.mkdir()
      (out / "adapter_model.safetensors").write_bytes(bytes(99))
      raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(models, "save_adapter", fill)
    answer = save(url, name, 4, overwrite=True)
    assert "cannot write weights" in answer["error"] and answer["category"] == "server"
    monkeypatch.undo()
    assert [x.name for x in folder.parent.iterdir()] == ["a"]
    assert {x.name: x.read_bytes() for x in folder.iterdir()} == before
    assert save(url, name, 5, overwrite=True)["path"] == path  # now there is space
    assert (folder / "training.arrays").read_bytes() != before["training.arrays"]


@pytest.mark.slow
def test_weights_expire(model, tmp_path, monkeypatch):
  with running(options_for(model, tmp_path)) as (url, opened):
    session, name = create(url)
    path = save(url, name, 1, ttl_seconds=1000)["path"]
    for_sampler = save(url, name, 2, op="save_weights_for_sampler", ttl_seconds=1000)["path"]
    given = {"session_id": session, "sampling_session_seq_id": 0, "model_path": for_sampler}
    sampler = post(url, "create_sampling_session", **given)[1]["sampling_session_id"]
    now = time.time()
    load_it = {"model_id": name, "path": path, "optimizer": True}
    new = {"session_id": session, "model_seq_id": 5, "path": path, "optimizer": True}
    acknowledged = []
    take = opened._ledger.take
    monkeypatch.setattr(opened._ledger, "take", lambda: time.sleep(1) or take())
    step(url, name, 3)  # the thread is in the slow call after this
    for fields in (load_it | {"seq_id": 4}, new):
      status, answer = post(url, "load_weights", **fields)
      assert status == 200
      acknowledged.append(answer["request_id"])
    monkeypatch.setattr(saved_weights.time, "time", lambda: now + 2000)
    for request in acknowledged:
      answer = json.loads(result(url, request)[1])
      assert answer == {"error": f'there are no weights "{path}"', "category": "user"}
    monkeypatch.undo()
    monkeypatch.setattr(saved_weights.time, "time", lambda: now + 2000)
    assert json.loads(send(url, "GET", "checkpoints")[1])["checkpoints"] == []
    assert json.loads(send(url, "GET", "training_runs")[1])["training_runs"] == []
    assert post(url, "weights_info", tinker_path=path)[0] == 404
    assert post(url, "load_weights", **load_it | {"seq_id": 5})[0] == 404
    assert post(url, "create_sampling_session", **given)[0] == 404
    ask = {"sampling_session_id": sampler, "seq_id": 0, "prompt": PROMPT}
    assert "gone" in outcome(url, "asample", **ask)["error"]
    assert step(url, name, 6) == 0
    answer = outcome(url, "optim_step", model_id=f"{session}:train:5", seq_id=1, adam_params={})
    assert answer["error"] == "the model was not created"


@pytest.mark.slow
def test_a_load_whose_weights_are_deleted(model, tmp_path):
  first, killed = tmp_path / "first", tmp_path / "killed"
  with running(options_for(model, first)) as (url, _):
    session, name = create(url)
    backward(url, name, 1)
    step(url, name, 2)
    path = save(url, name, 3)["path"]
    created = load(url, name, 4, path)
    new = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    assert outcome(url, "load_weights", **new)["path"] == created["path"] == path
    backward(url, name, 5)
    expected = step(url, name, 6)
    assert send(url, "DELETE", f"training_runs/{name}/checkpoints/weights/a")[0] == 204
    shutil.copytree(first, killed)  # as kill -9 leaves it
  with running(options_for(model, killed)) as (url, _):
    backward(url, name, 7)
    assert step(url, name, 8) != expected
    backward(url, f"{session}:train:1", 1)
    assert step(url, f"{session}:train:1", 2) == expected


@pytest.mark.slow
def test_no_model_is_one_too_many_after_a_restart(model, tmp_path):
  options = options_for(model, tmp_path, models=1)
  with running(options) as (url, _):
    session, name = create(url)
  for number in (1, 2):
    with running(options) as (url, _):
      given = {"session_id": session, "base_model": "tiny", "lora_config": {"rank": 2}}
      answer = outcome(url, "create_model", **given, model_seq_id=number)
      assert "has 1 models already" in answer["error"]
      refused = f"{session}:train:{number}"
      answer = outcome(url, "optim_step", model_id=refused, seq_id=1, adam_params={})
      assert answer["error"] == "the model was not created"
      assert step(url, name, number) == 0
  with pytest.raises(UserError, match="has 2 models in training, over --models=1"):
    with running(options_for(model, tmp_path, models=2)) as (url, _):
      create(url, session=session, number=3)
    with running(options):
      pass


@pytest.mark.slow
def test_weights_that_would_not_be_finite(model, tmp_path):
  with running(options_for(model, tmp_path)) as (url, _):
    session, name = create(url)
    backward(url, name, 1)
    huge = {"learning_rate": 3e38, "weight_decay": 3e38}
    answer = outcome(url, "optim_step", model_id=name, seq_id=2, adam_params=huge)
    assert "not finite" in answer["error"] and "3e+38" in answer["error"]
    assert step(url, name, 3) > 0  # the gradient is still there
    path = save(url, name, 4)["path"]
    assert load(url, name, 5, path)["path"] == path
    backward(url, name, 6, weight=3e38)
    answer = outcome(url, "optim_step", model_id=name, seq_id=7, adam_params={})
    assert answer["metrics"]["skipped:sum"] == 1
    backward(url, name, 8)
    assert step(url, name, 9) > 0
    backward(url, name, 10)
    outcome(url, "optim_step", model_id=name, seq_id=11, adam_params={"learning_rate": 3e38})
    path = save(url, name, 12, "large", op="save_weights_for_sampler")["path"]
    assert "not finite" in sampled(url, session, 0, model_path=path)["error"]
    assert isinstance(sampled(url, session, 1, base_model="tiny"), bytes)


@pytest.mark.slow
def test_sessions_of_silent_clients_end(model, tmp_path, monkeypatch):
  monkeypatch.setattr(trainer, "SNAPSHOT_RATIO", 1e9)  # none is saved on its own, however slow
  with running(options_for(model, tmp_path)) as (url, opened):
    session, name = create(url)
    sampled(url, session, 0, base_model="tiny")
    save(url, name, 1)
    other, _ = create(url)
    step(url, name, 2)
    opened._trainer.snapshot(name, 2)
    assert list(tmp_path.glob(f"runs/{session}*/state/*"))
    with monkeypatch.context() as patch:
      patch.setattr(ledgers, "DROPPED_S", 0.0)
      create(url)
    for old in (session, other):
      assert post(url, "session_heartbeat", session_id=old)[0] == 410
    tables = ("sessions", "models", "samplers", "requests", "bodies", "results")
    counts = [opened._ledger._one(f"SELECT count(*) FROM {x}")[0] for x in tables]
    assert counts == [1, 1, 0, 1, 1, 1]
    assert not list(tmp_path.glob(f"runs/{session}*/state/*"))
    assert len(json.loads(send(url, "GET", "checkpoints")[1])["checkpoints"]) == 1  # what it saved


@pytest.mark.slow
def test_more_samples_than_the_queue_holds(model, tmp_path):
  with running(options_for(model, tmp_path, queue=2)) as (url, _):
    session, _ = create(url)
    given = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = post(url, "create_sampling_session", **given)[1]["sampling_session_id"]
    ask = {"sampling_session_id": sampler, "prompt": PROMPT, "sampling_params": {"max_tokens": 2}}
    status, answer = post(url, "asample", **ask, seq_id=0, num_samples=10)
    assert status == 400 and "--queue" in answer["error"]["message"], answer
    began = time.monotonic()
    data = outcome(url, "asample", **ask, seq_id=1, num_samples=9, prompt_logprobs=True)
    assert isinstance(data, bytes) and time.monotonic() - began < 60


def test_weights_are_found_while_others_take_their_place(tmp_path, monkeypatch):
  store = saved_weights.Store(tmp_path)
  run, kind = "s:train:0", saved_weights.TRAINING
  about = saved_weights.About(run=run, owner="x", spec=saved_weights.Spec("", 2), created=0)
  folder = store.folder(run, kind, "a")
  new = folder.with_name("new")
  for each in (folder, new):
    each.mkdir(parents=True)
    (each / saved_weights.ABOUT).write_text(about.model_dump_json())
  moved = threading.Event()
  move = os.replace

  def replace(*paths):
    move(*paths)
    moved.set()
    time.sleep(0.1)

  monkeypatch.setattr(os, "replace", replace)
  thread = threading.Thread(target=store.replace, args=[new, folder])
  thread.start()
  moved.wait()
  assert store.find("x", f"tinker://{run}/{kind}/a").folder == folder
  thread.join()
