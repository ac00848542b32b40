"""The synthetic tasks as a TFDS builder, without TensorFlow: `tfds:gtpo_tasks/sums_4:train`, `tfds:gtpo_tasks/countdown_3:test`.

After importing this module, `tfds.data_source("gtpo_tasks/sums_4", split="test")` gives the same by random access from array_record
files, which it writes the first time (into TFDS_DATA_DIR, or ~/tensorflow_datasets). A configuration is named TASK_TERMS. Splits are
the task's own: "train", and "test" for the part held out. Rows have the columns of our own layout: id, prompt, answer, kind, and
extra where the verifier reads more.
"""

from __future__ import annotations

import dataclasses
import importlib.resources.abc
import sys
from collections.abc import Iterator
from typing import Any

# TFDS 4.9.10 asks builders for a class of this backport, and does not bring it; from Python 3.11 on the original has it.
sys.modules.setdefault("importlib_resources", importlib.resources)

import numpy as np  # noqa: E402
import tensorflow_datasets as tfds  # noqa: E402

from gtpo_jax.data.tasks import Task, make_task  # noqa: E402


@dataclasses.dataclass(eq=False)
class TaskConfig(tfds.core.BuilderConfig):
  """A task and its difficulty."""

  task: str = "sums"
  terms: int = 0

  def make(self) -> Task:
    """The task itself."""
    return make_task(self.task, self.terms)


class GtpoTasks(tfds.core.GeneratorBasedBuilder):
  """Reasoning problems with exact verifiers."""

  VERSION = tfds.core.Version("1.0.0")
  BUILDER_CONFIGS = [  # noqa: RUF012 (TFDS requires a class attribute)
    TaskConfig(name=f"{task}_{terms}", task=task, terms=terms)
    for task, terms in (
      *(("sums", terms) for terms in (1, 2, 3, 4)),
      ("countdown", 3),
      ("countdown", 4),
    )
  ]

  def _info(self) -> tfds.core.DatasetInfo:
    columns: dict[str, Any] = {
      name: tfds.features.Text() for name in ("id", "prompt", "answer", "kind")
    }
    if self.builder_config.task == "countdown":
      columns["extra"] = {"numbers": tfds.features.Sequence(np.int64)}
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(columns),
      description=self.builder_config.make().__doc__,
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
    task = self.builder_config.make()
    return {
      "train": self._generate_examples(task, task.train_ids),
      "test": self._generate_examples(task, task.held_out_ids),
    }

  def _generate_examples(self, task: Task, ids: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for index in map(int, ids):
      problem = task.problem(index)
      row = {
        "id": problem.id,
        "prompt": problem.messages[-1]["content"],
        "answer": problem.answer,
        "kind": problem.kind,
      }
      yield index, row | ({"extra": dict(problem.extra)} if problem.extra else {})
