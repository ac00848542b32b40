"""Checks the launch scripts with tools that need no cluster. Tests skip if a tool is missing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gtpo_jax.runtime.cluster.launchers import find_launch

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
RUN = {
  "NAME": "mine",
  "ZONE": "us-central1-a",
  "TPU": "v5p-128",
  "IMAGE": "us-docker.pkg.dev/mine/gtpo:1",
  "CLUSTER": "mine",
  "CONFIG": "configs/tiny.py",
  "WORKDIR": "gs://bucket/run",
  "ACCELERATOR": "tpu-v5p-slice",
  "TOPOLOGY": "4x4x4",
}
OVERRIDE = '--config.data.template={prompt} "quoted"'


def tool(name):
  return shutil.which(name) or pytest.skip(f"{name} is not installed")


def call(*command, tmp_path=None, code=0, **environment):
  """Returns the output of a command with only these environment variables, so no credentials."""
  env = {
    "PATH": os.environ["PATH"],
    "HOME": str(tmp_path or "/nonexistent"),
    "CLOUDSDK_CORE_PROJECT": "mine",
    **environment,
  }
  done = subprocess.run(
    command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
  )
  assert done.returncode == code, done.stdout + done.stderr
  return done.stdout + done.stderr


def jobset(**changes):
  """Returns the JobSet that gke.sh prints."""
  return yaml.safe_load(call(str(LAUNCH / "gke.sh"), OVERRIDE, **{**RUN, **changes}))


def test_the_readme_covers_every_file():
  readme = (LAUNCH / "README.md").read_text()
  files = {path.name for path in LAUNCH.iterdir()} - {"README.md", "Dockerfile.dockerignore"}
  assert files == {"Dockerfile", "gke.sh", "sky.yaml", "slurm.sh", "tpu.sh", "xpk.sh"}
  for name in files:
    assert f"launch/{name}" in readme or f"`{name}`" in readme


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script):
  call("bash", "-n", str(script))
  assert os.access(script, os.X_OK) or script.name == "slurm.sh"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_missing_variable_is_named(script):
  message = call(str(script), code=1)
  assert re.search(r"(ZONE|CLUSTER|ACCELERATOR|CONFIG): ", message)


def test_the_jobset():
  manifest = jobset(SLICES="2")
  assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "multislice-queue"}
  (job,) = manifest["spec"]["replicatedJobs"]
  spec = job["template"]["spec"]
  assert job["replicas"] == 2
  assert spec["parallelism"] == spec["completions"] == 16
  assert spec["backoffLimit"] == 0
  pod = spec["template"]["spec"]
  assert pod["terminationGracePeriodSeconds"] == 900
  assert pod["restartPolicy"] == "Never"
  (container,) = pod["containers"]
  assert container["args"] == [
    "train",
    "--config=configs/tiny.py",
    "--workdir=gs://bucket/run",
    OVERRIDE,
  ]
  assert container["resources"]["limits"] == {"google.com/tpu": 4}
  assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 50
  assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == container["name"]


@pytest.mark.parametrize(
  ("topology", "message"),
  [("4x", "4x4x4; got 4x"), ("3x3", "not a multiple of CHIPS=4"), ("2x1", "not a multiple")],
)
def test_an_impossible_slice_is_rejected(topology, message):
  assert message in call(str(LAUNCH / "gke.sh"), code=2, **{**RUN, "TOPOLOGY": topology})


def test_the_sky_task_runs_gtpo():
  task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
  assert "gtpo train" in task["run"]
  assert {"CONFIG", "WORKDIR", "OVERRIDES"} <= task["envs"].keys()
  assert (ROOT / task["envs"]["CONFIG"]).exists()


def test_the_configs_and_files_mentioned_exist():
  for path in LAUNCH.iterdir():
    for name in re.findall(r"configs/\w+\.py", path.read_text()):
      assert (ROOT / name).exists(), (path.name, name)
  for line in (LAUNCH / "Dockerfile").read_text().splitlines():
    if line.startswith("COPY"):
      assert all((ROOT / name).exists() for name in line.split()[1:-1]), line


def run_slurm(tmp_path, **variables):
  """Runs slurm.sh with an `srun` that prints its environment; returns that as a dict."""
  srun = tmp_path / "srun"
  srun.write_text('#!/bin/sh\necho "ARGS=$*"\nenv\n')
  srun.chmod(0o755)
  env = {"CONFIG": "configs/tiny.py", "WORKDIR": "/run", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
  printed = call("bash", str(LAUNCH / "slurm.sh"), "--config.seed=1", **env | variables)
  return dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)


def accepts(environment, code):
  """Whether a Python program starts with these variables."""
  env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
  done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=300)
  return done.returncode == 0


@pytest.mark.slow
def test_slurm_starts_gtpo_with_flags_that_xla_knows(tmp_path):
  seen = run_slurm(tmp_path, XLA_FLAGS="--xla_gpu_autotune_level=1")
  assert seen["ARGS"].endswith("gtpo train --config=configs/tiny.py --workdir=/run --config.seed=1")
  assert "JAX_LOCAL_DEVICE_IDS" not in seen  # gtpo itself shares the GPUs of a node
  flags = seen["XLA_FLAGS"]
  assert flags.endswith(" --xla_gpu_autotune_level=1")
  start = "import jax; jax.devices()"
  assert accepts({"XLA_FLAGS": flags}, start)
  assert not accepts({"XLA_FLAGS": flags.replace("hiding", "hidden")}, start)


@pytest.mark.slow
def test_gke_sets_flags_that_libtpu_knows():
  pytest.importorskip("libtpu")
  pod = jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
  (variable,) = pod["containers"][0]["env"]
  assert variable["name"] == "LIBTPU_INIT_ARGS"
  compile_for_tpu = (
    "from gtpo_jax.cli.planning.topology import topology_devices; topology_devices('v5e:2x2')"
  )
  assert accepts({"LIBTPU_INIT_ARGS": variable["value"]}, compile_for_tpu)
  assert not accepts({"LIBTPU_INIT_ARGS": variable["value"] + "x"}, compile_for_tpu)


def test_several_gpu_machines_of_sky_find_one_another(tmp_path):
  """Runs the task's command with a `gtpo` that prints its environment."""
  gtpo = tmp_path / "gtpo" / "bin" / "gtpo"
  gtpo.parent.mkdir(parents=True)
  gtpo.write_text("#!/bin/sh\nenv\n")
  gtpo.chmod(0o755)
  command = yaml.safe_load((LAUNCH / "sky.yaml").read_text())["run"]
  variables = {
    "EXTRA": "cuda",
    "CONFIG": "configs/tiny.py",
    "WORKDIR": "gs://bucket/run",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
  }
  printed = call("bash", "-c", command, tmp_path=tmp_path, **variables)
  seen = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
  launch = find_launch(seen)
  assert (launch.count, launch.index, launch.address) == (2, 1, "10.0.0.1:8476")
  for alone in ({"SKYPILOT_NUM_NODES": "1"}, {"EXTRA": "tpu"}):
    printed = call("bash", "-c", command, tmp_path=tmp_path, **variables | alone)
    assert "JAX_COORDINATOR_ADDRESS" not in printed


