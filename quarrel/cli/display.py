"""How an answer looks while it comes: as it is written, or as Markdown; and how far its prompt has been read."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from quarrel.cli.terminal import line, visible, write
from quarrel.engine import Chunk, Stream

PATIENCE = 0.5
"""Seconds that a prompt may take before a line says how far it has been read."""


class Display(Protocol):
    """What shows an answer."""

    def show(self, stream: Stream) -> None:
        """Reads the stream to its end."""


class Plain:
    """The text as the model writes it; a file or a pipe gets its control characters too."""

    def show(self, stream: Stream) -> None:
        for chunk in with_progress(stream):
            write(visible(chunk.text) if sys.stdout.isatty() else chunk.text)
        line()


class Markdown:
    """Markdown, drawn by rich: a block of it (a paragraph, a list, code) when it is complete, until then as it is written.

    What is complete is printed once and for all, so a long answer scrolls and costs no more the longer it is.
    """

    def __init__(self, console: Any) -> None:
        """console: rich's."""
        from markdown_it import MarkdownIt

        self._console, self._parser = console, MarkdownIt()

    def show(self, stream: Stream) -> None:
        from rich.live import Live

        rest, live = "", Live(console=self._console, transient=True, refresh_per_second=12, redirect_stderr=False)
        try:
            for chunk in with_progress(stream):
                if not live.is_started:
                    live.start()
                rest += visible(chunk.text)
                if "\n" in chunk.text and (end := self._complete(rest)):
                    self._print(rest[:end])
                    rest = rest[end:]
                live.update(self._tail(rest))
        finally:
            live.stop()
        self._print(rest)

    def _complete(self, text: str) -> int:
        """Where the last block of a text begins: what is before it changes no more."""
        starts = [t.map[0] for t in self._parser.parse(text) if t.level == 0 and t.map and t.nesting >= 0]
        return len("".join(f"{line}\n" for line in text.split("\n")[: starts[-1]])) if len(starts) > 1 else 0

    def _tail(self, text: str) -> Any:
        from rich.text import Text

        # No more than fits the screen, or Live could not take it away again.
        width, room = self._console.width, max(1, self._console.height - 2)
        pieces = Text(text[-width * room :]).wrap(self._console, width)[-room:]
        return Text("\n").join(pieces)

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown as Drawn

        if text.strip():
            # Links are shown with their address: a hidden one could lead anywhere.
            self._console.print(Drawn(text, hyperlinks=False))


def display_of(plain: bool) -> Display:
    """Markdown where standard output is a terminal and rich is there, unless `plain`."""
    if plain or not sys.stdout.isatty():
        return Plain()
    try:
        from rich.console import Console
    except ImportError:
        return Plain()
    console = Console()
    return Plain() if console.is_dumb_terminal else Markdown(console)


def with_progress(stream: Stream) -> Iterator[Chunk]:
    """The chunks that hold text, and while there is none yet a line on standard error, if that is a terminal."""
    with _Reading(stream.prompt_tokens) as reading:
        for chunk in stream:
            if chunk.read:
                reading.reached(chunk.read)
                continue
            reading.over()
            yield chunk


class _Reading:
    """A line that says how much of a prompt has been read; it appears when that takes long, and goes when it is over."""

    def __init__(self, total: int) -> None:
        self._total, self._read, self._shown, self._over = total, 0, False, not sys.stderr.isatty()
        self._lock = threading.Lock()
        self._timer = threading.Timer(PATIENCE, self._begin)
        self._timer.daemon = True

    def __enter__(self) -> _Reading:
        if not self._over:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over()

    def reached(self, read: int) -> None:
        with self._lock:
            self._read = read
            if self._shown:
                self._write()

    def over(self) -> None:
        """Takes the line away; another does not come."""
        if self._over:
            return
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._shown:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()

    def _begin(self) -> None:
        with self._lock:
            if not self._over:
                self._shown = True
                self._write()

    def _write(self) -> None:
        sys.stderr.write(f"\r\x1b[Kreading the prompt: {self._read:,} of {self._total:,} tokens")
        sys.stderr.flush()
