"""What launchers say about a run, read from their variables."""

import contextlib
import http.server
import os
import socket
import threading
import time

import pytest

from gtpo_jax.runtime.cluster import joining, launchers
from gtpo_jax.runtime.cluster.joining import join_processes
from gtpo_jax.runtime.cluster.launchers import Launch, find_launch, local_gpus
from gtpo_jax.runtime.errors import RunError, UserError

SLURM = {
  "SLURM_JOB_ID": "7",
  "SLURM_STEP_NODELIST": "node[01-02]",
  "SLURM_NNODES": "2",
  "SLURM_NTASKS": "8",
  "SLURM_STEP_NUM_TASKS": "8",
  "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
  "SLURM_PROCID": "6",
  "SLURM_NODEID": "1",
  "SLURM_LOCALID": "2",
}
OPEN_MPI = {
  "OMPI_COMM_WORLD_SIZE": "4",
  "OMPI_COMM_WORLD_RANK": "3",
  "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
  "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
GKE = {"TPU_WORKER_HOSTNAMES": "a-0.a,a-1.a,a-2.a,a-3.a", "TPU_WORKER_ID": "2"}
BY_HAND = {"JAX_COORDINATOR_ADDRESS": "node1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


@pytest.mark.parametrize(
  ("variables", "launch"),
  [
    ({}, None),
    (SLURM, Launch("Slurm job 7", 8, 6, 4, 2)),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "7,1"}, Launch("Slurm job 7", 8, 6, 1, 2)),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": ""}, Launch("Slurm job 7", 8, 6, 8, 2)),
    ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NTASKS": "8"}, None),
    (OPEN_MPI, Launch("Open MPI", 4, 3, 2, 1)),
    (SLURM | OPEN_MPI, Launch("Open MPI", 4, 3, 2, 1)),
    (GKE, Launch("GKE", 4, 2, expected="a-0.a:8482")),
    (
      GKE | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"},
      Launch("GKE", 8, 6, expected="a-0.a:8482", slices=2),
    ),
    (
      {"TPU_PROCESS_ADDRESSES": "local", "TPU_WORKER_ID": "0"},
      Launch("GKE", 1, 0, expected="local:8482"),
    ),
    (BY_HAND, Launch("JAX_COORDINATOR_ADDRESS", 4, 3, address="node1:1234")),
    (
      SLURM | {"JAX_COORDINATOR_ADDRESS": "node1:1234"},
      Launch("Slurm job 7", 8, 6, 4, 2, "node1:1234"),
    ),
    (OPEN_MPI | BY_HAND, Launch("Open MPI", 4, 3, 2, 1, "node1:1234")),
    (
      {"SLURM_JOB_ID": "7", "SLURM_NNODES": "4"} | BY_HAND,
      Launch("JAX_COORDINATOR_ADDRESS", 4, 3, address="node1:1234"),
    ),
    (SLURM | {"JAX_NUM_PROCESSES": "1"}, None),
    ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "JAX_NUM_PROCESSES": "1"}, None),
  ],
)
def test_each_launcher_is_recognised(variables, launch):
  assert find_launch(variables) == launch


@pytest.mark.parametrize(
  ("variables", "message"),
  [
    (
      {"SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "SLURM_NTASKS": "4"},
      "Slurm job 7 has 4 tasks on 4 nodes, but srun has started only 1 of them: "
      "use `srun gtpo ...`, or set JAX_NUM_PROCESSES=1",
    ),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, "has 8 tasks on 2 nodes, but srun has started only 1"),
    (SLURM | {"SLURM_PROCID": "x"}, "variable SLURM_PROCID must be an integer, got 'x'"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK must be an integer, got None"),
    ({"JAX_NUM_PROCESSES": "4"}, "JAX_NUM_PROCESSES=4 needs JAX_COORDINATOR_ADDRESS=HOST:PORT"),
    (BY_HAND | {"JAX_PROCESS_ID": ""}, "so JAX_NUM_PROCESSES and JAX_PROCESS_ID must be integers"),
    (BY_HAND | {"JAX_PROCESS_ID": "4"}, r"JAX_PROCESS_ID must be in \[0, JAX_NUM_PROCESSES\)"),
    (
      GKE | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "3"},
      r"MEGASCALE_SLICE_ID must be in \[0, MEGASCALE_NUM_SLICES\), got 3 and 2; set MEGASCALE_NUM",
    ),
    (GKE | {"MEGASCALE_SLICE_ID": "-1"}, r"MEGASCALE_SLICE_ID must be .* got -1 and 1"),
    (GKE | {"MEGASCALE_NUM_SLICES": "0"}, "MEGASCALE_NUM_SLICES must be at least 1, got 0"),
    (GKE | {"MEGASCALE_NUM_SLICES": "-1"}, "MEGASCALE_NUM_SLICES must be at least 1, got -1"),
    (GKE | {"MEGASCALE_NUM_SLICES": "two"}, "MEGASCALE_NUM_SLICES must be an integer, got 'two'"),
    (GKE | {"MEGASCALE_SLICE_ID": "a"}, "MEGASCALE_SLICE_ID must be an integer, got 'a'"),
    (BY_HAND | {"JAX_COORDINATOR_ADDRESS": "node1"}, "must be HOST:PORT .* got 'node1'"),
  ],
)
def test_contradictions_are_refused(variables, message):
  with pytest.raises(UserError, match=message):
    find_launch(variables)