SLICES = {  # the slice of a TPU type, by the name that each tool uses
  "v5litepod-16": "v5e:4x4",
  "v5p-128": "v5p:4x4x4",
  "tpu-v5p-slice 4x4x4": "v5p:4x4x4",
}


def example(name):
  """Returns the settings in the example of a launch file, as a text of words."""
  if name == "sky.yaml":
    task = yaml.safe_load((LAUNCH / name).read_text())
    envs = task["envs"]
    assert '--config.model.path="$MODEL"' in task["run"]
    accelerator = task["resources"]["accelerators"].removeprefix("tpu-")
    return {"TPU": accelerator, "CONFIG": envs["CONFIG"], "path": envs["MODEL"]}
  comment = "".join(
    line.lstrip("# ").replace("\\", "")
    for line in (LAUNCH / name).read_text().splitlines(keepends=True)[1:12]
    if line.startswith("#")
  )
  settings = dict(re.findall(r"(\b[A-Z]+)=(\S+)", comment))
  (path,) = re.findall(r"--config\.model\.path=(\S+)", comment)
  return settings | {"path": path}


@pytest.mark.parametrize("name", ["gke.sh", "sky.yaml", "slurm.sh", "tpu.sh", "xpk.sh"])
def test_an_example_names_weights_and_hardware_that_they_fit_on(name):
  """The head of a config names the slice for which `gtpo plan` reports that the run fits."""
  settings = example(name)
  head = (ROOT / settings["CONFIG"]).read_text().split('"""')[1]
  assert f"--config.model.path={settings['path']}\n" in head
  if name == "slurm.sh":  # gtpo plan describes no GPUs
    return
  chips = settings.get("TPU") or f"{settings['ACCELERATOR']} {settings['TOPOLOGY']}"
  assert f"topology {SLICES[chips]} " in head


