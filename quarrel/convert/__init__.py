"""Hugging Face folders as GGUF: read in place, or written to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quarrel.errors import RequestError
from quarrel.gguf import GGUFFile


def open_file(paths: Sequence[Path], mix: str | None = None) -> GGUFFile:
    """A model's files as `gguf.resolve` finds them: GGUF, or a folder in safetensors, whose weights `mix` makes smaller."""
    if len(paths) == 1 and paths[0].is_dir():
        from quarrel.convert.folder import FolderFile  # only here: most models are in GGUF

        return FolderFile(paths[0], mix)
    if mix is not None:
        message = (
            f"quantize={mix} is for models in safetensors, and {paths[0].name} is none: write a smaller file of it with"
        )
        raise RequestError(f"{message} `quarrel quantize`", "quantize")
    return GGUFFile.open(paths)
