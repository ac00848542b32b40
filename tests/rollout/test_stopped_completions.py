"""Stop strings in batches, evaluations and runs."""

import json

import jax
import numpy as np
import pytest
from experience_cases import (
  coins,  # noqa: F401
  collect,
  config_of,
  make_collector,
  random_worker,
)

import gtpo_jax
from gtpo_jax.data.chat import load_chat
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.logs.truth import completion_codes
from gtpo_jax.loop.evaluation.evaluate import evaluate_run, evaluation_settings
from gtpo_jax.rollout.frozen import FrozenPolicies
from gtpo_jax.rollout.problems import held_out_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError

STOP = ("e", "1", "an")
QUIET = Display(enabled=False)


def check_completion(chat, tokens, text, finished, length):
  """Checks a completion against the text of its tokens; returns whether a stop string ended it."""
  (whole,) = chat.decode([tokens])
  stopped = any(string in whole for string in STOP)
  starts = [whole.find(string) for string in STOP if string in whole]
  assert text == whole[: min(starts, default=len(whole))]
  (before,) = chat.decode([tokens[:-1]])
  assert not any(string in before for string in STOP)
  assert finished == (stopped or int(tokens[-1]) in chat.stop)
  assert length == len(tokens)
  return stopped


CASES = {
  "whole batches": {"name": "gtpo"},
  "partial rollouts": {
    "name": "gtpo",
    "sampling.staleness": 1,
    "sampling.slots": 5,
    "sampling.chunk": 3,
  },
  "a guide and dynamic sampling": {"name": "dapo_mixed"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.some(1, slow=1)
def test_batches(case):
  config = config_of(**CASES[case], **{"sampling.stop": STOP})
  worker, params = random_worker(config)
  guide = worker.policy(params) if config.policy_completions < config.batch.group else None
  collector, batches = collect(config, 3, FrozenPolicies(guide, None, {}, {}))
  stopped = []
  for batch in batches:
    rollouts, rewards = jax.device_get((batch.rollouts, batch.rewards))
    assert (rollouts.log_probs[rollouts.mask] < 0).all()
    for i, j in np.ndindex(rollouts.finished.shape):
      tokens = rollouts.tokens[i, j, rollouts.present[i, j]]
      text = batch.texts[i][j]
      finished = bool(rollouts.finished[i, j])
      stopped.append(check_completion(worker.chat, tokens, text, finished, rollouts.lengths[i, j]))
      assert rewards.correct[i, j] == (finished and len(text) % 2 == 0)  # of the text that was cut
  assert 0.2 < np.mean(stopped) < 0.98
  if leftovers := collector.leftovers():
    again = make_collector(config)
    again.restore(leftovers)
    texts = lambda collector: [group.texts for group in collector._kept]
    assert texts(again) == texts(collector) and leftovers["count"] > 0


def test_an_evaluation():
  config = config_of(**{"sampling.stop": STOP, "eval.samples": 4})
  worker, params = random_worker(config)
  problems = held_out_problems(config, worker)
  evaluation = evaluate_run(config, worker, RewardManager(config), params, problems)
  texts = [text for row in evaluation.sampled.texts for text in row]
  assert not any(string in text for text in texts for string in STOP)
  plain_config = config_of(**{"eval.samples": 4})
  plain_worker, _ = random_worker(plain_config)
  plain = evaluate_run(plain_config, plain_worker, RewardManager(plain_config), params, problems)
  uncut = [text for row in plain.sampled.texts for text in row]
  assert texts == [worker.stop_strings.cut(text) for text in uncut] != uncut
  assert evaluation.sampled.finished.mean() > plain.sampled.finished.mean()
  assert (evaluation.sampled.lengths <= plain.sampled.lengths).all()
  assert evaluation.settings["sampling.stop"] == list(STOP)
  assert plain.settings["sampling.stop"] == []
  settings = evaluation_settings(config)
  assert json.loads(json.dumps(settings)) == settings


@pytest.mark.slow
def test_a_run_from_python(tmp_path):
  """The reward function, the logs and the policy have the cut texts; a resume keeps the strings."""
  seen = []

  def reward(prompts, completions, answers, extras):
    seen.extend(completions)
    return [len(text) % 2 == 0 for text in completions]

  rows = [{"prompt": f"{a}+2:", "answer": str(a + 2)} for a in range(20)]
  config = {
    "steps": 1,
    "model": {"preset": "tiny"},
    "data": {"max_prompt_tokens": 20},
    "batch": {"prompts": 4, "group": 4},
    "sampling": {"max_tokens": 8, "stop": list(STOP)},
    "eval": {"problems": 2, "samples": 2, "batch": 2},
    "log": {"tensorboard": False},
  }
  run = lambda **changes: gtpo_jax.train(
    {**config, **changes}, tmp_path / "run", QUIET, reward=reward, data=rows
  )
  result = run()
  has_stop = lambda text: any(string in text for string in STOP)
  assert len(seen) == 4 * 4 + 2 * 2 * (2 + 1) and not any(map(has_stop, seen))
  samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
  assert samples and not any(has_stop(row["completion"]) for row in samples)
  for row in read_jsonl(tmp_path / "run" / "evaluations.jsonl"):
    assert row["settings"]["sampling.stop"] == list(STOP)
  assert not any(map(has_stop, result.policy.sample("1+2:", n=8)))
  assert run().step == 1  # the same strings as a list or as a tuple
  with pytest.raises(UserError, match=r"sampling.stop was \('e', '1', 'an'\), now \('e',\)"):
    run(sampling={"max_tokens": 8, "stop": ("e",)})


def test_the_truth_of_tokens_beside_a_cut_text():
  """A token on both sides of the cut has the marks of its part; those behind it are inert."""
  chat = load_chat()
  ids = np.asarray([*chat.encode_plain("8=8"), *chat.encode_plain("answer")])
  assert completion_codes(ids, "8=8", "dic", chat).tolist() == [4, 1, 3] + [1] * (len(ids) - 3)
  assert completion_codes(ids, "8=8a", "dicD", chat)[3] == 12
  assert not completion_codes(ids, "8=9", "dic", chat).any()


def test_strings_that_a_tokenizer_cannot_write(monkeypatch):
  config = config_of(**{"sampling.stop": ("\x00",)})
  monkeypatch.setattr("gtpo_jax.data.chat.Chat.encode_plain", lambda self, text: [])
  message = r"^sampling.stop has '\\x00', of which the tokenizer leaves an empty text; remove it$"
  with pytest.raises(UserError, match=message):
    RolloutWorker(config)


def test_bad_values_are_refused():
  values = ("Q:", ("",), ("a", 1), ("\ufffd",), ("\ud800",), tuple("abcdefghijklmnopq"), None, 3)
  for stop in values:
    with pytest.raises(UserError) as caught:
      gtpo_jax.train({"sampling": {"stop": stop}})
    message = str(caught.value)
    assert message.startswith("sampling.stop "), stop
    assert repr(stop) in message and "\n" not in message, stop
