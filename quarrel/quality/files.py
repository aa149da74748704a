"""Files that a person names: a wrong one is a sentence, before anything is measured."""

from __future__ import annotations

from pathlib import Path

from quarrel.errors import RequestError


def read_text(path: Path) -> str:
    """A text in UTF-8."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start})") from None


def check_folder(path: Path | None) -> None:
    """Raises where a file could not be written for want of a folder; None is no file."""
    if path is not None and not path.parent.is_dir():
        raise RequestError(f"{path} cannot be written: there is no folder {path.parent}")
