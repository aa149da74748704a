"""GGUF in, tokens out, in pure Python, at the speed of the memory bus."""

from __future__ import annotations

__version__ = "0.1.0"
