"""`gtpo doctor` on machines that lack something: what it says of it, and what to do."""

import importlib.metadata

import jax
import pytest

from gtpo_jax import doctor


def examined(capsys):
  status = doctor.examine()
  out = capsys.readouterr().out
  return status, {line.split()[0]: line for line in out.splitlines() if line.strip()}, out


def lacking(monkeypatch, *packages, **others):
  """A machine without these packages, and with other versions of some."""
  real = importlib.metadata.version

  def version(name):
    if name in packages:
      raise importlib.metadata.PackageNotFoundError(name)
    return others.get(name) or real(name)

  monkeypatch.setattr(doctor.importlib.metadata, "version", version)
  monkeypatch.setattr(
    doctor.importlib.metadata,
    "requires",
    lambda name: ["jax<0.13,>=0.10", "optax>=0.2", 'torch; extra == "dev"'],
  )


def test_what_is_required_and_missing_or_too_old(monkeypatch, capsys):
  lacking(monkeypatch, "optax", jax="0.9.2")
  status, lines, out = examined(capsys)
  assert status == 1 and out.splitlines()[-1] == "not ready: give the pip commands above"
  assert lines["jax"].endswith("0.9.2: pip install 'jax<0.13,>=0.10'")
  assert lines["optax"].endswith("MISSING: pip install 'optax>=0.2'")


def test_what_is_optional_says_what_it_is_for(monkeypatch, capsys):
  lacking(monkeypatch, *doctor.OPTIONAL)
  status, lines, out = examined(capsys)
  assert status == 0 and "ready: gtpo train" in out
  assert lines["wandb"].endswith(
    "not installed; for log.wandb: pip install 'gtpo_jax[wandb]', or -e '.[wandb]' in a clone"
  )
  assert "for TPU chips, and gtpo plan for TPUs: pip install 'gtpo_jax[plan]'" in lines["libtpu"]
  for package in doctor.OPTIONAL:
    assert "not installed; for " in lines[package]


def test_a_chip_that_jax_does_not_use(monkeypatch, capsys, tmp_path):
  (tmp_path / "nvidia0").touch()
  monkeypatch.setattr(
    doctor,
    "CHIPS",
    {
      "an NVIDIA GPU": (str(tmp_path / "nvidia0"), "cuda"),
      "a TPU": (str(tmp_path / "none"), "tpu"),
    },
  )
  out = examined(capsys)[2]
  assert (
    "an NVIDIA GPU is here, and JAX does not use it: pip install 'gtpo_jax[cuda]'" in out
    and "a TPU" not in out
  )


@pytest.mark.parametrize(
  ("named", "advice"),
  [
    ("tpu", "JAX_PLATFORMS=tpu names what is not here; unset it, or set it to cpu"),
    ("", "or set JAX_PLATFORMS=cpu"),
  ],
)
def test_jax_that_does_not_start(named, advice, monkeypatch, capsys):
  def devices():
    raise RuntimeError("Unable to initialize backend\nand more")

  monkeypatch.setattr(jax, "devices", devices)
  monkeypatch.setenv("JAX_PLATFORMS", named)
  status, lines, out = examined(capsys)
  assert status == 1 and lines["devices"].endswith(
    "JAX does not start: Unable to initialize backend"
  )
  assert out.splitlines()[-1].startswith("not ready: ") and advice in out.splitlines()[-1]


def test_a_source_tree_that_is_not_installed(monkeypatch, capsys):
  def requires(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(doctor.importlib.metadata, "requires", requires)
  assert "not checked, for gtpo_jax runs from a source tree" in examined(capsys)[1]["packages"]
