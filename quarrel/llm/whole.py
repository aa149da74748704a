"""Whether a file has all that its model wants, told by its keys: before hours are spent on it."""

from __future__ import annotations

from contextlib import suppress

from quarrel.errors import ModelError, UnsupportedModel
from quarrel.gguf import GGUFFile
from quarrel.models import Tensors, assemble, read_spec


def check_whole(file: GGUFFile) -> None:
    """Raises ModelError, with the file's name, where a tensor is missing or has another shape; a model that other programs
    run and this one does not is not looked at."""
    with suppress(UnsupportedModel):
        try:
            assemble(read_spec(file), Tensors(file))
        except UnsupportedModel:
            raise
        except ModelError as error:
            raise type(error)(f"{file.paths[0]}: {error}") from None
