"""Completions of several conversations: each is scored as if it were a completion of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scores import jitted_score
from update_cases import CONFIG

from gtpo_jax.models import Transformer, init_params
from gtpo_jax.models.attention.flash import attend_in_blocks
from gtpo_jax.models.attention.kernels import attend_with_cudnn
from gtpo_jax.models.attention.sources import KV, AttentionContext
from gtpo_jax.models.transformer import _ranges
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.sampling.prefill.batches import pad_prompts
from gtpo_jax.training.packing import abstract_packing, plan_rows, row_shapes

LENGTHS = np.asarray([[12, 7, 3, 0], [12, 12, 1, 5]])  # of completions of at most 12 tokens
BEGINS = np.asarray(
  [[[0, 4, 9], [0, 2, 12], [0, 12, 12], [12, 12, 12]], [[0, 6, 12], [0, 1, 2]] + [[0, 12, 12]] * 2]
).astype(np.int32)


def test_segments_by_hand():
  packing = plan_rows(LENGTHS, 12, begins=BEGINS)
  assert packing.source.shape == (2, 3, 12)
  none = 4 * 3  # at most four completions of three conversations share a row
  assert packing.segment[0].tolist() == [
    [0] * 4 + [1] * 5 + [2] * 3,
    [0] * 2 + [1] * 5 + [none] * 5,
    [0] * 3 + [none] * 9,
  ]
  assert packing.segment[1, 2].tolist() == [0] * 5 + [3] + [none] * 6
  alone = plan_rows(LENGTHS, 12, begins=BEGINS, share=False)
  assert alone.source.shape == (2, 4, 12) and alone.segment[1, 1].tolist() == [0, 1] + [2] * 10
  assert alone.segment[0, 2].tolist() == [0] * 3 + [3] * 9


def test_what_is_warmed_up_has_the_shapes_of_what_is_planned():
  like = lambda x: jax.ShapeDtypeStruct(x.shape, np.int32)
  abstract = {
    shape: abstract_packing(2, 4, 12, *shape, like(BEGINS)) for shape in row_shapes(4, 12)
  }
  for lengths in (LENGTHS, np.full((2, 4), 12), np.ones((2, 4), int)):
    packing = plan_rows(lengths, 12, begins=BEGINS)
    expected = abstract[packing.source.shape[1:]]
    assert jax.tree.map(like, packing) == jax.tree.map(like, expected)


@pytest.mark.parametrize("attention", ["", pytest.param("splash", marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [True, False])
def test_log_probs_are_those_of_conversations_by_themselves(attention, share):
  model = Transformer(dataclasses.replace(CONFIG, attention=attention), single_device_mesh())
  params = init_params(model, jax.random.key(0))
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 48, (2, 4, 12)).astype(np.int32)
  prompts = pad_prompts([[7, 8, 9], [5]], 4, 0)
  packing = plan_rows(LENGTHS, 12, begins=BEGINS, share=share)
  log_probs = lambda tokens, packing: np.asarray(
    jitted_score(model, params, prompts, tokens, 1.0, 0, packing)[0]
  )
  found = log_probs(tokens, packing)
  ends = np.minimum(np.append(BEGINS[..., 1:], np.full((2, 4, 1), 12), -1), LENGTHS[..., None])
  for c in range(3):  # conversation c of every completion, moved to the start of its row
    moved = np.zeros_like(tokens)
    for i, j in np.ndindex(2, 4):
      begin, end = BEGINS[i, j, c], ends[i, j, c]
      moved[i, j, : max(end - begin, 0)] = tokens[i, j, begin:end]
    expected = log_probs(moved, None)
    for i, j in np.ndindex(2, 4):
      begin, end = BEGINS[i, j, c], max(ends[i, j, c], BEGINS[i, j, c])
      np.testing.assert_allclose(
        found[i, j, begin:end], expected[i, j, : end - begin], atol=1e-5, err_msg=str((i, j, c))
      )


@pytest.mark.parametrize("share", [True, False])
def test_rows_of_the_kernel_for_gpus_are_conversations(share):
  """The kernel that takes a row per sequence attends like the one that compares segments."""
  packing = plan_rows(LENGTHS, 12, begins=BEGINS, share=share)
  n, w, s = packing.source.shape
  rng = np.random.default_rng(1)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  own = KV(array(n, w, 2, 8, s), array(n, w, 2, s, 8))
  prompt = KV(array(n, 1, 2, 8, 4), array(n, 1, 2, 4, 8))
  mask = jnp.asarray([[[False, True, True, False]], [[False] * 4]])
  mask = jnp.repeat(mask, int(packing.segment.max()), axis=1)
  ranges = _ranges(packing, 12)
  context = AttentionContext(own, None, prompt, mask, jnp.asarray(packing.segment), ranges)
  q = array(n, w, 4, s, 8)
  expected = attend_in_blocks(q, context)
  found = attend_with_cudnn(q, context, implementation="xla")
  real = np.broadcast_to((packing.source >= 0)[:, :, None, :, None], q.shape)
  np.testing.assert_allclose(np.asarray(found)[real], np.asarray(expected)[real], atol=1e-5)
