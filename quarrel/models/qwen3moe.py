"""qwen3moe: qwen3 with experts, softmax gate, weights renormalised."""

from __future__ import annotations

from quarrel.models.qwen2 import spec

__all__ = ["spec"]
