"""Random requests of a server that is killed at random: nothing is lost, and nothing done twice.

All acknowledged requests are then made of an undisturbed server, one after the other. It gives the
same answers, to the bit.
"""

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command_line import free_port
from google.protobuf.message import DecodeError
from live import options_for, running
from protocol import gradient_request, result, send
from test_kills import PACKAGES

from gtpo_jax.tinker.schema import CLASSES

RESULT_S = 900.0  # for a result, with compilation and restarts
START_S = 900.0
LOSS = "forward_backward"


class Victim:
  """A server in a process of its own, which is killed at random and started again.

  Attributes:
    url: its address.
    kills: how often it was killed.
    failure: what it printed, if it ended by itself.
    ready: whether it has answered since its start.
    answered: how many results there were.
  """

  def __init__(self, model, workdir, seed, pause, hang):
    """Args:
    model, workdir: of the server.
    seed: of the kills.
    pause: the least and the most seconds between a server's results and its end.
    hang: seconds that any answer may take, but results and those of a server that was killed.
    """
    port = free_port()
    self.url = f"http://127.0.0.1:{port}"
    self.kills = 0
    self.failure = ""
    self.ready = False
    self.answered = 0
    self.log = workdir.with_suffix(".log")
    self._command = [
      *(sys.executable, "-m", "gtpo_jax", "tinker", f"--model={model}", f"--workdir={workdir}"),
      *(f"--port={port}", "--name=tiny", "--batch_invariant", "--compute_dtype=float32"),
      *("--max_tokens=8", "--max_prompt_tokens=32", "--slots=8", "--models=9"),
    ]
    self._rng = random.Random(seed)
    self._pause = pause
    self._hang = hang
    self._ended = threading.Event()
    self._start()
    self._thread = threading.Thread(target=self._kill_at_random)
    self._thread.start()

  def _start(self):
    with self.log.open("ab") as log:
      environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": PACKAGES}
      # Otherwise many a process is killed before it has compiled anything.
      environment["JAX_COMPILATION_CACHE_DIR"] = str(self.log.with_name("compiled"))
      environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
      self._process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)
    deadline = time.monotonic() + START_S
    while not self._ended.is_set() and time.monotonic() < deadline:
      try:
        send(self.url, "GET", "healthz")
        self.ready = True
        return
      except OSError:
        if self._process.poll() is not None:
          self.failure = self.log.read_text()
          return
        time.sleep(0.1)

  def _kill_at_random(self):
    while not self.failure:
      # Three of four live until they have a result, so that a slow machine gets anywhere.
      enough = self.answered + self._rng.randrange(4)
      while self.answered < enough:
        if self._ended.wait(0.2) or self._process.poll() is not None:
          break
      if self._ended.wait(self._rng.uniform(*self._pause)):
        return
      if self._process.poll() is not None:
        self.failure = self.log.read_text()
        return
      self.ready = False
      self._process.kill()
      self._process.wait()
      self.kills += 1
      self._start()

  def spare(self):
    """Kills no more."""
    self._ended.set()
    self._thread.join()

  def close(self):
    self.spare()
    self._process.send_signal(signal.SIGTERM)
    self._process.wait()

  def request(self, path, body, kind):
    """Sends a request until there is an answer; also one that was interrupted by a kill."""
    deadline = time.monotonic() + START_S
    while True:
      assert not self.failure, self.failure
      kills, ready, began = self.kills, self.ready, time.monotonic()
      try:
        status, data = send(self.url, "POST", path, body, kind)
      except (OSError, http.client.HTTPException):
        assert time.monotonic() < deadline
        time.sleep(0.1)
        continue
      seconds = time.monotonic() - began
      calm = ready and kills == self.kills and path != "retrieve_future"
      assert not calm or seconds < self._hang, (path, seconds)
      assert status < 500, (path, body[:300], status, data)
      if status != 429:  # too many samples wait
        return status, data

  def outcome(self, name):
    """The result of a request."""
    deadline = time.monotonic() + RESULT_S
    while time.monotonic() < deadline:
      body = json.dumps({"request_id": name}).encode()
      status, data = self.request("retrieve_future", body, "application/json")
      if status != 408:
        assert status == 200, (name, status, data)
        self.answered += 1
        return data
    raise AssertionError(f"{name} has no result")


JUNK = (
  *(None, -1, 0, 1, 2**31, 2**63, 2**70, 1e-30, 1e308, 0.5, True, False, "", "x" * 300, "a/b"),
  *([], [1.5], {}, {"a": []}, "\ud800", "\0", "../../etc", [[5]], "tinker://a/weights/b", [True]),
)


def with_junk(rng, fields):
  """Fields of which some have any value, are missing, or have another name."""
  made = dict(fields)
  for name in rng.sample(sorted(fields), min(rng.randrange(1, 3), len(fields))):
    what = rng.randrange(4)
    if what == 0:
      del made[name]
    elif what == 1:
      made[name + rng.choice("sx_")] = made.pop(name)
    elif what == 2 and isinstance(fields[name], dict) and fields[name]:
      made[name] = with_junk(rng, fields[name])
    else:
      made[name] = rng.choice(JUNK)
  return made


