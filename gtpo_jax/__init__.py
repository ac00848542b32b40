"""gtpo_jax: reinforcement learning of language models with entropy-shaped credit, on TPU, GPU or CPU.

    import gtpo_jax
    config = gtpo_jax.default_config()
    result = gtpo_jax.train(config, reward=my_function, data=my_dicts)

Importing this imports no JAX; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["algorithms", "default_config", "load_config", "models", "rewards", "steps", "train"]

_LIBRARY = ("algorithms", "models", "rewards")
_PROGRAM = {
  "default_config": ("config", "default_config"),
  "load_config": ("config", "load"),
  "steps": ("loop", "steps"),
  "train": ("loop", "train"),
}


def __getattr__(name: str) -> Any:
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  if name in _LIBRARY:
    return importlib.import_module(f"{__name__}.{name}")
  from gtpo_jax.runtime.startup import prepare_jax

  prepare_jax()
  part, function = _PROGRAM[name]
  module = importlib.import_module(f"{__name__}.{part}")
  return getattr(module, function)


def __dir__() -> list[str]:
  return sorted([*globals(), *__all__])
