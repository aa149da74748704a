"""Which model and which text a command line means, in all the orders that people use."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quarrel.cli.flags import UsageError
from quarrel.cli.terminal import note
from quarrel.errors import QuarrelError, RequestError
from quarrel.gguf.resolve import BUNDLED
from quarrel.llm import find

MAX_BYTES = 64 << 20
SHOWN = 40


def model_of(args: argparse.Namespace) -> str:
    """The model of a command that takes no text: named once, as an argument or by --model."""
    if args.name is not None and args.model is not None:
        raise UsageError(f"two models are named, {args.name!r} and {args.model!r}; name one")
    name: str = args.name or args.model or args.default_model
    return name


def model_and_text(args: argparse.Namespace) -> tuple[str, str]:
    """The model's name and the text, from options, positional arguments, a file or stdin.

    `PROMPT`, `MODEL PROMPT`, `-m MODEL PROMPT`, `MODEL -p PROMPT` and `MODEL < file` all work. One positional argument is
    the prompt, unless the prompt is given otherwise or it is one word that names a model here.
    """
    words: list[str] = args.words
    given = args.prompt is not None or args.file is not None
    if args.prompt is not None and args.file is not None:
        raise UsageError("the text is given twice, by --prompt and by --file; give one of them")
    wanted = (args.model is None) + (not given)
    if len(words) > wanted:
        raise UsageError(f"too many arguments ({' '.join(map(repr, words))}); put the text in quotes")
    model, text = args.model, args.prompt
    if len(words) == 2:
        if _names_a_model(words[1]) and not _names_a_model(words[0]):
            raise UsageError(
                f"{_brief(words[0])} is no model and {words[1]!r} is one; the model comes first, then the text"
            )
        model, text = words
    elif words and (given or (model is None and _names_a_model(words[0]))):
        model = words[0]
    elif words:
        text = words[0]
    if text is None:
        text = _from_file(args.file) if args.file is not None else _from_stdin()
    read = as_unicode(text)
    if read != text:
        note("quarrel: the text is not all UTF-8: bytes that are not are read as U+FFFD")
    return model or args.default_model, read


def named_model(args: argparse.Namespace) -> str | None:
    """The model that a command line names; None where it names none, or several. Nothing is read for it."""
    listed = getattr(args, "model", None)
    many = [*(getattr(args, "names", None) or ()), *(listed if isinstance(listed, list) else [])]
    if many:
        return many[0] if len(many) == 1 else None
    if isinstance(listed, str) or listed is None:
        name: str | None = listed or getattr(args, "name", None)
        words: list[str] = getattr(args, "words", [])
        text_too = len(words) == 2 or (words and (args.prompt is not None or args.file is not None))
        if name is None and words and (text_too or _names_a_model(words[0])):
            return words[0]
        return name
    return None


def as_unicode(text: str) -> str:
    """Bytes of the command line or a file that were no valid text, as U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _names_a_model(word: str) -> bool:
    if any(c.isspace() for c in word):
        return False
    if word in BUNDLED or word.startswith("hf://") or word.endswith(".gguf"):
        return True
    try:
        find(word)
    except QuarrelError:
        return False
    return True


def _brief(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")


def _from_file(name: str) -> str:
    if name == "-":
        return _from_stdin()
    path = Path(name).expanduser()
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise RequestError(f"{path} holds more than {MAX_BYTES >> 20} MiB, which no context takes; give a shorter text")
    return data.decode("utf-8", "surrogateescape")


def _from_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("there is no text: give it in quotes, with --file, or on standard input")
    text = sys.stdin.read(MAX_BYTES).removesuffix("\n")
    if not text:
        raise UsageError("there is no text: standard input is empty")
    return text
