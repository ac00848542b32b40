"""A TFDS builder for the synthetic tasks that does not need TensorFlow.

Sources such as `tfds:gtpo_tasks/sums_4:train` and `tfds:gtpo_tasks/countdown_3:test` use it. After
this module is imported, `tfds.data_source("gtpo_tasks/sums_4", split="test")` returns the task's
held-out problems, with random access to array_record files. The first call writes these files to
TFDS_DATA_DIR or ~/tensorflow_datasets.

A configuration is named TASK_TERMS. The splits are "train", and "test" for the task's held-out
part. Rows have the columns of this package's layout: id, prompt, answer, kind, and extra if the
verifier needs more.
"""

from __future__ import annotations

import dataclasses
import importlib.resources.abc
import sys
from collections.abc import Iterator
from typing import Any

# TFDS 4.9.10 imports a class from this backport but does not install it. From Python 3.11 on, the
# standard library has the same class.
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
    """Returns the task."""
    return make_task(self.task, self.terms)


class GtpoTasks(tfds.core.GeneratorBasedBuilder):
  """Reasoning problems with exact verifiers."""

  VERSION = tfds.core.Version("1.0.0")
  BUILDER_CONFIGS = [  # noqa: RUF012 (TFDS requires a class attribute)
    TaskConfig(name=f"{task}_{terms}", task=task, terms=terms)
    for task, all_terms in (("sums", (1, 2, 3, 4)), ("countdown", (3, 4)))
    for terms in all_terms
  ]

  def _info(self) -> tfds.core.DatasetInfo:
    names = ("id", "prompt", "answer", "kind")
    columns: dict[str, Any] = {name: tfds.features.Text() for name in names}
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
      if problem.extra:
        row["extra"] = dict(problem.extra)
      yield index, row
