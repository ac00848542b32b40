"""Reads what the launcher of this process says about its run. Importing this imports no JAX.

Slurm, Open MPI, GKE and Cloud TPU describe a run in environment variables or on a metadata server,
from which JAX reads the address of the first process. This module reads how many processes the
launcher has started, so that a process never starts training alone by mistake, and which of the
host's GPUs each process gets.
"""

from __future__ import annotations

import glob
import http.client
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from gtpo_jax.runtime.errors import RunError, UserError

ADDRESS = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
SLICES = "MEGASCALE_NUM_SLICES"
SLICE = "MEGASCALE_SLICE_ID"
CLOUD_TPU = "Cloud TPU"
TPU_PORT = "8482"  # where JAX lets the processes of TPU hosts meet
USUAL_PORT = "8476"  # where it does elsewhere
METADATA_SERVER = "metadata.google.internal"
METADATA_KEYS = ("worker-network-endpoints", "agent-worker-number", "tpu-env")
TPU_DEVICE_FILES = ("/dev/accel0", "/dev/vfio")
NVIDIA_DEVICE_FILES = "/dev/nvidia[0-9]*"
TIMEOUT_S = 10  # for each attempt to ask a metadata server
PAUSES_S = (0.5, 1, 2, 4)  # between attempts
HTTP_UNKNOWN = (403, 404)  # the machine has no such attribute, or may not read it
ABSENT = (ConnectionRefusedError, socket.gaierror)  # nobody listens; the name is not resolved


class Launch(NamedTuple):
  """What a launcher says about a run, and about this process."""

  launcher: str  # its name, for messages
  count: int  # processes of the run
  index: int  # index of this process
  local_count: int = 1  # processes on this host
  local_index: int = 0  # index of this process among those on this host
  address: str | None = None  # host:port of the first process; None if JAX finds it
  expected: str | None = None  # where JAX will look for it, for messages; None if that is not known
  slices: int | None = None  # of TPUs, if a variable says so

  def advice(self, first: str | None = None) -> str:
    """Returns what to check if not all processes join.

    Args:
      first: host:port of the first process, if JAX has found it.
    """
    first = first or self.address or self.expected
    everywhere = " (gcloud: --worker=all)" if self.launcher == CLOUD_TPU else ""
    lines = [
      f"check that the command was started on every host{everywhere} and that all {self.count} "
      f"processes can reach the first one{f' at {first}' if first else ''}"
    ]
    if first and first.endswith(f":{TPU_PORT}"):
      lines.append(
        f"firewalls often open {USUAL_PORT} and not {TPU_PORT}: set "
        f"{ADDRESS}={first.rpartition(':')[0]}:{USUAL_PORT} on every host"
      )
    if self.slices:
      lines.append(
        f"{SLICES} = {self.slices} must be the number of slices that were started, and {SLICE} "
        "another number in each"
      )
    return "; ".join(lines)

  def __str__(self) -> str:
    return f"{self.launcher}, process {self.index} of {self.count}"


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch | None:
  """Returns what the launcher of this process says; None if there is none.

  Raises:
    UserError: the variables contradict one another, or are incomplete.
    RunError: the metadata server of a Cloud TPU VM does not answer.
  """
  if environ.get(COUNT) == "1" and not environ.get(ADDRESS):
    return None
  if environ.get(COUNT) and not environ.get(ADDRESS):
    raise UserError(f"{COUNT}={environ[COUNT]} needs {ADDRESS}=HOST:PORT of the first process")
  try:
    launch = next(filter(None, (read(environ) for read in LAUNCHERS)), None)
  except (UserError, RunError):
    if not environ.get(ADDRESS):
      raise
    launch = None
  return _by_hand(environ, launch) if environ.get(ADDRESS) else launch