class Client:
  """A client with a model and a sampler, which keeps what was acknowledged.

  Attributes:
    session: its id.
    log: [path, body, kind, status, answer] of requests of the model, by number.
    samples: the same of the sampler.
    results: by "model" or "sampler" and number.
  """

  def __init__(self, victim, seed):
    self._victim = victim
    self._rng = random.Random(seed)
    self._seed = seed
    fields = {"sdk_version": "0.38.0"}
    self.session = json.loads(self._post("create_session", fields)[1])["session_id"]
    self.model, self.sampler = f"{self.session}:train:0", f"{self.session}:sample:0"
    self.log, self.samples = {}, {}
    self._saved = []
    self._seq = 0
    for path, fields in self.beginning():
      status, data = self._post(path, fields)
      assert status == 200, data
    self._victim.outcome(f"{self.model}:0")

  def beginning(self):
    """The requests that make the model and the sampler."""
    lora = {"rank": 2, "seed": self._seed}
    given = {"session_id": self.session, "base_model": "tiny"}
    yield "create_model", given | {"model_seq_id": 0, "lora_config": lora}
    yield "create_sampling_session", given | {"sampling_session_seq_id": 0}

  def _post(self, path, fields):
    return self._victim.request(path, json.dumps(fields).encode(), "application/json")

  def _learn(self, seq):
    rng = self._rng
    body = gradient_request(self.model, seq, rng.choice([1.0, -0.5, 0.0]), rng.choice([6, 12]))
    if rng.random() < 0.4:
      mutated = bytearray(body)
      for _ in range(rng.randrange(1, 4)):
        mutated[rng.randrange(len(mutated))] = rng.randrange(256)
      try:
        message = CLASSES["ForwardBackwardRequest"].FromString(bytes(mutated))
        message.model_id, message.seq_id = self.model, seq
        body = message.SerializeToString()
      except (DecodeError, ValueError):
        body = body[: len(self.model) + 2 + 4] + bytes(mutated[len(self.model) + 6 :])
    return LOSS, body, "application/x-protobuf"

  def _change(self, seq):
    """A request of the model with a number, mostly right."""
    rng = self._rng
    path = rng.choice([LOSS, LOSS, "optim_step", "optim_step", "save", "load"])
    if path == LOSS:
      return self._learn(seq)
    rates = {"learning_rate": rng.choice([1e-2, 1e-3]), "beta1": 0.9, "weight_decay": 0.1}
    fields = {"adam_params": rates}
    if path == "save":
      path = rng.choice(["save_weights", "save_weights_for_sampler"])
      fields = {"path": rng.choice("abc"), "overwrite": rng.random() < 0.7}
    elif path == "load":
      path = "load_weights"
      fields = {"path": rng.choice([*self._saved, "tinker://x"]), "optimizer": rng.random() < 0.9}
    if rng.random() < 0.3:
      fields = with_junk(rng, fields)
    if rng.random() < 0.05:
      fields |= {"user_metadata": {"a": "x" * 17_000_000}}
    body = json.dumps({"model_id": self.model, "seq_id": seq, **fields}).encode()
    if rng.random() < 0.05:
      head = len(json.dumps({"model_id": self.model, "seq_id": seq}))  # its number is not cut
      body = body[: max(len(body) - rng.randrange(1, 9), head)]
    return path, body, "application/json"

  def _sample(self, seq):
    rng = self._rng
    params = {"max_tokens": rng.randrange(4), "seed": rng.randrange(99), "temperature": 1.0}
    fields = {
      "num_samples": rng.randrange(1, 4),
      "prompt": {"chunks": [{"tokens": [rng.randrange(3, 90) for _ in range(4)]}]},
      "sampling_params": params,
      "prompt_logprobs": rng.random() < 0.3,
    }
    if rng.random() < 0.3:
      fields = with_junk(rng, fields)
    body = json.dumps({"sampling_session_id": self.sampler, "seq_id": seq, **fields}).encode()
    return "asample", body, "application/json"

  def _send(self, log, seq, request):
    status, data = self._victim.request(*request)
    log[seq] = [*request, status, data]

  def _resend(self):
    """The same request again gets the same answer; another one with its number is refused."""
    log = self._rng.choice([self.log, self.samples])
    accepted = [seq for seq in log if log is self.log or log[seq][3] == 200]
    if not accepted:
      return
    seq = self._rng.choice(accepted)
    path, body, kind, status, data = log[seq]
    found, again = self._victim.request(path, body, kind)
    name = self.model if log is self.log else self.sampler
    if status == 200:
      assert (found, json.loads(again)["request_id"]) == (200, f"{name}:{seq}")
    else:  # it is acknowledged now, and its result is why it was refused
      assert found == 200, (path, body[:300], data, again)
      answer = json.loads(self._victim.outcome(f"{name}:{seq}"))
      assert answer["error"] == json.loads(data)["error"]["message"]
    if len(body) < 10_000 and status == 200:
      other = (
        body.replace(b'"seq_id"', b' "seq_id"')
        if kind.endswith("json")
        else body + b"\xfa\x07\x01a"
      )
      found, told = self._victim.request(path, other, kind)
      assert found == 400 and b"was another request" in told, (path, body[:300], told)

  def act(self):
    """Sends some requests, in any order; asks for some results."""
    rng = self._rng
    count = rng.randrange(1, 4)
    requests = {seq: self._change(seq) for seq in range(self._seq + 1, self._seq + 1 + count)}
    self._seq += count
    for seq in rng.sample(sorted(requests), count):
      self._send(self.log, seq, requests[seq])
    seq = len(self.samples)
    self._send(self.samples, seq, self._sample(seq))
    if rng.random() < 0.5:
      self._resend()
    if rng.random() < 0.4:
      path, _, _, status, _ = self.log[self._seq]
      answer = self._victim.outcome(f"{self.model}:{self._seq}")
      if path == "save_weights" and status == 200 and b'"path"' in answer:
        self._saved.append(json.loads(answer)["path"])

  def end(self):
    """Saves weights, and asks for all results."""
    self._seq += 1
    body = {"model_id": self.model, "seq_id": self._seq, "path": "end"}
    request = "save_weights", json.dumps(body).encode(), "application/json"
    self._send(self.log, self._seq, request)
    self.results = {}
    for seq in sorted(self.log):
      self.results["model", seq] = self._victim.outcome(f"{self.model}:{seq}")
    for seq, (*_, status, _) in sorted(self.samples.items()):
      if status == 200:
        self.results["sampler", seq] = self._victim.outcome(f"{self.sampler}:{seq}")


