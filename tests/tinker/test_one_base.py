"""A server whose policies are adapters beside the one base that is trained on."""

import jax
import numpy as np
import pytest
from live import CLIENT_WARNINGS, connected, need_client, options_for, running
from test_client import learn, sample, train

from gtpo_jax.models.lora import split_adapters
from gtpo_jax.tinker.saved_weights import Spec

tinker = need_client()
pytestmark = [pytest.mark.slow, CLIENT_WARNINGS]


def samples(client):
  return [(x.tokens, x.logprobs) for x in sample(client, 3, seed=1)]


def learn_and_sample(training):
  learn(training)
  return samples(training.save_weights_and_get_sampling_client())


def addresses(tree):
  return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size > 64}


def test_adapters_beside_one_base_learn_and_sample_as_merged_ones(model, tmp_path):
  merged, paths = {}, {}
  with (
    running(options_for(model, tmp_path, merge_adapters="always")) as (url, opened),
    connected(url) as service,
  ):
    assert not opened.base.worker.model.config.lora.rank
    merged[0] = samples(service.create_sampling_client(base_model="tiny"))
    for rank in (2, 4):
      training = train(service, rank=rank)
      learn(training, steps=2)
      paths[rank] = training.save_state("half").result().path
      merged[rank] = learn_and_sample(training)

  beside = {}
  options = options_for(model, tmp_path, merge_adapters="never", max_rank=4)
  with running(options) as (url, opened), connected(url) as service:
    base = opened.base
    assert addresses(base.params) <= addresses(base.layout(Spec("", 0)))
    assert split_adapters(base.params)[0] == {}
    beside[0] = samples(service.create_sampling_client(base_model="tiny"))
    for rank in (2, 4):
      training = train(service, rank=rank)
      training.load_state_with_optimizer(paths[rank]).result()
      beside[rank] = learn_and_sample(training)
      training = train(service, rank=rank)
      learn(training, steps=2)
      assert learn_and_sample(training) == beside[rank]
    with pytest.raises(tinker.APIError, match="rank 0 trains all weights, of which this server"):
      train(service, rank=0)
  for rank, expected in merged.items():
    for (tokens, log_probs), (own_tokens, own) in zip(expected, beside[rank], strict=True):
      assert tokens == own_tokens
      np.testing.assert_allclose(own, log_probs, rtol=1e-5, atol=1e-5)