@pytest.mark.parametrize(
  ("variables", "local_count", "local_index", "gpus"),
  [
    ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 1, 0, [0, 1, 2, 3, 4, 5, 6, 7]),
    ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 8, 5, [5]),
    ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 2, 1, [4, 5, 6, 7]),
    ({"CUDA_VISIBLE_DEVICES": "6,7"}, 2, 1, [1]),  # indices of the visible ones
    ({"CUDA_VISIBLE_DEVICES": "3"}, 8, 3, [0]),
    ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, 4, 3, [0, 1]),
    ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2, 1, None),
    ({"SLURM_STEP_GPUS": "4,5"}, 1, 0, [0, 1]),
    ({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_LOCAL_DEVICE_IDS": "1"}, 1, 0, None),
  ],
)
def test_the_processes_of_a_host_share_its_gpus(variables, local_count, local_index, gpus):
  launch = Launch("Slurm job 7", 16, 0, local_count, local_index)
  assert local_gpus(launch, variables) == gpus


def test_without_gpus_jax_decides(monkeypatch, tmp_path):
  monkeypatch.setattr(launchers, "NVIDIA_DEVICE_FILES", str(tmp_path / "nvidia*"))
  launch = Launch("Slurm job 7", 2, 0)
  assert local_gpus(launch, {}) is None
  for name in ("nvidia0", "nvidia1"):
    (tmp_path / name).touch()
  assert local_gpus(launch, {}) == [0, 1]


class Metadata(http.server.BaseHTTPRequestHandler):
  """A metadata server that serves `server.values`, once the events of `server.faults` are over.

  An event happens instead of an answer: an HTTP status, "cut" for a connection that is closed
  without an answer, "late" for an answer that comes too late.
  """

  def do_GET(self):
    key = self.path.rpartition("/")[2]
    faults = self.server.faults.get(key, [])
    fault = faults.pop(0) if faults else None
    if fault == "cut":
      return
    if fault == "late":
      time.sleep(3 * launchers.TIMEOUT_S)
      return
    value = self.server.values.get(key)
    known = value is not None and self.headers["Metadata-Flavor"] == "Google"
    self.send_response(fault or (200 if known else 404))
    self.end_headers()
    if known and not fault:
      self.wfile.write(value.encode())

  def log_message(self, *_):
    pass


