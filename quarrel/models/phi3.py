"""phi3 (Phi-3, Phi-4): fused qkv and gate/up tensors, rope on half-split pairs, optional longrope factors.

Like llama.cpp, `attention.sliding_window` is not applied.
"""

from __future__ import annotations

from quarrel.models.qwen2 import spec

__all__ = ["spec"]
