"""`probe`: the gradient of every arm beside the true gradient, batch by batch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from gtpo_jax.algorithms.continuations import LineContinuations
from gtpo_jax.arrays import KeyStream
from gtpo_jax.checkpoint.workdir import claim, open_workdir
from gtpo_jax.cli.probing.arms import REFERENCE, SHUFFLED, Arm, parse_arms, sampling_config
from gtpo_jax.cli.probing.gradients import SKETCH, Gradients, gradients_of, make_gradients
from gtpo_jax.cli.probing.statistics import Moments, compare, mean_interval, result_of_arm, verdict
from gtpo_jax.config import Config
from gtpo_jax.logs.credit import batch_signals
from gtpo_jax.logs.credit_scores import segment_metrics
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.truth import segment_truth
from gtpo_jax.loop.inputs import Agent, MakeEnvironment, Records, resolve_inputs
from gtpo_jax.loop.prepare import Parts, dated, fit_here, prepare
from gtpo_jax.loop.warm_start import base_model
from gtpo_jax.models.params import Params
from gtpo_jax.rollout.batch import Batch
from gtpo_jax.rollout.collector import Collector, group_keys
from gtpo_jax.rollout.continuations import ValueEstimator
from gtpo_jax.rollout.frozen import FrozenPolicies, load_frozen
from gtpo_jax.rollout.scoring.functions import RewardFunction
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.paths import is_remote, write_atomically
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.runtime.startup import prepare_devices
from gtpo_jax.training.log_probs import make_scorer

FOLDER = "probe"
_REFERENCE = "reference"  # in a file, among the names of arms


def probe(
  config: Config | Mapping[str, Any],
  arms: str | Sequence[str] = "grpo,gtpo",
  batches: int = 12,
  reference: int = 48,
  workdir: str | Path | None = None,
  display: Display | None = None,
  stopping: Callable[[], bool] = lambda: False,
  *,
  controls: bool = False,
  reward: RewardFunction | None = None,
  data: Records | None = None,
  held_out: Records | None = None,
  demonstrations: Records | None = None,
  environment: MakeEnvironment | None = None,
  tools: Sequence[Callable[..., Any]] | None = None,
  agent: Agent | None = None,
) -> dict[str, Any]:
  """Returns how well the gradient of each arm agrees with the true gradient, and a verdict.

  The gradients are those of the model that training would start from. All arms see the same
  batches, one after another, and the result of an arm does not depend on the others. The true
  gradient is the mean over further batches, with the mean reward of the other completions as
  baseline. A gradient of more than `gradients.LARGEST` numbers is replaced by a sketch.

  Args:
    config: as in `gtpo_jax.train`. Of its section `algorithm` only the settings of rewards are
      read (`arms.OF_REWARDS`): each arm has its published values and those in its name. Nothing is
      left out of a batch, whatever an arm's dynamic sampling would do.
    arms: recipes with settings, such as "grpo,gtpo(alpha2=1)"; the others are compared with the
      first.
    batches: of `config.batch.prompts` groups, on which the arms are compared; at least 2.
    reference: further batches, of the true gradient; at least 2.
    workdir: where base model, gradients and `probe.json` are kept, so that the same call resumes
      after the last complete batch, bit for bit; more arms and reference batches may be added.
      None for a temporary folder.
    display, stopping: as in `gtpo_jax.train`.
    controls: whether each arm that reads entropies is also measured with shuffled ones.
    reward, data, held_out, demonstrations, environment, tools, agent: as in `gtpo_jax.train`.

  Returns:
    Plain data: `verdict`, one line; `batches`, `reference` and `accuracy`; `reference_noise`, the
    noise-to-signal ratio of the true gradient; `sketch_error`, a bound on the standard error of
    each cosine, 0 without sketches; and by name `arms`. Their values are (estimate, low, high),
    with 95 % intervals, None where there is none: `cosine`, `difference` (of the cosine from the
    first arm's), `over_control` (the same from its control's), `alignment` (the cosine of the mean
    gradient, without noise), `noise` (noise over signal), the shares of `groups` and `tokens` with
    credit, and with `log.continuations` `mc_rank`, how well the credit orders the segments of a
    completion by their measured gains in value (`logs.credit_scores`). `p` is of a paired t-test,
    and `p_holm` corrected by Holm's procedure.

  Raises:
    UserError: the config or an arm cannot be probed here, or the workdir has another probe.
    Stopped: `stopping` returned True.
  """
  for name, count in (("batches", batches), ("reference", reference)):
    if isinstance(count, bool) or not isinstance(count, int) or count < 2:
      raise UserError(f"{name} must be at least 2, got {count!r}")
  prepare_devices()
  if jax.process_count() > 1:
    raise UserError(f"a probe runs in one process, not in {jax.process_count()}")
  display = display or Display()
  inputs = resolve_inputs(config, reward, data, held_out, demonstrations, environment, tools, agent)
  own, _ = dated(inputs.config, workdir)
  compared = parse_arms(arms, own, controls)
  with display.waiting("reading the model and the data", line=False):
    sampled = fit_here(sampling_config(own, compared))
    parts = prepare(dataclasses.replace(inputs, config=sampled), display)
  with (
    contextlib.closing(parts.reward_manager),
    contextlib.closing(parts.worker),
    open_workdir(workdir) as folder,
    claim(folder, own, display.say) as claimed,
  ):
    _check_folder(folder, {"batches": batches, **parts.provenance})
    claimed.record_config()
    if not is_remote(folder):
      parts.reward_manager.grader.use_cache(folder)
    params = base_model(sampled, parts.worker, folder, display, stopping, parts.teacher)
    if params is None:
      raise Stopped("during the warm start, which the next probe starts over")
    frozen = load_frozen(sampled, parts.worker, folder, {}, params)
    measure = _Measurement(sampled, parts, params, frozen, folder / FOLDER, display)
    numbers = range(batches + reference)
    with display.counting("probe", len(numbers)) as count:
      for number in numbers:
        measure(number, compared if number < batches else {_REFERENCE: Arm(REFERENCE)}, stopping)
        count(number + 1)
    result = measure.result(list(compared), batches, reference)
    write_atomically(folder / "probe.json", (json.dumps(result, indent=2) + "\n").encode())
  return result


def _check_folder(folder: epath.Path, now: Mapping[str, Any]) -> None:
  """Records values that a config does not have, or compares them with an earlier probe's."""
  file = folder / FOLDER / "settings.json"
  before = json.loads(file.read_text()) if file.exists() else now
  for name in sorted(before.keys() | now.keys()):
    if before.get(name) != now.get(name):
      raise UserError(
        f"{str(folder)!r} has a probe with {name} = {before.get(name)!r}, this one has "
        f"{now.get(name)!r}; use another workdir"
      )
  file.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(file, json.dumps(now, indent=2).encode())


