"""Pictures decoded and resized in processes of their own, which are killed when they take too long."""

from __future__ import annotations

import base64
import binascii
import contextlib
import importlib.util
import json
import os
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from quarrel.child.spawn import Child, spawn_isolated
from quarrel.errors import RequestError
from quarrel.vision.patches import Picture, Preparation

WORKER: Final = Path(__file__).with_name("decode_worker.py")
MAX_BYTES: Final = 32 << 20
MAX_PIXELS: Final = 50_000_000
START_S: Final = 60.0
MOST_WORKERS: Final = 4
"""Processes; one decodes some hundred pictures of 448 x 448 a second."""
DECODE_S: Final = 30.0
NEEDS_PILLOW: Final = "pictures are decoded by Pillow, which is not installed: pip install 'longbow-quarrel[images]'"


class Decoder:
    """A few workers, of which the first free one takes a picture. Thread-safe."""

    def __init__(self, workers: int = 0) -> None:
        """workers: at most so many processes; 0 is half of the cores, up to `MOST_WORKERS`."""
        count = workers or max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))
        self._count, self._idle = count, [_Worker() for _ in range(count)]
        self._changed = threading.Condition()

    def picture(self, source: object, preparation: Preparation) -> Picture:
        """The pixels that a tower wants of a path, bytes, a data URL, a PIL image or an array `[H, W, 3]` uint8.

        Raises RequestError, with what is wrong, for anything else and for pictures that cannot be decoded.
        """
        head, data = read(source)
        if importlib.util.find_spec("PIL") is None:
            raise RequestError(NEEDS_PILLOW, "image")
        with self._changed:
            self._changed.wait_for(lambda: self._idle)
            worker = self._idle.pop()  # the one that was busy last: others start when several are needed
        try:
            return worker.picture(head, data, preparation)
        finally:
            with self._changed:
                self._idle.append(worker)
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the workers; a later picture starts another."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._idle) == self._count)
            for worker in self._idle:
                worker.end()


class _Worker:
    """One process, started when first needed and after each one that had to be stopped. One thread at a time."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._close: weakref.finalize[[Child], _Worker] | None = None

    def picture(self, head: Mapping[str, Any], data: bytes, preparation: Preparation) -> Picture:
        """What it makes of a picture; it is ended where it did not answer. Raises RequestError."""
        try:
            return self._picture(head, data, preparation)
        except RequestError:
            raise
        except (OSError, ValueError, KeyError) as error:
            slow = isinstance(error, TimeoutError)
            self.end()
            what = "takes too long to decode" if slow else "brought down the process that decodes it"
            raise RequestError(f"an image {what}: send another", "image") from None
        except BaseException:
            self.end()  # an interrupt: the reply must not be taken for the next picture's
            raise

    def end(self) -> None:
        """Kills the process; a later picture starts another."""
        if self._close is not None:
            self._close()
        self._child = self._close = None

    def _picture(self, head: Mapping[str, Any], data: bytes, preparation: Preparation) -> Picture:
        started = self._child is not None and self._child.running
        if not started:
            self._child = spawn_isolated(WORKER)
            self._close = weakref.finalize(self, _end, self._child)
        assert self._child is not None
        link, deadline = self._child.link, time.monotonic() + DECODE_S + (0 if started else START_S)

        def ask(body: bytes) -> bytes:
            link.send(body, deadline)
            reply = link.receive(deadline, 4 * MAX_PIXELS)
            if reply is None:
                raise OSError("the worker is gone")
            return reply

        reply = json.loads(ask(json.dumps(head).encode() + b"\n" + data))
        if "error" in reply:
            raise RequestError(f"an image {reply['error']}", "image")
        try:
            width, height = preparation.size(*reply["size"])
        except RequestError:
            ask(json.dumps({"size": None}).encode())
            raise
        wanted = {"size": [width, height], "filter": preparation.filter, "pad": preparation.pad}
        pixels = ask(json.dumps(wanted).encode())
        return Picture(np.frombuffer(pixels, np.uint8).reshape(height, width, 3), preparation)


def read(source: object) -> tuple[Mapping[str, Any], bytes]:
    """What the worker is told of a picture, and its bytes. Raises RequestError."""
    if isinstance(source, np.ndarray):
        return _raw(source)
    if hasattr(source, "convert") and hasattr(source, "tobytes"):  # a PIL image: already decoded, by its owner
        return _raw(_opened(source))
    if isinstance(source, str) and source[:5].lower() == "data:":
        data = _of_url(source)
    elif isinstance(source, str | os.PathLike):
        data = _of_file(Path(source))
    elif isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    else:
        wanted = "a path, bytes, a PIL image or an array"
        raise RequestError(f"an image is a {type(source).__name__}, wanted {wanted}", "image")
    if len(data) > MAX_BYTES:
        raise RequestError(f"an image has {len(data)} bytes, wanted at most {MAX_BYTES >> 20} MiB", "image")
    start = data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith(b"<") and b"<svg" in start:
        raise RequestError("an image is SVG, a drawing and not pixels: send it as PNG", "image")
    return {}, data


def from_base64(text: str) -> bytes:
    """The bytes of a picture in base64. Raises RequestError."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("an image is no base64", "image") from None


def _of_url(url: str) -> bytes:
    kind, comma, text = url.partition(",")
    if not comma or not kind.lower().endswith(";base64"):
        raise RequestError("an image's data URL is no data:image/...;base64,...", "image")
    return from_base64(text)


def _of_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: no system takes such a name
        said = getattr(error, "strerror", None) or error
        raise RequestError(f"the image {str(path)[:200]!r} cannot be read: {said}", "image") from None


def _opened(image: Any) -> np.ndarray:
    """The pixels of a PIL image, which may not have been decoded yet."""
    from quarrel.vision.upright import Refused, upright

    try:
        return np.asarray(upright(image))
    except Refused as reason:
        raise RequestError(f"an image {reason}", "image") from None


def _raw(pixels: np.ndarray) -> tuple[Mapping[str, Any], bytes]:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        found = f"of {pixels.dtype}, {list(pixels.shape)}"
        raise RequestError(f"an image is an array {found}, wanted uint8 [height, width, 3]", "image")
    height, width = pixels.shape[:2]
    if width * height > MAX_PIXELS:
        raise RequestError(
            f"an image has {width} x {height} pixels, wanted at most {MAX_PIXELS // 1_000_000} million", "image"
        )
    return {"raw": [width, height]}, pixels.tobytes()


def _end(child: Child) -> None:
    with contextlib.suppress(OSError):
        child.link.close()
    child.end()
