"""gtpo_jax: reinforcement learning of language models with entropy-shaped credit, in JAX.

    import gtpo_jax
    config = gtpo_jax.default_config()
    result = gtpo_jax.train(config, reward=my_function, data=my_dicts)

Importing this package does not import JAX; using any of its names except `environments` and
`rewards` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` imports when it is used
  from gtpo_jax import algorithms, environments, models, rewards
  from gtpo_jax.cli.probing import probe
  from gtpo_jax.config import default_config, load_config
  from gtpo_jax.loop import steps, train

__version__ = "0.5.0"
__all__ = [
  "algorithms",
  "default_config",
  "environments",
  "load_config",
  "models",
  "probe",
  "rewards",
  "steps",
  "train",
]

_PACKAGES = ("algorithms", "environments", "models", "rewards")
_FUNCTIONS = {  # public name: (module, name in the module)
  "default_config": ("config", "default_config"),
  "load_config": ("config", "load_config"),
  "probe": ("cli.probing", "probe"),
  "steps": ("loop", "steps"),
  "train": ("loop", "train"),
}


def __getattr__(name: str) -> Any:
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from gtpo_jax.runtime.startup import choose_platform, prepare_jax

  if name in _PACKAGES:
    choose_platform()
    return importlib.import_module(f"{__name__}.{name}")

  prepare_jax()
  module, function = _FUNCTIONS[name]
  return getattr(importlib.import_module(f"{__name__}.{module}"), function)


def __dir__() -> list[str]:
  return sorted([*globals(), *__all__])
