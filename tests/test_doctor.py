"""`gtpo doctor` on machines that lack something: it says what is missing and how to get it."""

import importlib.metadata

import jax
import pytest

from gtpo_jax.cli import doctor


def examine(capsys):
  """Returns the exit status, the lines by their first word, and the complete output."""
  status = doctor.examine()
  out = capsys.readouterr().out
  return status, {line.split()[0]: line for line in out.splitlines() if line.strip()}, out


def install(monkeypatch, *missing, **versions):
  """Simulates a machine without the `missing` packages, and with other versions of some."""
  real = importlib.metadata.version

  def version(name):
    if name in missing:
      raise importlib.metadata.PackageNotFoundError(name)
    return versions.get(name) or real(name)

  monkeypatch.setattr(doctor.importlib.metadata, "version", version)
  monkeypatch.setattr(
    doctor.importlib.metadata,
    "requires",
    lambda name: [
      "jax<0.13,>=0.10",
      "optax>=0.2",
      'torch; python_version > "3" and extra == "dev"',
      'jax[tpu]>=0.10; extra == "plan"',
      'jax[cuda13]>=0.10; extra == "cuda"',
      'datasets>=4; extra == "data"',
      'mkdocs; extra == "docs"',
      'wandb>=0.20; extra == "wandb"',
    ],
  )


def test_required_packages_that_are_missing_or_too_old(monkeypatch, capsys):
  install(monkeypatch, "optax", jax="0.9.2")
  status, lines, out = examine(capsys)
  assert status == 1
  assert out.splitlines()[-1] == "not ready: run the pip commands above"
  assert lines["jax"].endswith("0.9.2: pip install 'jax<0.13,>=0.10'")
  assert lines["optax"].endswith("MISSING: pip install 'optax>=0.2'")


def test_missing_optional_packages_are_listed_with_their_purpose(monkeypatch, capsys):
  install(monkeypatch, *doctor.OPTIONAL)
  status, lines, out = examine(capsys)
  assert status == 0
  assert "ready: gtpo train" in out
  assert lines["wandb"].endswith("not installed; for log.wandb: pip install 'wandb>=0.20'")
  assert "for TPU chips, and gtpo plan for TPUs: pip install 'jax[tpu]>=0.10'" in lines["libtpu"]
  for package in doctor.OPTIONAL:
    assert "not installed; for " in lines[package]


def test_an_extra_of_many_packages_is_named(monkeypatch, capsys):
  lines = [f'package{i}; extra == "dev"' for i in range(27)]
  install(monkeypatch, "torch")
  monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: ["jax>=0.10", *lines])
  line = examine(capsys)[1]["torch"]
  assert line.endswith("not installed; for parity tests: in a clone, pip install -e '.[dev]'")


def test_an_accelerator_that_jax_does_not_use(monkeypatch, capsys, tmp_path):
  (tmp_path / "nvidia0").touch()
  accelerators = {
    "an NVIDIA GPU": (str(tmp_path / "nvidia0"), "cuda", "cuda"),
    "a TPU": (str(tmp_path / "none"), "tpu", "tpu"),
  }
  monkeypatch.setattr(doctor, "ACCELERATORS", accelerators)
  install(monkeypatch)
  out = examine(capsys)[2]
  assert (
    "this machine has an NVIDIA GPU, but JAX does not use it: pip install 'jax[cuda13]>=0.10'"
    in out
  )
  assert "a TPU" not in out


@pytest.mark.parametrize(
  ("platforms", "advice"),
  [
    ("tpu", "the platform of JAX_PLATFORMS=tpu is not available here; unset it, or set it"),
    ("", "or set JAX_PLATFORMS=cpu"),
  ],
)
def test_jax_does_not_start(platforms, advice, monkeypatch, capsys):
  def devices():
    raise RuntimeError("Unable to initialize backend\nand more")

  monkeypatch.setattr(jax, "devices", devices)
  monkeypatch.setenv("JAX_PLATFORMS", platforms)
  status, lines, out = examine(capsys)
  last = out.splitlines()[-1]
  assert status == 1
  assert lines["devices"].endswith("JAX does not start: Unable to initialize backend")
  assert last.startswith("not ready: ")
  assert advice in last


def test_what_joining_the_other_hosts_needs(monkeypatch, capsys):
  monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a-0,a-1")
  monkeypatch.setenv("TPU_WORKER_ID", "1")
  status, lines, _ = examine(capsys)
  assert status == 0 and "GKE, process 1 of 2; gtpo train" in lines["launcher"]
  assert "the first one at a-0:8482; firewalls often open 8476 and not" in lines["to"]
  monkeypatch.setenv("MEGASCALE_SLICE_ID", "3")
  status, lines, out = examine(capsys)
  assert status == 1 and "MEGASCALE_SLICE_ID must be in [0, " in lines["launcher"]
  assert out.splitlines()[-1] == "not ready: change what the line launcher names"


def test_the_last_line_is_a_command_of_the_program_that_was_started(capsys):
  doctor.examine("/opt/gtpo/bin/gtpo")
  last = capsys.readouterr().out.splitlines()[-1]
  assert last == "ready: /opt/gtpo/bin/gtpo train --config=tiny --workdir=runs/tiny"


def test_a_source_tree_that_is_not_installed(monkeypatch, capsys):
  def requires(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(doctor.importlib.metadata, "requires", requires)
  assert "not checked, because gtpo_jax runs from a source tree" in examine(capsys)[1]["packages"]
