"""The command line: what people type, and every error as one sentence."""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import TextIO

from quarrel.cli.config import Config, config_path
from quarrel.cli.flags import UsageError, in_flags
from quarrel.cli.parser import commands_of, make_parser, nearest, parse, unknown_command, unknown_option
from quarrel.cli.terminal import note
from quarrel.errors import ConfigError, QuarrelError

OK, FAILED, USAGE, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 for an error, 2 for a wrong command line, 130 after Ctrl-C, 141 for a closed pipe."""
    _tolerate_any_terminal()
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["llama-server"]:  # whose words are another program's
        from quarrel.launch.main import main as llama_server

        return llama_server(words[1:])
    if not words:
        make_parser().print_help(sys.stderr)
        return USAGE
    if sentence := unknown_command(words[0]):
        note(f"quarrel: {sentence}")
        return USAGE
    parser = make_parser(None if words[0].startswith("-") else words[0])
    if sentence := unknown_option(words[1:]):
        note(f"quarrel {words[0]}: {sentence} (see quarrel {words[0]} --help)")
        return USAGE
    try:
        args, unknown = parse(parser, words)
        if not unknown:
            args, unknown = _with_defaults(parser, words, args)
    except SystemExit as stop:  # argparse has printed its usage or its help
        return int(stop.code or 0)
    except (ConfigError, OSError) as error:
        note(f"quarrel: {error}" if isinstance(error, ConfigError) else f"quarrel: {error.filename}: {error.strerror}")
        return USAGE
    if unknown:
        near = nearest(unknown[0], args.flags)
        note(f"quarrel {args.command}: {unknown[0]!r} is not understood here{near} (see quarrel {args.command} --help)")
        return USAGE
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, args.flags)
            # A module called list would be a name of this one, in the place of the type.
            module = "listing" if args.command == "list" else args.command.replace("-", "_")
            command = importlib.import_module(f"quarrel.cli.{module}")
            gc.enable()
            status: int = command.run(args)
        sys.stdout.flush()
        return status
    except UsageError as error:
        note(f"quarrel {args.command}: {in_flags(error, args.flags)} (see quarrel {args.command} --help)")
        return USAGE
    except QuarrelError as error:
        note(f"quarrel: {in_flags(error, args.flags)}")
    except BrokenPipeError:
        return _leave_pipe()
    except KeyboardInterrupt:
        note("")
        return INTERRUPTED
    except MemoryError:
        note("quarrel: this machine has no memory left for it: use a smaller model or a smaller --ctx")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        full = " where the output goes: make some, and run it again" if error.errno == errno.ENOSPC and not where else ""
        note(f"quarrel: {where}{error.strerror or error}{full}")
    except RuntimeError as error:
        if not _is_no_home(error):
            raise
        note("quarrel: a path begins with ~ and the name of no user of this machine: write it out")
    return FAILED


def _is_no_home(error: RuntimeError) -> bool:
    """As pathlib says that ~NAME is nobody's."""
    return type(error) is RuntimeError and "home directory" in str(error)


def _with_defaults(
    parser: argparse.ArgumentParser, words: Sequence[str], args: argparse.Namespace
) -> tuple[argparse.Namespace, list[str]]:
    """The arguments with the defaults of a configuration file, where there is one. Raises ConfigError and OSError."""
    path = config_path(getattr(args, "config", None))
    if path is None:
        return args, []
    from quarrel.cli.prompt import named_model  # only here: it imports what finds models

    config = Config(path, commands_of(make_parser()))
    model = named_model(args)
    given = config.words(args.command, model or config.model or args.default_model)
    try:
        args, unknown = parse(parser, [words[0], *given, *words[1:]])
    except SystemExit:
        note(f"quarrel: options of {path} are read in front of those that are typed")
        raise
    args.default_model = config.model or args.default_model
    return args, unknown


def _show_warning(
    flags: Sequence[str],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning is a sentence for the user, like an error; where in the source it was raised is not."""
    note(f"quarrel: {message if isinstance(message, str) else in_flags(message, flags)}")


def _tolerate_any_terminal() -> None:
    """A character that the terminal's encoding lacks becomes a question mark, never an error; what is closed is silence."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _leave_pipe() -> int:
    """The reader (`| head`) has gone: what is still buffered must not fail once more when the interpreter exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CLOSED_PIPE
