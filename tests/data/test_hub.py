"""Tests datasets of a hub, which the datasets library loads, and columns of class labels."""

import io
import json
import os
import subprocess
import sys

import pytest
from hub import hub

from gtpo_jax.data.readers import read_rows
from gtpo_jax.data.sources import load_source


@pytest.fixture(scope="module", autouse=True)
def library():
  """Imports datasets, which takes seconds that other processes of a parallel run need not spend."""
  global datasets
  datasets = pytest.importorskip("datasets")


# Prints the first problem of each source, or the message why it cannot be loaded.
LOAD = """
import json, sys
from gtpo_jax.data.sources import load_source
for name in sys.argv[1:]:
  try:
    problem = load_source(name).problems[0]
    text = problem.messages[0]["content"]
    print(json.dumps([text, problem.answer, problem.kind]))
  except ValueError as error:
    print(json.dumps(str(error)))
"""
CARD = """---
configs:
- config_name: easy
  data_files: [{split: train, path: easy/train.jsonl}]
- config_name: hard
  data_files: [{split: train, path: hard/train.jsonl}]
---
"""


def labelled(names, index, **columns):
  """Returns a dataset of one row whose answer is a class label."""
  types = {name: datasets.Value("string") for name in columns if name != "choices"}
  if "choices" in columns:
    types["choices"] = datasets.Sequence(datasets.Value("string"))
  features = datasets.Features({**types, "answer": datasets.ClassLabel(names=names)})
  return datasets.Dataset.from_list([{**columns, "answer": index}], features=features)


def parquet(dataset):
  buffer = io.BytesIO()
  dataset.to_parquet(buffer)
  return buffer.getvalue()


@pytest.mark.slow
def test_datasets_of_a_hub(tmp_path):
  """Splits, configs and labels load; a name that does not exist ends in one line."""
  row = lambda question, answer: json.dumps({"question": question, "answer": answer}).encode()
  labels = labelled(["no", "yes"], 1, question="Is the sky blue?")
  prime = labelled(["A", "B", "C"], 2, question="Which is a prime?", choices=["4", "6", "7"])
  stored = {
    "us/plain": {"data/train.jsonl": row("1+1?", "2"), "data/test.jsonl": row("1+2?", "3")},
    "us/two": {
      "README.md": CARD.encode(),
      "easy/train.jsonl": row("1+3?", "4"),
      "hard/train.jsonl": row("17*3?", "51"),
    },
    "us/labels": {"train.parquet": parquet(labels)},
    "us/prime": {"train.parquet": parquet(prime)},
    "us/empty": {"README.md": b"nothing"},
  }
  expected = {
    "us/plain": ["1+1?", "2", "math"],
    "us/plain:test": ["1+2?", "3", "math"],
    "us/two:hard:train": ["17*3?", "51", "math"],
    "us/labels": ["Is the sky blue?", "yes", "exact"],
    "us/prime": ["Which is a prime?\n(A) 4\n(B) 6\n(C) 7", "C", "choice"],
    "us/two": "available configs: ['easy', 'hard']",
    "us/plain:none": "Should be one of ['train', 'test']",
    "us/missing": "exist on the Hub",
    "us/empty": "doesn't contain any data files",
  }
  with hub({f"datasets/{name}": files for name, files in stored.items()}) as address:
    done = subprocess.run(
      [sys.executable, "-c", LOAD, *(f"hf:{name}" for name in expected)],
      env={**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"},
      capture_output=True,
      text=True,
      timeout=300,
    )
  assert done.returncode == 0, done.stderr
  answers = dict(zip(expected, map(json.loads, done.stdout.splitlines()), strict=True))
  for name, value in expected.items():
    if isinstance(value, list):
      assert answers[name] == value, name
    else:
      assert value in answers[name] and "\n" not in answers[name], answers[name]
      assert f"'hf:{name}' (ID, ID:SPLIT or ID:CONFIG:SPLIT) cannot be loaded" in answers[name]


def test_a_class_label_is_its_name_as_an_answer_and_its_index_elsewhere(tmp_path):
  path = tmp_path / "labels.parquet"
  path.write_bytes(parquet(labelled(["no", "yes"], 1, question="Is the sky blue?")))
  problem = load_source(str(path)).problems[0]
  assert (problem.answer, problem.kind) == ("yes", "exact")
  ((_, row),) = read_rows(str(path))
  assert row["answer"] == 1 and row["answer"].name == "yes"
  path.write_bytes(parquet(labelled(["no", "yes"], -1, question="Is it blue?")))
  with pytest.raises(ValueError, match="has no answer: None"):
    load_source(str(path))
