"""Ctrl-C while a text is being generated: it ends the text, not the program."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from quarrel.engine import Stream


class CtrlC:
    """While this is open, the first Ctrl-C cancels the stream, whose last chunks still come; the second one is raised.

    So nothing that was generated is lost between two statements, as it could be with an exception out of nowhere. It is
    opened before the stream is made, which can take a while: templates and tokenizers load on first use.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._stream: Stream | None = None
        self._before: Any = None

    def follow(self, stream: Stream) -> Stream:
        """The stream that Ctrl-C cancels; at once if it was pressed before."""
        self._stream = stream
        if self.pressed:
            stream.cancel()
        return stream

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        if self._stream is not None:
            self._stream.cancel()
