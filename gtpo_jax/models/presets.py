"""The Qwen2.5 family by name, and the tiny model of the built-in arithmetic task."""

from __future__ import annotations

from gtpo_jax.models.config import ModelConfig


def _qwen(
  width: int,
  layers: int,
  heads: int,
  kv_heads: int,
  mlp: int,
  vocab_size: int = 152064,
  tied: bool = False,
  norm_eps: float = 1e-6,
) -> ModelConfig:
  return ModelConfig(
    vocab_size, width, layers, heads, kv_heads, head_dim=128, mlp=mlp, tied=tied, norm_eps=norm_eps
  )


PRESETS: dict[str, ModelConfig] = {
  "tiny": ModelConfig(
    vocab_size=384, width=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp=352
  ),
  "qwen2.5-0.5b": ModelConfig(
    vocab_size=151936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp=4864
  ),
  "qwen2.5-1.5b": _qwen(1536, 28, 12, 2, 8960, vocab_size=151936, tied=True),
  "qwen2.5-3b": _qwen(2048, 36, 16, 2, 11008, vocab_size=151936, tied=True),
  "qwen2.5-7b": _qwen(3584, 28, 28, 4, 18944),
  "qwen2.5-14b": _qwen(5120, 48, 40, 8, 13824, norm_eps=1e-5),
  "qwen2.5-32b": _qwen(5120, 64, 40, 8, 27648, norm_eps=1e-5),
  "qwen2.5-72b": _qwen(8192, 80, 64, 8, 29568, norm_eps=1e-5),
}
