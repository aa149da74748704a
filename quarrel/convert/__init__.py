"""Hugging Face folders as GGUF: read in place, or written to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quarrel.errors import RequestError
from quarrel.gguf import GGUFFile


def open_file(paths: Sequence[Path], mix: str | None = None, *, mmproj: bool = False) -> GGUFFile:
    """A model's files as `gguf.resolve` finds them: GGUF, or a folder in safetensors, whose weights `mix` makes smaller.

    mmproj: of a folder what sees."""
    if len(paths) == 1 and paths[0].is_dir():
        from quarrel.convert.folder import FolderFile  # only here: most models are in GGUF

        return FolderFile(paths[0], mix, mmproj=mmproj)
    if mix is not None:
        message = (
            f"quantize={mix} is for models in safetensors, and {paths[0].name} is none: write a smaller file of it with"
        )
        raise RequestError(f"{message} `quarrel quantize`", "quantize")
    return GGUFFile.open(paths)


def seeing_folder(paths: Sequence[Path]) -> Path | None:
    """A model's folder in safetensors, if it holds what sees too."""
    if len(paths) != 1 or not paths[0].is_dir():
        return None
    from quarrel.convert.projectors import sees

    return paths[0] if sees(paths[0]) else None
