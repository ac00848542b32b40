"""Two real processes under the variables of each launcher become one run, or end with one line."""

import contextlib
import http.server
import json
import re
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
from command_line import free_port
from processes import HERE, ROOT, environment

TINY = [
  "--config=configs/base.py",
  *(
    f"--config.{key}={value}"
    for key, value in {
      "steps": 1,
      "data.terms": 2,
      "data.max_prompt_tokens": 20,
      "sampling.max_tokens": 4,
      "batch.prompts": 2,
      "batch.group": 2,
      "warm_start.steps": 0,
      "eval.problems": 2,
      "eval.samples": 1,
    }.items()
  ),
]
JOIN_TIMEOUT_S = 8
PROMPT_END_S = 60  # allowed beyond the join's limit, to start Python and JAX on a busy machine


def by_hand(count, port):
  return [
    {
      "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
      "JAX_NUM_PROCESSES": str(count),
      "JAX_PROCESS_ID": str(i),
    }
    for i in range(count)
  ]


def slurm(count, port):
  return [
    {
      "SLURM_JOB_ID": "7",
      "SLURM_STEP_NODELIST": "localhost",
      "SLURM_NNODES": "1",
      "SLURM_STEP_NUM_NODES": "1",
      "SLURM_NTASKS": str(count),
      "SLURM_STEP_NUM_TASKS": str(count),
      "SLURM_STEP_TASKS_PER_NODE": str(count),
      "SLURM_PROCID": str(i),
      "SLURM_LOCALID": str(i),
      "SLURM_NODEID": "0",
      "JAX_COORDINATOR_PORT": str(port),
    }
    for i in range(count)
  ]


def open_mpi(count, port):
  return [
    {
      "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
      "OMPI_COMM_WORLD_SIZE": str(count),
      "OMPI_COMM_WORLD_RANK": str(i),
      "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
      "OMPI_COMM_WORLD_LOCAL_RANK": str(i),
      "JAX_COORDINATOR_PORT": str(port),
    }
    for i in range(count)
  ]


def gke(count, port):
  """The variables that XPK and JobSet set for slices with one host each."""
  return [
    {
      "JAX_FORCE_TPU_INIT": "1",
      "TPU_SKIP_MDS_QUERY": "true",
      "TPU_WORKER_HOSTNAMES": "localhost",
      "TPU_WORKER_ID": "0",
      "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
      "MEGASCALE_NUM_SLICES": str(count),
      "MEGASCALE_SLICE_ID": str(i),
      "JAX_COORDINATOR_PORT": str(port),
    }
    for i in range(count)
  ]


def cloud_tpu(count, port, stack):
  """One metadata server for each host, which says which host it is."""
  variables = []
  for i in range(count):
    answers = {
      "agent-worker-number": str(i),
      "worker-network-endpoints": ",".join(["u:u:127.0.0.1"] * count),
      "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-16'\nMEGASCALE_COORDINATOR_ADDRESS: ''\n",
    }
    handler = type("Handler", (MetadataServer,), {"answers": answers})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    variables.append(
      {
        "JAX_FORCE_TPU_INIT": "1",
        "GCE_METADATA_IP": f"127.0.0.1:{server.server_port}",
        "JAX_COORDINATOR_PORT": str(port),
      }
    )
  return variables


class MetadataServer(http.server.BaseHTTPRequestHandler):
  answers: ClassVar = {}

  def do_GET(self):
    answer = self.answers.get(self.path.rpartition("/")[2])
    self.send_response(404 if answer is None else 200)
    self.end_headers()
    self.wfile.write((answer or "").encode())

  def log_message(self, *_):
    pass