def check_calm(client, url):
  """The same requests of an undisturbed server have the same results."""
  post = lambda path, body, kind="application/json": send(url, "POST", path, body, kind)
  calm = json.loads(post("create_session", b"{}")[1])["session_id"]
  ours = lambda body: body.replace(client.session.encode(), calm.encode())
  for path, fields in client.beginning():
    assert post(path, ours(json.dumps(fields).encode()))[0] == 200
  for name, log in (("model", client.log), ("sampler", client.samples)):
    target = client.model if name == "model" else client.sampler
    for seq, (path, body, kind, status, data) in sorted(log.items()):
      found, answer = post(path, ours(body), kind)
      row = (path, body[:300], status, data, found, answer)
      if status == 200 != found:  # it was refused, but a kill came before the answer
        told = json.loads(ours(client.results[name, seq]))
        assert told["error"] == json.loads(answer)["error"]["message"], row
        continue
      assert (found, answer) == (status, ours(data)), row
      if (name, seq) in client.results:
        expected = result(url, f"{target}:{seq}".replace(client.session, calm))[1]
        assert ours(client.results[name, seq]) == expected, (seq, *row)
  return calm


def arrays(workdir, session, name):
  (file,) = Path(workdir).glob(f"runs/{session}-train-0/weights/{name}/training.arrays")
  return file.read_bytes()


def fuzz(model, tmp_path, seed, acts, kills, pause, seconds=0, hang=100, clients=2):
  """Clients act at least so often, while a server is killed at least so often, and so long."""
  victim = Victim(model, tmp_path / "killed", seed, pause, hang)
  until = time.monotonic() + seconds
  failures = []

  def run(client):
    try:
      done = 0
      while time.monotonic() < until or done < acts or victim.kills < kills:
        if failures:
          return
        client.act()
        done += 1
    except BaseException as error:
      failures.append(error)

  try:
    # One after the other, so that sessions have the same numbers in the undisturbed server.
    found = [Client(victim, 100 * seed + number) for number in range(clients)]
    threads = [threading.Thread(target=run, args=[client]) for client in found]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    if failures:
      raise failures[0]
    victim.spare()
    for client in found:
      client.end()
  finally:
    victim.close()
  assert not victim.failure, victim.failure
  assert b"Traceback" not in victim.log.read_bytes(), victim.log.read_text()
  calm = tmp_path / "calm"
  with running(
    options_for(model, calm, batch_invariant=True, max_tokens=8, max_prompt_tokens=32)
  ) as (url, _):
    for client in found:
      session = check_calm(client, url)
      ended = arrays(tmp_path / "killed", client.session, "end")
      assert ended == arrays(calm, session, "end")
  count = sum(len(x.log) + len(x.samples) for x in found)
  print(f"{count} requests, {victim.kills} kills")


@pytest.mark.slow
def test_random_requests_and_kills(model, tmp_path):
  fuzz(model, tmp_path, seed=0, acts=8, kills=2, pause=(0, 6))


@pytest.mark.manual
def test_ten_minutes_of_random_requests_and_kills(model, tmp_path):
  fuzz(model, tmp_path, 1, acts=30, kills=10, pause=(0, 10), seconds=600, hang=5, clients=3)
