"""Tools and environments: what a model can call, and what answers it over several turns."""

from gtpo_jax.environments.adapters.gym import from_gym
from gtpo_jax.environments.adapters.methods import from_methods
from gtpo_jax.environments.adapters.openenv import from_openenv
from gtpo_jax.environments.code_tool import python_tool
from gtpo_jax.environments.turns import Episode, Result, Step, ToolCall, Turn

__all__ = [
  "Episode",
  "Result",
  "Step",
  "ToolCall",
  "Turn",
  "from_gym",
  "from_methods",
  "from_openenv",
  "python_tool",
]
