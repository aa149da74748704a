"""The border to the native tokenizer libraries: what may cross it, and what becomes of their failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quarrel.errors import RequestError, TokenizerError


@contextmanager
def native(what: str, user: bool = False) -> Iterator[None]:
    """Turns a failure of a native library into one of ours: of the caller's text (`user`), else of the file.

    A Rust panic arrives as a BaseException of a class that cannot be imported.
    """
    error_type = RequestError if user else TokenizerError
    try:
        yield
    except Exception as error:
        raise error_type(f"{what}: {_first_line(error)}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise error_type(f"{what}: {_first_line(error)}") from None


def storable(text: str) -> bool:
    """Whether the libraries can hold this piece: not empty, no NUL, valid UTF-8."""
    return text != "" and "\0" not in text and is_text(text)


def is_text(text: str) -> bool:
    """Whether there are no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
