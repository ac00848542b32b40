"""Meshes that are proposed to a run that cannot be sharded over its own."""

import jax
import pytest

from gtpo_jax.config import freeze
from gtpo_jax.config.mesh_choice import proposing_mesh, working_mesh
from gtpo_jax.runtime.errors import UserError

pytestmark = pytest.mark.devices

TINY = {"data": {"terms": 2}, "sampling": {"max_tokens": 16}, "warm_start": {"steps": 0}}


def config(mesh, **sections):
  return freeze({**TINY, "mesh": mesh, **sections})


@pytest.mark.parametrize(
  ("mesh", "sections", "expected"),
  [  # in the order data, expert, fsdp, context, tensor, on eight devices; the model has four heads
    ({"data": 8}, {"batch": {"prompts": 8}}, None),
    ({"data": 8}, {"batch": {"prompts": 12}}, (4, 1, 1, 2, 1)),
    ({"data": 1, "fsdp": 8}, {"batch": {"prompts": 12}}, (1, 1, 4, 2, 1)),
    ({"data": 8}, {"batch": {"prompts": 16, "micro_batches": 8}}, None),  # it divides groups
    ({"data": 8}, {"batch": {"prompts": 16, "group": 8, "micro_batches": 32}}, (4, 1, 1, 2, 1)),
    ({"data": 1, "tensor": 8}, {"batch": {"prompts": 8}}, (2, 1, 1, 1, 4)),
    ({"data": 8}, {"batch": {"prompts": 3}, "sampling": {"max_tokens": 15}}, None),  # none works
    ({"data": 3}, {}, None),  # the message of the mesh itself proposes one
    (
      {"data": 8},
      {"batch": {"prompts": 8}, "warm_start": {"steps": 1, "batch": 4}},
      (4, 1, 1, 2, 1),
    ),
  ],
)
def test_the_most_similar_mesh_that_works(mesh, sections, expected):
  assert working_mesh(config(mesh, **sections), jax.devices()) == expected


def test_only_errors_of_the_mesh_get_a_proposal():
  does_not_fit = config({"data": 8}, batch={"prompts": 12})
  message = r"^no; a mesh that works: --config.mesh.data=4 .*mesh.fsdp=1 .*context=2 "
  with pytest.raises(UserError, match=message), proposing_mesh(does_not_fit):
    raise UserError("no")
  with pytest.raises(UserError, match=r"^no$"), proposing_mesh(config({"data": 8})):
    raise UserError("no")
