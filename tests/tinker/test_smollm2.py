"""A pretrained model: log-probs as those of Transformers."""

import os
from pathlib import Path

import numpy as np
import pytest
from live import CLIENT_WARNINGS, connected, need_client, options_for, running, supervised

tinker = need_client()
types = tinker.types
pytestmark = [pytest.mark.slow, CLIENT_WARNINGS]
TEXT = "The tide rises when the moon pulls the sea, and falls again about six hours later."


def test_log_probs_are_those_of_transformers(tmp_path):
  if "GTPO_SMOLLM2" not in os.environ:
    pytest.skip("set GTPO_SMOLLM2 to the folder of SmolLM2-135M-Instruct")
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  folder = Path(os.environ["GTPO_SMOLLM2"])
  tokens = transformers.AutoTokenizer.from_pretrained(folder).encode(TEXT)
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  with torch.no_grad():
    logits = model(torch.tensor([tokens])).logits[0, :-1]
  every = torch.log_softmax(logits, -1)
  expected = every[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()
  options = options_for(folder, tmp_path / "workdir", name="smollm2")
  with running(options) as (url, _), connected(url) as service:
    client = service.create_sampling_client(base_model="smollm2").result()
    found = client.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(found[1:], expected, atol=1e-4)
    training = service.create_lora_training_client("smollm2", rank=8).result()
    datum = supervised(tinker, tokens, np.ones(len(tokens) - 1))
    result = training.forward([datum], "cross_entropy").result()
    np.testing.assert_allclose(result.loss_fn_outputs[0]["logprobs"].data, expected, atol=1e-4)