def run(arguments, hosts, **more):
  """Runs `gtpo ARGUMENTS` once for each host's variables.

  Returns:
    For each process its exit status, its output, and the seconds until it ended.
  """
  began = time.monotonic()
  processes = []
  for variables in hosts:
    env = environment(XLA_FLAGS="--xla_backend_optimization_level=0", **more)
    env.pop("TPU_SKIP_MDS_QUERY", None)  # importing JAX has set it in this process
    env.update(variables)
    processes.append(
      subprocess.Popen(
        [sys.executable, str(HERE / "launched.py"), *map(str, arguments)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
    )
  results = []
  try:
    for process in processes:
      printed, _ = process.communicate(timeout=600)
      results.append((process.returncode, printed, time.monotonic() - began))
  finally:
    for process in processes:
      process.kill()
  return results


def one_line(printed):
  """Returns gtpo's only line of output; JAX's runtime prints its own, with time stamps."""
  ours = [line for line in printed.splitlines() if line.startswith("gtpo: ")]
  assert len(ours) == 1 and "Traceback" not in printed, printed
  return ours[0]


@pytest.mark.slow
@pytest.mark.parametrize(
  "launcher",
  [
    slurm,
    gke,
    cloud_tpu,
    pytest.param(by_hand, marks=pytest.mark.manual),
    pytest.param(open_mpi, marks=pytest.mark.manual),
  ],
)
def test_two_processes_become_one_run(launcher):
  """They see each other's devices, and the second receives what the first sends."""
  with contextlib.ExitStack() as stack:
    stacked = [stack] if launcher is cloud_tpu else []
    results = run(["join"], launcher(2, free_port(), *stacked))
  assert [code for code, _, _ in results] == [0, 0], results
  for i, (_, printed, _) in enumerate(results):
    seen = json.loads(printed.splitlines()[-1])
    assert seen == {"process": i, "processes": 2, "devices": 2, "received": "from process 0"}


@pytest.mark.manual
def test_two_processes_evaluate_and_export_together(finished_run, tmp_path):
  """Training in two processes is tested in test_two_processes.py."""
  workdir, printed = finished_run
  assert "1 x cpu in 1 process(es)" in printed
  hosts = slurm(2, free_port())
  file = tmp_path / "eval.json"
  results = run(["eval", f"--model={workdir}", "--k=1", f"--json={file}"], hosts)
  assert [code for code, _, _ in results] == [0, 0], results
  assert json.loads(file.read_text())["step"] == 2
  assert "mean@1" in results[0][1] and "mean@1" not in results[1][1], results
  out = tmp_path / "model"
  results = run(["export", f"--workdir={workdir}", f"--out={out}"], hosts)
  assert [code for code, _, _ in results] == [0, 0], results
  assert (out / "model.safetensors").exists()
  assert f"-> {out}" in results[0][1] and f"-> {out}" not in results[1][1], results


NOT_ALL_JOINED = "not all processes joined within 8 s; "
CANNOT_REACH = r"cannot reach the first process at localhost:\d+ within 8 s; "


@pytest.mark.slow
@pytest.mark.parametrize(
  ("hosts", "messages"),
  [
    (
      lambda: slurm(3, free_port())[:2],  # the third never starts
      [
        f"Slurm job 7, process 0 of 3: {NOT_ALL_JOINED}",
        # The time limit of process 1 can end before process 0 listens, or after it has given up.
        f"Slurm job 7, process 1 of 3: ({NOT_ALL_JOINED}|{CANNOT_REACH})",
      ],
    ),
    pytest.param(
      lambda: gke(2, free_port())[:1],
      [f"GKE, process 0 of 2: {NOT_ALL_JOINED}"],
      marks=pytest.mark.manual,
    ),
    pytest.param(
      # The second has another port, where nobody listens.
      lambda: [by_hand(2, free_port())[0], by_hand(2, free_port())[1]],
      [
        f"JAX_COORDINATOR_ADDRESS, process 0 of 2: {NOT_ALL_JOINED}",
        f"JAX_COORDINATOR_ADDRESS, process 1 of 2: {CANNOT_REACH}",
      ],
      marks=pytest.mark.manual,
    ),
  ],
  ids=["a missing rank", "one host alone", "a wrong address"],
)
def test_processes_that_do_not_meet_end_with_one_line(hosts, messages, tmp_path):
  arguments = ["train", f"--workdir={tmp_path / 'run'}", *TINY]
  results = run(arguments, hosts(), GTPO_JOIN_TIMEOUT_S=str(JOIN_TIMEOUT_S))
  for (code, printed, seconds), message in zip(results, messages, strict=True):
    assert code == 1, printed
    line = one_line(printed)
    assert re.match(f"gtpo: {message}.* or raise GTPO_JOIN_TIMEOUT_S$", line), line
    assert seconds < JOIN_TIMEOUT_S + PROMPT_END_S
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_launcher_unknown_to_jax_is_named(tmp_path):
  """Open MPI 5 does not set the variable from which JAX reads the first process's address."""
  port = free_port()
  hosts = open_mpi(2, port)
  for variables in hosts:
    del variables["OMPI_MCA_orte_hnp_uri"]
  arguments = ["train", f"--workdir={tmp_path / 'run'}", *TINY]
  for code, printed, _ in run(arguments, hosts):
    assert code == 2, printed
    assert "Open MPI has started 2 processes, but JAX cannot tell where the first one is" in (
      one_line(printed)
    )
  for variables in hosts:
    variables["JAX_COORDINATOR_ADDRESS"] = f"localhost:{port}"
  results = run(["join"], hosts)
  assert [code for code, _, _ in results] == [0, 0], results
