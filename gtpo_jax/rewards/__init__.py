"""Verifiers: text in, verdict out. No JAX here."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gtpo_jax.rewards.arithmetic import countdown_correct, last_number_correct
from gtpo_jax.rewards.length import group_relative, soft_overlong

VERIFIERS: dict[str, Callable[[str, str, Mapping[str, Any]], bool]] = {
    "last_number": lambda completion, answer, extra: last_number_correct(completion, answer),
    "countdown": lambda completion, answer, extra: countdown_correct(completion, extra["numbers"], int(answer)),
}

__all__ = ["VERIFIERS", "countdown_correct", "group_relative", "last_number_correct", "soft_overlong"]
