"""qwen3: llama with an RMS norm on every query and key head before rope, on half-split pairs."""

from __future__ import annotations

from quarrel.models.qwen2 import spec

__all__ = ["spec"]