@pytest.mark.slow
def test_shellcheck_finds_nothing():
  call(tool("shellcheck"), *map(str, SCRIPTS))


@pytest.mark.slow
def test_hadolint_finds_nothing():
  call(tool("hadolint"), str(LAUNCH / "Dockerfile"))


def check_job(spec, tmp_path):
  """Validates the Job inside a JobSet against the Kubernetes schema; unknown fields fail."""
  file = tmp_path / "job.yaml"
  file.write_text(
    yaml.safe_dump(
      {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "mine"}, "spec": spec}
    )
  )
  return call(tool("kubernetes-validate"), "--strict", str(file))


@pytest.mark.slow
def test_the_inner_job_follows_the_schema(tmp_path):
  spec = jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]
  check_job(spec, tmp_path)
  spec["template"]["spec"]["gracePeriod"] = 3
  with pytest.raises(AssertionError, match="gracePeriod"):
    check_job(spec, tmp_path)


@pytest.mark.slow
def test_xpk_makes_a_jobset(tmp_path):
  tool("xpk")
  manifest = tmp_path / "manifest.yaml"
  flags = (
    "--project=mine --zone=us-central1-a --dry-run --skip-validation "
    f"--output-manifest-file={manifest}"
  )
  call(str(LAUNCH / "xpk.sh"), OVERRIDE, tmp_path=tmp_path, XPK_FLAGS=flags, **RUN)
  spec = yaml.safe_load(manifest.read_text())["spec"]
  pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
  assert spec["failurePolicy"]["maxRestarts"] == 50
  assert pod["terminationGracePeriodSeconds"] == 900
  script = pod["containers"][0]["command"][-1]
  line = next(line for line in script.splitlines() if "gtpo train" in line)
  command = line.strip().removeprefix("(").split(" ) &")[0]
  print_args = command.replace("exec gtpo", "printf '%s\\n'")
  assert call("bash", "-c", print_args).splitlines() == [
    "train",
    "--config=configs/tiny.py",
    "--workdir=gs://bucket/run",
    OVERRIDE,
  ]
  policy = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]
  fatal = policy["rules"][0]["onExitCodes"]
  assert fatal["operator"] == "NotIn"
  assert 143 in fatal["values"]
  assert 2 not in fatal["values"]


@pytest.mark.slow
def test_sky_reads_the_task(tmp_path):
  python = Path(tool("sky")).read_text().splitlines()[0].removeprefix("#!")
  program = (
    "import sky, yaml; config = yaml.safe_load(open('launch/sky.yaml'));"
    "overrides = [('WORKDIR', 'gs://bucket/run')];"
    "task = sky.Task.from_yaml_config(config, env_overrides=overrides);"
    "print(task.envs, task.resources)"
  )
  printed = call(python, "-c", program, tmp_path=tmp_path)
  for text in ("gs://bucket/run", "tpu-v5litepod-16", "Spot"):
    assert text in printed


@pytest.mark.slow
@pytest.mark.parametrize(
  ("flags", "message"),
  [({}, "select an already authenticated account"), ({"SPOT": "1"}, "authenticated account")],
)
def test_gcloud_knows_the_flags(tmp_path, flags, message):
  """gcloud parses its arguments before it reports missing credentials."""
  tool("gcloud")
  assert message in call(
    str(LAUNCH / "tpu.sh"),
    OVERRIDE,
    tmp_path=tmp_path,
    code=1,
    **{**RUN, "TPU": "v5litepod-16"},
    **flags,
  )
