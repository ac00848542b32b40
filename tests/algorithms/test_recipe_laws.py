"""What must hold of every recipe, whatever the data."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recipe_cases import (
  COMPARISONS,
  CONTRAST,
  CORRECTIONS,
  NAMES,
  SEQUENCE_LEVEL,
  TOKEN_LEVEL,
  arrays,
  random_batch,
  random_policies,
  step,
  strong,
)
from slow_reference import kept_groups

from gtpo_jax.algorithms import make


def policies_of(batch, seed=0):
  return random_policies(seed, batch["mask"])


def run(algorithm, batch, policies):
  return jax.tree.map(np.asarray, step(algorithm, arrays(batch), arrays(policies)))


def rows(tree, keep):
  return jax.tree.map(lambda x: x[keep], tree)


def assert_same(got, expected, exactly=False):
  """Two results of `step`."""
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for path, value in jax.tree_util.tree_leaves_with_path(got):
    other = dict(jax.tree_util.tree_leaves_with_path(expected))[path]
    if exactly:
      np.testing.assert_array_equal(value, other, err_msg=str(path))
    elif "residual" not in str(path):  # which is rounding itself
      np.testing.assert_allclose(value, other, rtol=1e-5, atol=2e-6, err_msg=str(path))


# --- groups without contrast ---

OPTIONS = [
  (name, {"compare": c, "scope": s, "norm_scope": z})
  for name in TOKEN_LEVEL
  for c, s in COMPARISONS
  for z in ("batch", "group")
]
OPTIONS += [
  (name, {"scope": s, "norm_scope": z})
  for name in SEQUENCE_LEVEL
  for s in ("group", "batch")
  for z in ("batch", "group")
]
OPTIONS += [(name, {}) for name in CONTRAST if name not in TOKEN_LEVEL + SEQUENCE_LEVEL]


@pytest.mark.parametrize(
  ("name", "options"), OPTIONS, ids=lambda x: x if isinstance(x, str) else "-".join(x.values())
)
def test_groups_without_contrast_have_no_part_in_the_advantages(name, options):
  algorithm = strong(name, **options)
  batch = random_batch(3, name)
  keep = kept_groups(name, batch)
  gone = np.setdiff1d(np.arange(len(batch["correct"])), keep)
  assert len(gone) >= 2 and len(keep) >= 3
  advantages = np.asarray(algorithm.advantages(**arrays(batch)))
  np.testing.assert_allclose(
    advantages[keep], algorithm.advantages(**arrays(rows(batch, keep))), rtol=1e-6, atol=1e-6
  )
  assert not advantages[gone].any()


@pytest.mark.parametrize("name", CONTRAST)
def test_groups_without_contrast_are_as_if_absent(name):
  """From the loss, its gradient and every metric too."""
  algorithm = strong(name, **CORRECTIONS)
  batch = random_batch(4, name)
  keep = kept_groups(name, batch)
  policies = policies_of(batch)
  whole = run(algorithm, batch, policies)
  part = run(algorithm, rows(batch, keep), rows(policies, keep))
  gone = np.setdiff1d(np.arange(len(batch["correct"])), keep)
  for per_token in ("advantages", "mask", "weights", "grad"):
    assert not whole[per_token][gone].any()
    whole[per_token] = whole[per_token][keep]
  assert_same(whole, part)
  assert np.abs(whole["grad"]).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_only_these_recipes_learn_from_groups_without_contrast(name):
  """Their penalties can differ where their rewards do not."""
  batch = random_batch(5, name)
  advantages = np.asarray(make(name).advantages(**arrays(batch)))
  assert advantages[:2].any() == (name not in CONTRAST)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verdict", [True, False])
def test_a_batch_without_any_contrast_teaches_nothing(name, verdict):
  batch = random_batch(4, name)
  same = {
    "correct": np.full_like(batch["correct"], verdict),
    "reward": np.full_like(batch["reward"], 0.3),
    "penalty": np.zeros_like(batch["penalty"]),
  }
  got = run(make(name), batch | same, policies_of(batch))
  assert got["loss"] == 0 and not got["grad"].any() and not got["advantages"].any()


# --- what padding, order and the unit of entropy must not do ---


@pytest.mark.parametrize("name", NAMES)
def test_padding_has_no_effect(name):
  algorithm = strong(name, **CORRECTIONS)
  batch = random_batch(9, name)
  policies = policies_of(batch)
  clean = run(algorithm, batch, policies)
  assert np.abs(clean["grad"]).max() > 1e-3
  for garbage in (np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0):
    fill = lambda x, garbage=garbage: np.where(batch["mask"], x, np.float32(garbage))
    assert_same(
      run(algorithm, batch | {"entropy": fill(batch["entropy"])}, jax.tree.map(fill, policies)),
      clean,
      exactly=True,
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_of_a_completion_that_does_not_count_has_no_effect(name):
  algorithm = strong(name)
  batch = random_batch(9, name)
  absent = ~batch["mask"].any(-1)
  assert absent.sum() == 1
  clean = run(algorithm, batch, policies_of(batch))
  for garbage in (np.nan, 1e30):
    said = {key: np.where(absent, np.float32(garbage), batch[key]) for key in ("reward", "penalty")}
    assert_same(
      run(algorithm, batch | said | {"correct": batch["correct"] ^ absent}, policies_of(batch)),
      clean,
      exactly=True,
    )


@pytest.mark.parametrize("name", NAMES)
def test_advantages_in_the_padding_have_no_effect(name):
  batch = arrays(random_batch(10, name))
  policies = arrays(policies_of(random_batch(10, name)))
  mask = batch["mask"]
  advantages = jnp.sin(jnp.arange(mask.size, dtype=jnp.float32)).reshape(mask.shape)
  loss = lambda logp, advantages: make(name, **CORRECTIONS).loss(
    **policies | {"logp": logp},
    advantages=advantages,
    mask=mask,
    weights=mask / 9,
    guided=batch.get("guided"),
  )
  learn = jax.jit(jax.value_and_grad(loss, has_aux=True))
  clean = learn(policies["logp"], advantages)
  assert float(clean[0][0]) != 0
  for garbage in (np.nan, np.inf, 1e30):
    assert_same(learn(policies["logp"], jnp.where(mask, advantages, garbage)), clean, exactly=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_prompts_and_completions_has_no_effect(name):
  algorithm = strong(name, **CORRECTIONS)
  batch = random_batch(11, name)
  policies = policies_of(batch)
  rng = np.random.default_rng(11)
  prompts = rng.permutation(len(batch["mask"]))
  completions = rng.permuted(np.tile(np.arange(batch["mask"].shape[1]), (len(prompts), 1)), axis=1)
  shuffled = lambda tree: jax.tree.map(
    lambda x: x[prompts[:, None], completions] if x.ndim else x, tree
  )
  assert_same(
    run(algorithm, shuffled(batch), shuffled(policies)), shuffled(run(algorithm, batch, policies))
  )


SCALES = (0.5, 3.0, 1 / np.log(2))  # the last: nats to bits


@pytest.mark.parametrize("name", NAMES)
def test_the_unit_of_entropy_has_no_effect(name):
  """H counts relative to other H, and 1/H to other 1/H as long as none is at the floor."""
  batch = random_batch(12, name)
  batch["entropy"] = np.maximum(batch["entropy"], 0.05)
  for mean in ("arithmetic", "geometric") if name in SEQUENCE_LEVEL else (None,):
    algorithm = strong(name, **({"mean": mean} if mean else {}))
    expected = algorithm.advantages(**arrays(batch))
    for scale in SCALES:
      scaled = batch | {"entropy": np.float32(scale) * batch["entropy"]}
      np.testing.assert_allclose(
        algorithm.advantages(**arrays(scaled)), expected, rtol=1e-5, atol=5e-6
      )
      np.testing.assert_array_equal(
        algorithm.loss_mask(**arrays(scaled)), algorithm.loss_mask(**arrays(batch))
      )


@pytest.mark.parametrize("name", ["gtpo_v1", "gtpo_v1_clipped", "grpo_s_v1", "dapo_forking"])
def test_shares_of_h_know_no_floor(name):
  batch = random_batch(13, name)  # some entropies are 0
  algorithm = strong(name)
  expected = algorithm.advantages(**arrays(batch))
  for scale in (*SCALES, 1e-6):
    scaled = batch | {"entropy": np.float32(scale) * batch["entropy"]}
    np.testing.assert_allclose(
      algorithm.advantages(**arrays(scaled)), expected, rtol=1e-5, atol=5e-6
    )


@pytest.mark.parametrize(
  ("name", "each"), [("gtpo", -1.2), ("gtpo_v2", -1.0), ("grpo_s", -1.2), ("grpo_s_v2", -1.0)]
)
def test_the_floor_is_a_number_of_nats(name, each):
  """Below it every wrong unit is charged alike, above it by its share."""
  batch = random_batch(14) | {"penalty": np.zeros((7, 5), np.float32)}
  low = batch | {"entropy": np.minimum(batch["entropy"], 0.4)}

  def charges(floor):
    shaped, x = strong(name, h_floor=floor).shaped(**arrays(low))
    return np.asarray(shaped.minus)[np.asarray(x.mask & ~x.correct)]

  np.testing.assert_allclose(charges(0.4), each, rtol=1e-5)
  assert np.ptp(charges(0.1)) > 0.1


# --- what the settings do ---


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_both_weights_matter(name):
  base, bonus = {"gtpo": ("alpha1", "alpha2"), "grpo_s": ("beta1", "beta2")}[name]
  x = arrays(random_batch(5) | {"penalty": None})
  advantages = lambda a, b: np.asarray(make(name, **{base: a, bonus: b}).advantages(**x))
  assert np.abs(advantages(1.0, 0.0) - advantages(1.0, 0.5)).max() > 0.1
  assert np.abs(advantages(0.5, 0.5) - advantages(1.0, 0.5)).max() > 0.1
  np.testing.assert_allclose(
    advantages(2.0, 1.0), advantages(1.0, 0.5), rtol=1e-5, atol=1e-6
  )  # z-scores do not see a common factor


@pytest.mark.parametrize("name", ["gtpo", "gtpo_v2", "grpo_s", "grpo_s_v2"])
def test_more_entropy_earns_the_right_more_and_costs_the_wrong_less(name):
  mask = jnp.ones((1, 4, 1), bool)
  correct = jnp.asarray([[True, True, False, False]])
  x = {
    "entropy": jnp.asarray([[[0.2], [1.5], [0.2], [1.5]]]),
    "mask": mask,
    "correct": correct,
    "reward": jnp.zeros((1, 4)),
  }
  sure, unsure, sure_wrong, unsure_wrong = make(name).advantages(**x).ravel().tolist()
  assert unsure > sure > 0 > sure_wrong and unsure_wrong > sure_wrong


@pytest.mark.parametrize("name", ["gtpo", "grpo_s", "gtpo_v1", "grpo_s_v2"])
def test_sign_guard_holds_the_signs_and_leaves_the_rest(name):
  rng = np.random.default_rng(7)
  correct = np.ones((2, 16), bool)
  correct[:, 0] = False  # 15 of 16 right: without the guard many right ones get less than 0
  x = arrays(
    {
      "entropy": rng.gamma(0.5, 1.0, (2, 16, 8)).astype(np.float32),
      "mask": np.ones((2, 16, 8), bool),
      "correct": correct,
      "reward": correct.astype(np.float32),
    }
  )
  bonus = {"gtpo": "alpha2", "grpo_s": "beta2", "gtpo_v1": "alpha", "grpo_s_v2": "beta"}[name]
  free, guarded = (
    np.asarray(make(name, sign_guard=guard, **{bonus: 1.0}).advantages(**x))
    for guard in (False, True)
  )
  flipped = (free < 0) & correct[..., None]
  assert flipped.mean() > 0.1
  np.testing.assert_array_equal(guarded, np.where(flipped, 0, free))


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "dr_grpo"])
def test_a_spread_of_rewards_below_1e_6_is_no_signal(name):
  mask = jnp.ones((1, 2, 3), bool)
  correct = jnp.asarray([[True, False]])
  advantages = lambda spread: make(name).advantages(
    entropy=jnp.zeros(mask.shape),
    mask=mask,
    correct=correct,
    reward=jnp.asarray([[spread, -spread]]),
  )
  if name == "dr_grpo":  # there is no std to divide by
    np.testing.assert_allclose(advantages(5e-7), [[[5e-7] * 3, [-5e-7] * 3]], rtol=1e-5)
    return
  assert not advantages(5e-7).any()
  np.testing.assert_allclose(advantages(5e-6), [[[1.0] * 3, [-1.0] * 3]], rtol=1e-5)


# --- compiled, and in parts ---


@pytest.mark.parametrize("name", NAMES)
def test_compiled_equals_not_compiled(name):
  algorithm = strong(name, **CORRECTIONS)
  batch = random_batch(11, name)
  with jax.disable_jit():
    plain = run(algorithm, batch, policies_of(batch))
  assert_same(run(algorithm, batch, policies_of(batch)), plain)


def test_equal_algorithms_are_one_static_argument():
  traces = []
  probe = jax.jit(lambda algorithm, x: traces.append(algorithm) or x, static_argnums=0)
  for algorithm in (make("gtpo"), make("gtpo"), make("gtpo", alpha2=0.2)):
    probe(algorithm, 1.0)
  assert len(traces) == 2


@pytest.mark.parametrize("average", ["token", "completion", "group", "constant"])
@pytest.mark.parametrize("name", NAMES)
def test_token_weights_are_of_what_is_learned_from(name, average):
  algorithm = make(name, average=average)
  batch = arrays(random_batch(12, name))
  mask = algorithm.loss_mask(**batch)
  guided = batch.get("guided")
  weights = np.asarray(algorithm.token_weights(mask, batch["correct"], guided), np.float64)
  parts = 1 if guided is None else 1.5  # the groups that the guide rescued weigh lambda_zero
  if average != "constant":
    np.testing.assert_allclose(weights.sum(), parts, rtol=1e-6)
  assert not weights[~np.asarray(mask)].any() and (weights[np.asarray(mask)] > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_of_the_parts_add_up_to_the_whole(name):
  algorithm = strong(name, **CORRECTIONS)
  batch = random_batch(13, name)
  policies = policies_of(batch)
  whole = run(algorithm, batch, policies)

  def part_loss(logp, part):
    policies, guided, advantages, mask, weights = part
    return algorithm.loss(
      **policies | {"logp": logp}, guided=guided, advantages=advantages, mask=mask, weights=weights
    )[0]

  everything = (policies, batch.get("guided"), whole["advantages"], whole["mask"], whole["weights"])
  learn = jax.jit(jax.value_and_grad(part_loss))
  loss = 0.0
  grad = np.zeros_like(whole["grad"])
  for i in range(len(batch["mask"])):  # one prompt at a time
    part = arrays(rows(everything, slice(i, i + 1)))
    value, grad[i : i + 1] = learn(part[0]["logp"], part)
    loss += float(value)
  np.testing.assert_allclose(loss, whole["loss"], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(grad, whole["grad"], rtol=1e-6, atol=1e-8)
  assert np.abs(grad).max() > 1e-3


def test_the_comparisons_and_the_norm_scopes_all_differ():
  """Else a test that runs over them would prove little."""
  x = arrays(random_batch(14))
  differing = [
    pair for pair in COMPARISONS if pair != ("sequence", "batch")
  ]  # which is ("sequence", "group")
  results = [
    np.asarray(strong("gtpo", compare=compare, scope=scope, norm_scope=norm_scope).advantages(**x))
    for compare, scope in differing
    for norm_scope in ("group", "batch")
  ]
  assert all(np.abs(a - b).max() > 1e-2 for a, b in itertools.combinations(results, 2))
