"""Two processes with a teacher equal one, and resume bit for bit after one of them is killed."""

import jax
import numpy as np
import pytest
from processes import SETTINGS, read_result, start, start_two

from gtpo_jax.data.chat import load_chat
from gtpo_jax.models import ModelConfig, Transformer, init_params
from gtpo_jax.models.hf.save import save
from gtpo_jax.runtime.mesh import single_device_mesh

pytestmark = pytest.mark.manual

STEPS = 3
TEACHER = ModelConfig(
  vocab_size=390,
  width=64,
  layers=2,
  heads=2,
  kv_heads=2,
  head_dim=32,
  mlp=96,
  tied=False,
  biases=(),
  model_type="llama",
  context=64,
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  """The settings of a run with a teacher of another family, which is in a Hugging Face folder."""
  folder = tmp_path_factory.mktemp("teacher") / "llama"
  model = Transformer(TEACHER, single_device_mesh())
  save(model, init_params(model, jax.random.key(5)), load_chat().tokenizer, folder)
  return SETTINGS | {
    "steps": STEPS,
    "algorithm.name": "opd",
    "teacher.path": folder,
    "eval.every": 0,
    "log.tensorboard": False,
    "checkpoint.every": 1,
  }


def two(workdir, settings, event="-", victim=0):
  codes, printed = start_two(workdir, event, victim, settings)
  assert "damaged" not in printed[0]
  if event == "-":
    assert codes == [0, 0], printed
    return read_result(workdir)
  assert codes[victim] == -9 and codes[1 - victim] not in (0, 2), (codes, printed)
  return None


@pytest.mark.parametrize("divergence", ["reverse_kl", "sampled"])
def test_two_processes_equal_one(divergence, settings, tmp_path):
  """One process with two devices samples the same completions and moves to the same policy."""
  settings = settings | {"distill.divergence": divergence}
  done = start(tmp_path / "one", "-", settings, JAX_NUM_CPU_DEVICES="2")
  assert done.returncode == 0, done.stderr
  rows, samples, step, _ = read_result(tmp_path / "one")
  rows_of_two, samples_of_two, step_of_two, _ = two(tmp_path / "two", settings)
  assert step == step_of_two == STEPS
  assert [x["completion"] for x in samples_of_two] == [x["completion"] for x in samples]
  for row, expected in zip(rows_of_two[1:], rows[1:], strict=True):
    assert row.keys() == expected.keys()
    assert expected["update/empty"] == 0 and abs(expected["distill/divergence"]) > 1e-3
    for name in ("loss", "grad_norm", "distill/divergence", "entropy/mean"):
      np.testing.assert_allclose(row[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("divergence", ["reverse_kl", "sampled"])
def test_one_of_two_processes_is_killed(divergence, settings, tmp_path):
  settings = settings | {"distill.divergence": divergence}
  expected = two(tmp_path / "two", settings)
  two(tmp_path / "run", settings, "kill:update:1", 1)
  two(tmp_path / "run", settings, "kill:saving:2", 0)
  assert two(tmp_path / "run", settings) == expected