@pytest.fixture
def tpu_vm(monkeypatch):
  """The metadata server of host 1 in the second of two Cloud TPU slices, with two hosts each."""
  monkeypatch.setenv("JAX_FORCE_TPU_INIT", "1")
  monkeypatch.setattr(launchers, "PAUSES_S", (0.01, 0.01, 0.01, 0.01))
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
    server.faults = {}
    server.values = {
      "agent-worker-number": "1",
      "worker-network-endpoints": "unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3",
      "tpu-env": "ACCELERATOR_TYPE: 'v5p-16'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n",
    }
    server.variables = {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()


def test_a_cloud_tpu_vm_is_recognised(tpu_vm):
  assert find_launch(tpu_vm.variables) == Launch(
    "Cloud TPU", 4, 3, expected="10.0.0.2:8482", slices=2
  )
  assert find_launch(tpu_vm.variables | {"TPU_SKIP_MDS_QUERY": "1"}) is None
  assert find_launch(tpu_vm.variables | {"JAX_NUM_PROCESSES": "1"}) is None


def test_a_metadata_server_that_fails_for_a_moment_is_asked_again(tpu_vm, monkeypatch):
  tpu_vm.faults["worker-network-endpoints"] = ["cut", 503]
  tpu_vm.faults["agent-worker-number"] = [500, "cut", 429, "cut"]
  assert find_launch(tpu_vm.variables) == Launch(
    "Cloud TPU", 4, 3, expected="10.0.0.2:8482", slices=2
  )
  monkeypatch.setattr(launchers, "TIMEOUT_S", 0.3)
  tpu_vm.faults["worker-network-endpoints"] = ["late"]
  assert find_launch(tpu_vm.variables) == Launch(
    "Cloud TPU", 4, 3, expected="10.0.0.2:8482", slices=2
  )
  assert not any(tpu_vm.faults.values())


@pytest.mark.parametrize(
  ("faults", "values", "message"),
  [
    (
      {"worker-network-endpoints": [503] * 5},
      {},
      r"does not say worker-network-endpoints in 5 attempts \(HTTP status 503\), so this host may "
      "be one of several; try again, or set JAX_NUM_PROCESSES=1 to use it alone",
    ),
    ({"tpu-env": ["cut"] * 5}, {}, r"does not say tpu-env in 5 attempts \(Remote end closed"),
    ({}, {"tpu-env": None}, "knows worker-network-endpoints, but not tpu-env, so this host may be"),
    ({}, {"agent-worker-number": "2"}, "gives this host the number 2 of 2"),
    ({}, {"agent-worker-number": "x"}, "agent-worker-number must be an integer, got 'x'"),
  ],
)
def test_a_host_whose_metadata_server_fails_does_not_run_alone(tpu_vm, faults, values, message):
  tpu_vm.faults |= faults
  tpu_vm.values |= values
  with pytest.raises((RunError, UserError), match=message):
    find_launch(tpu_vm.variables)
  tpu_vm.faults |= faults
  assert find_launch(tpu_vm.variables | BY_HAND).address == "node1:1234"


@pytest.mark.parametrize("status", [403, 404])
def test_a_machine_without_tpu_attributes_is_not_part_of_a_pod(tpu_vm, status):
  tpu_vm.faults["worker-network-endpoints"] = [status]
  assert find_launch(tpu_vm.variables) is None


def test_a_machine_without_a_metadata_server_is_not_part_of_a_pod(monkeypatch):
  monkeypatch.setenv("JAX_FORCE_TPU_INIT", "1")
  with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as unused:
    address = f"127.0.0.1:{unused.getsockname()[1]}"
  for server in (address, "metadata.invalid"):
    assert find_launch({"GCE_METADATA_IP": server}) is None


def test_without_a_launcher_nothing_is_joined(monkeypatch):
  """On a machine with TPU chips, JAX's own count of processes must agree."""
  monkeypatch.setattr(joining, "find_launch", lambda: None)
  join_processes()
  monkeypatch.setenv("JAX_FORCE_TPU_INIT", "1")
  join_processes()
  monkeypatch.setattr("jax.process_count", lambda: 4)
  with pytest.raises(RunError, match=r"^JAX sees 4 process\(es\), but nothing says that this"):
    join_processes()


@pytest.mark.parametrize("value", ["0", "ten", "-5"])
def test_the_time_limit_is_checked(monkeypatch, value):
  monkeypatch.setenv("GTPO_JOIN_TIMEOUT_S", value)
  with pytest.raises(UserError, match=f"GTPO_JOIN_TIMEOUT_S must be .* got '{value}'"):
    join_processes()


@pytest.mark.parametrize(
  ("index", "listens", "what"),
  [
    (0, False, "not all processes joined"),
    (1, True, "not all processes joined"),
    (1, False, "cannot reach the first process at {address}"),
  ],
)
@pytest.mark.some(1)
def test_the_line_at_the_time_limit(index, listens, what, monkeypatch, capsys):
  """It says whether the first process listens at its address."""
  statuses = []
  ended = threading.Event()
  monkeypatch.setattr(os, "_exit", lambda status: (statuses.append(status), ended.set()))
  with socket.create_server(("localhost", 0)) as first:
    address = f"localhost:{first.getsockname()[1]}"
    if not listens:
      first.close()
    with joining._time_limit(Launch("Slurm job 7", 3, index, address=address), 1):
      assert ended.wait(60)
  assert statuses == [1]
  assert capsys.readouterr().err == (
    f"gtpo: Slurm job 7, process {index} of 3: {what.format(address=address)} within 1 s; check "
    f"that the command was started on every host and that all 3 processes can reach the first one "
    f"at {address}, or raise GTPO_JOIN_TIMEOUT_S\n"
  )


def test_the_advice_names_host_port_firewall_and_slices():
  slices = GKE | {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "job-0.net:8080",
  }
  assert find_launch(slices).advice() == (
    "check that the command was started on every host and that all 8 processes can reach the first "
    "one at job-0.net:8482; firewalls often open 8476 and not 8482: set "
    "JAX_COORDINATOR_ADDRESS=job-0.net:8476 on every host; MEGASCALE_NUM_SLICES = 2 must be the "
    "number of slices that were started, and MEGASCALE_SLICE_ID another number in each"
  )
  assert "8482" not in find_launch(slices | {"JAX_COORDINATOR_ADDRESS": "job-0.net:8476"}).advice()
  assert " (gcloud: --worker=all) " in Launch("Cloud TPU", 4, 0).advice()


def test_a_process_says_what_it_waits_for(monkeypatch, capsys):
  monkeypatch.setattr(joining, "NOTICE_S", 0.05)
  with joining._time_limit(Launch("Cloud TPU", 4, 0, expected="w-0:8482"), 600):
    time.sleep(1)
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(
    "gtpo: Cloud TPU, process 0 of 4: waiting for the others, for up to 600 s;"
  )
  assert "on every host (gcloud: --worker=all) and that all 4 processes can reach" in line
