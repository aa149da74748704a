"""What users and the model say, in TOML files: lists of wordings by name, one of which is drawn."""

from __future__ import annotations

import tomllib
from pathlib import Path


def wordings(topic: str) -> dict[str, tuple[str, ...]]:
    """The lists of `topic`.toml: {fields} are filled in, of [a|b] one is drawn."""
    text = Path(__file__).with_name(f"{topic}.toml").read_text(encoding="utf-8")
    return {name: tuple(rows) for name, rows in tomllib.loads(text).items()}