def local_gpus(launch: Launch, environ: Mapping[str, str] = os.environ) -> list[int] | None:
  """Returns which of the GPUs that this process can see it should use; None leaves that to JAX.

  The processes of a host share its GPUs evenly. JAX itself would give process i of a host the i-th
  GPU that it sees. So one process per host would leave all other GPUs idle, and processes that see
  only their own GPU would look for one that is not there.
  """
  if environ.get("JAX_LOCAL_DEVICE_IDS"):
    return None
  visible = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("SLURM_STEP_GPUS")
  gpus = len(visible.split(",")) if visible else len(glob.glob(NVIDIA_DEVICE_FILES))
  if gpus == 1 or (gpus and "SLURM_GPUS_PER_TASK" in environ):  # it sees only its own
    return list(range(gpus))
  if gpus == 0 or gpus % launch.local_count:
    return None
  share = gpus // launch.local_count
  return list(range(launch.local_index * share, (launch.local_index + 1) * share))


def has_tpu() -> bool:
  """Whether this machine has TPU chips, or JAX is told to behave as if it did."""
  found = any(Path(path).exists() for path in TPU_DEVICE_FILES)
  return found or "JAX_FORCE_TPU_INIT" in os.environ


def _by_hand(environ: Mapping[str, str], launch: Launch | None) -> Launch:
  """Returns the launch that JAX's variables describe; the launcher supplies what they omit."""
  address = environ[ADDRESS]
  if not re.fullmatch(r".+:\d+", address):
    raise UserError(f"{ADDRESS} must be HOST:PORT of the first process, got {address!r}")
  if COUNT not in environ and INDEX not in environ and launch:
    return launch._replace(address=address)
  try:
    count = int(environ[COUNT])
    index = int(environ[INDEX])
  except (KeyError, ValueError):
    raise UserError(f"{ADDRESS} is set, so {COUNT} and {INDEX} must be integers") from None
  if not 0 <= index < count:
    raise UserError(f"{INDEX} must be in [0, {COUNT}), got {index} and {count}")
  if launch and launch.count == count:
    return launch._replace(index=index, address=address)
  return Launch(ADDRESS, count, index, address=address)


def _open_mpi(environ: Mapping[str, str]) -> Launch | None:
  if "OMPI_COMM_WORLD_SIZE" not in environ:
    return None
  size, rank, local_size, local_rank = (
    _integer(environ, f"OMPI_COMM_WORLD_{name}", default)
    for name, default in (("SIZE", None), ("RANK", None), ("LOCAL_SIZE", 1), ("LOCAL_RANK", 0))
  )
  return Launch("Open MPI", size, rank, local_size, local_rank)


def _slurm(environ: Mapping[str, str]) -> Launch | None:
  """Reads the variables of a task that `srun` started, or of a batch script or shell in a job."""
  if "SLURM_JOB_ID" not in environ:
    return None
  job = f"Slurm job {environ['SLURM_JOB_ID']}"
  tasks = _integer(environ, "SLURM_NTASKS", 1)
  nodes = _integer(environ, "SLURM_NNODES", 1)
  started = _integer(environ, "SLURM_STEP_NUM_TASKS", tasks)
  if "SLURM_STEP_NODELIST" not in environ:
    if nodes == 1:
      return None  # the process can use the whole node
    started = 1
    tasks = max(tasks, nodes)
  if started != tasks:
    raise UserError(
      f"{job} has {tasks} tasks on {nodes} nodes, but srun has started only {started} of them: "
      f"use `srun gtpo ...`, or set {COUNT}=1 to use this node alone"
    )
  local_index = _integer(environ, "SLURM_LOCALID", 0)
  index = _integer(environ, "SLURM_PROCID", None)
  return Launch(job, tasks, index, _slurm_tasks_on_node(environ, tasks), local_index)


