"""Everything that samples in a run, which warm-up compiles and `gtpo plan` plans."""

from __future__ import annotations

from gtpo_jax.config.run_config import Config
from gtpo_jax.sampling.inventory import Workload
from gtpo_jax.sampling.settings import GREEDY

SAMPLING = "sampling"
GUIDE = "guide"


def run_workloads(config: Config, problems: int | None = None) -> dict[str, Workload]:
  """Returns the workloads of a run by name: the policy's, and the `GUIDE`'s.

  Args:
    config: the config of the run.
    problems: the number of problems to evaluate on; None if they have not been read. An evaluation
      with fewer problems than `eval.batch` has smaller batches.
  """
  params = config.sampling_params
  batch = config.batch.prompts
  continued = config.resolved_algorithm.recipe.continuations or config.log.continuations
  resumes = config.sampling.staleness > 0 or bool(continued)
  turns = config.env.is_used
  workloads = {
    SAMPLING: Workload(config.pool_size, config.policy_completions, params, resumes, turns)
  }
  if group := config.resolved_algorithm.settings.guide_completions:
    workloads[GUIDE] = Workload(batch, group, params)
  return workloads | _evaluation_workloads(config, problems)


def _evaluation_workloads(config: Config, problems: int | None = None) -> dict[str, Workload]:
  """Returns the workloads of an evaluation by name; see `run_workloads`."""
  section = config.eval
  if problems is None:
    problems = section.problems
    if task := config.data.eval_task:
      problems = min(problems, len(task.held_out_ids))
  batch = min(section.batch, problems)
  turns = config.env.is_used
  return {
    "evaluation": Workload(batch, section.samples, config.eval.sampling_params, turns=turns),
    "greedy evaluation": Workload(batch, 1, GREEDY, turns=turns),
  }