class _Measurement:
  """Measures arms on batches, and keeps what it has measured in a folder."""

  def __init__(
    self,
    config: Config,
    parts: Parts,
    params: Params,
    frozen: FrozenPolicies,
    folder: epath.Path,
    display: Display,
  ):
    self._config = config
    self._display = display
    self._parts = parts
    self._params = params
    self._frozen = frozen
    self._folder = folder
    self._gradients: Gradients = make_gradients(config, parts.worker.model, params)

  def __call__(self, number: int, arms: Mapping[str, Arm], stopping: Callable[[], bool]) -> None:
    """Measures the arms on batch `number`, unless that is done. Each batch has its own problems."""
    stored = self._read(number)
    missing = {name: arm for name, arm in arms.items() if f"{name}/vector" not in stored}
    if not missing:
      return
    config = self._config
    parts = self._parts
    worker = parts.worker
    collector = Collector(
      config, worker, parts.reward_manager, parts.problems, self._frozen, steps=number
    )
    batch = collector.collect(self._params, 0, self._display.say, stopping)
    if any("score_norms" in arm.algorithm.recipe.needs for arm in missing.values()):
      chunk = config.batch.head_chunk
      norms = make_scorer(
        worker.model, config.sampling.temperature, config.batch.parts, chunk, True, True
      )
      rollouts = batch.rollouts.replace(score_norms=norms(self._params, batch.rollouts))
      batch = dataclasses.replace(batch, rollouts=rollouts)
    rollouts = batch.rollouts
    signals = batch_signals(batch)
    seed = (config.seed, number)
    losses = {}
    for name, arm in missing.items():
      own = signals
      if part := arm.algorithm.recipe.continuations:
        own = signals.replace(value_gains=self._gains(part, batch, stopping))
      losses[name] = arm.derivative(config, own, rollouts, seed)
    if config.log.continuations and _REFERENCE not in missing:
      segments = segment_truth(config, batch, worker, parts.reward_manager, self._params, stopping)
      for name, (by_log_probs, _) in losses.items():
        found = segment_metrics(segments, -by_log_probs[segments.group])
        stored[f"{name}/mc_rank"] = np.asarray(found["truth/mc_rank"])
    for name, vector in gradients_of(self._gradients, rollouts, losses).items():
      carries = (losses[name][0] != 0) & signals.mask
      stored[f"{name}/vector"] = vector
      stored[f"{name}/shares"] = np.array(
        [carries.any((1, 2)).mean(), carries.sum() / max(signals.mask.sum(), 1)]
      )
    stored["accuracy"] = np.asarray(signals.correct.mean())
    packed = io.BytesIO()
    np.savez(packed, **stored)
    write_atomically(self._file(number), packed.getvalue())

  def _gains(
    self, part: LineContinuations, batch: Batch, stopping: Callable[[], bool]
  ) -> np.ndarray:
    """Returns what a run would measure with continuations, f32[n, g, t]; see `Rewards`."""
    config = self._config
    worker = self._parts.worker
    if worker.episodes:
      raise UserError("episodes cannot be continued; leave out arms such as vineppo")
    policy = worker.policy(self._params)
    keys = group_keys(config, policy.engine, KeyStream.CONTINUE, batch.groups, config.batch.group)
    manager = self._parts.reward_manager
    estimator = ValueEstimator(worker, manager, policy, config.sampling_params, stopping)
    return estimator.gains(part, batch.groups, keys, config.sampling.max_tokens)[0]

  def result(self, arms: Sequence[str], batches: int, reference: int) -> dict[str, Any]:
    """Returns what `probe` does."""
    true = Moments()
    accuracies = []
    for number in range(batches, batches + reference):
      stored = self._read(number)
      true.add(stored[f"{_REFERENCE}/vector"])
      accuracies.append(float(stored["accuracy"]))
    found = {}
    for name in arms:
      own = [self._read(number, f"{name}/") for number in range(batches)]
      vectors, shares = (
        np.stack([x[f"{name}/{key}"] for x in own]) for key in ("vector", "shares")
      )
      found[name] = result_of_arm(vectors, true, shares)
      ranks = [float(x.get(f"{name}/mc_rank", math.nan)) for x in own]
      ranks = [x for x in ranks if not math.isnan(x)]
      if len(ranks) > 1:
        found[name]["mc_rank"] = mean_interval(ranks)
    compare(found, SHUFFLED)
    size = len(true.mean)
    return _plain(
      {
        "verdict": verdict(found, batches),
        "batches": batches,
        "reference": reference,
        "accuracy": float(np.mean(accuracies)),
        "reference_noise": true.noise() / reference,
        "sketch_error": math.sqrt(2 / SKETCH) if size == SKETCH else 0.0,
        "arms": found,
      }
    )

  def _file(self, number: int) -> epath.Path:
    return self._folder / f"{number:04}.npz"

  def _read(self, number: int, prefix: str = "") -> dict[str, np.ndarray]:
    """Returns what is known of a batch, under names with a prefix."""
    if not self._file(number).exists():
      return {}
    with np.load(io.BytesIO(self._file(number).read_bytes())) as stored:
      return {name: stored[name] for name in stored.files if name.startswith(prefix)}


def _plain(x: Any) -> Any:
  """Returns data for JSON, with None for numbers that are not finite."""
  if isinstance(x, Mapping):
    return {key: _plain(value) for key, value in x.items()}
  if isinstance(x, list | tuple):
    return [_plain(value) for value in x]
  if isinstance(x, float):
    return float(x) if math.isfinite(x) else None
  return x