def _slurm_tasks_on_node(environ: Mapping[str, str], tasks: int) -> int:
  """Returns the number of this step's tasks on this node.

  Slurm lists them by node, with repetitions in parentheses: "4(x2),1" is 4, 4 and 1.
  """
  counts = []
  for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
    if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
      counts += [int(match[1])] * int(match[2] or 1)
  node = _integer(environ, "SLURM_NODEID", 0)
  if node < len(counts):
    return counts[node]
  return -(-tasks // _integer(environ, "SLURM_STEP_NUM_NODES", 1))


def _gke(environ: Mapping[str, str]) -> Launch | None:
  """Reads the variables that GKE sets in the pods of a TPU slice, also with XPK or JobSet."""
  hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
  if not hosts:
    return None
  names = [host.partition(":")[0] for host in hosts.split(",")]
  return _slices("GKE", names, _integer(environ, "TPU_WORKER_ID", 0), environ)


def _cloud_tpu(environ: Mapping[str, str]) -> Launch | None:
  """Asks the metadata server of a Cloud TPU VM."""
  if environ.get("TPU_SKIP_MDS_QUERY") or not has_tpu():
    return None
  server = environ.get("GCE_METADATA_IP", METADATA_SERVER)
  values: dict[str, str] = {}
  for key in METADATA_KEYS:
    value = _attribute(server, key, found=bool(values))
    if value is None and not values:
      return None  # for example a notebook service, which hides the server
    if value is None:
      raise _no_answer(server, f"knows {next(iter(values))}, but not {key}")
    values[key] = value
  endpoints, _, details = (values[key] for key in METADATA_KEYS)
  index = _integer(values, "agent-worker-number", None)
  named = dict(re.findall(r"^(\w+): *'?(.*?)'?$", details, re.MULTILINE))
  hosts = [endpoint.rpartition(":")[2] for endpoint in endpoints.split(",")]
  if not 0 <= index < len(hosts):
    raise RunError(f"the metadata server gives this host the number {index} of {len(hosts)}")
  return _slices(CLOUD_TPU, hosts, index, named | {k: x for k, x in environ.items() if x})


def _attribute(server: str, key: str, found: bool) -> str | None:
  """Returns an attribute of this machine; None without a server, or if it does not know it.

  A server that is slow or fails for a moment is asked again. So a machine is never taken for one
  without a server because its server was busy.

  Args:
    server: host, or host:port.
    key: its name below `instance/attributes`.
    found: whether the server has answered before.
  """
  request = urllib.request.Request(
    f"http://{server}/computeMetadata/v1/instance/attributes/{key}",
    headers={"Metadata-Flavor": "Google"},
  )
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  for pause in (*PAUSES_S, None):
    try:
      with opener.open(request, timeout=TIMEOUT_S) as reply:
        return reply.read().decode(errors="replace").strip()
    except urllib.error.HTTPError as error:
      error.close()
      if error.code in HTTP_UNKNOWN:
        return None
      problem = f"HTTP status {error.code}"
    except (OSError, http.client.HTTPException) as error:
      cause = error.reason if isinstance(error, urllib.error.URLError) else error
      if isinstance(cause, ABSENT) and not found:
        return None
      problem = str(cause) or type(cause).__name__
    found = True
    if pause is not None:
      time.sleep(pause)
  raise _no_answer(server, f"does not say {key} in {len(PAUSES_S) + 1} attempts ({problem})")


def _no_answer(server: str, what: str) -> RunError:
  return RunError(
    f"the metadata server {server} {what}, so this host may be one of several; try again, or set "
    f"{COUNT}=1 to use it alone"
  )


def _slices(name: str, hosts: list[str], index: int, values: Mapping[str, str]) -> Launch:
  """Returns the launch of one or several TPU slices, each with as many hosts as this one."""
  slices = _integer(values, SLICES, 1)
  slice_index = _integer(values, SLICE, 0)
  if slices < 1:
    raise UserError(f"{SLICES} must be at least 1, got {slices}; unset it for one slice")
  if not 0 <= slice_index < slices:
    raise UserError(
      f"{SLICE} must be in [0, {SLICES}), got {slice_index} and {slices}; set {SLICES} to the "
      f"number of slices that are started, and {SLICE} to a different number in each slice"
    )
  first = (values.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]).partition(":")[0]
  return Launch(
    name,
    len(hosts) * slices,
    index + slice_index * len(hosts),
    expected=f"{first}:{values.get('JAX_COORDINATOR_PORT') or TPU_PORT}",
    slices=slices if values.get(SLICES) else None,
  )


# In the order in which JAX tries them: mpirun can be used within a Slurm job.
LAUNCHERS: tuple[Callable[[Mapping[str, str]], Launch | None], ...] = (
  _open_mpi,
  _slurm,
  _gke,
  _cloud_tpu,
)


def _integer(environ: Mapping[str, str], name: str, default: int | None) -> int:
  value = environ.get(name) or default
  try:
    return int(value)
  except (TypeError, ValueError):
    raise UserError(f"the launcher's variable {name} must be an integer, got {value!r}") from None
