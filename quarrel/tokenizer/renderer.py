"""Renders templates in a process of its own, which is killed when it takes too long."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from quarrel.child.spawn import Child, spawn_isolated
from quarrel.errors import RequestError, TokenizerError
from quarrel.tokenizer.guard import is_text
from quarrel.tokenizer.special import Trust

WORKER: Final = Path(__file__).with_name("render_worker.py")
MAX_TEMPLATE_BYTES: Final = 256 << 10
MAX_REQUEST_BYTES: Final = 16 << 20
# JSON spends up to six bytes on a character of one byte, and six more on each change of trust.
MAX_REPLY_BYTES: Final = 64 << 20
# The worker limits its own processor time, to 250 ms a rendering. These are for a worker that does not get any.
START_S: Final = 20.0
COMPILE_S: Final = 10.0
RENDER_S: Final = 2.0
# Compiled templates that one worker keeps; a model has a handful.
MAX_TEMPLATES: Final = 64


class Renderer:
    """Templates to text. One worker, started when first needed and after each one that had to be stopped. Thread-safe.

    It has a deadline for each request instead of a heartbeat, for which its limits leave no thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def render(
        self, template: str, variables: Mapping[str, object], control_texts: Mapping[str, str]
    ) -> list[tuple[str, Trust]]:
        """The text in runs of one trust each. Raises TokenizerError for the template's faults, RequestError for the
        variables'."""
        source = template.encode("utf-8", "replace")
        if len(source) > MAX_TEMPLATE_BYTES:
            raise TokenizerError(f"the chat template has {len(source)} bytes, wanted at most {MAX_TEMPLATE_BYTES}")
        name = hashlib.sha256(source).hexdigest()
        request = _json({"do": "render", "name": name, "variables": variables, "control_texts": control_texts})
        with self._lock:
            if self._worker is None or not self._worker.usable():
                self._worker = _Worker()
            worker = self._worker
            if name not in worker.compiled:
                worker.ask(_json({"do": "compile", "name": name, "template": source.decode()}), COMPILE_S)
                worker.compiled.add(name)
            return worker.render(request)

    @property
    def child(self) -> Child | None:
        """The worker's process, if there is one."""
        return None if self._worker is None else self._worker.child

    def close(self) -> None:
        """Ends the worker; a later `render` starts another."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
            self._worker = None


class _Worker:
    """A running render_worker.py."""

    def __init__(self) -> None:
        try:
            self.child = spawn_isolated(WORKER)
        except OSError as error:
            raise TokenizerError(f"no process can be started to render chat templates: {error}") from None
        self.compiled: set[str] = set()
        self.close = weakref.finalize(self, _end, self.child)
        self.ask(_json({"do": "compile", "name": "", "template": ""}), START_S)

    def usable(self) -> bool:
        """A forked child must not share its parent's worker: their requests would mix."""
        return self.close.alive and self.child.running and len(self.compiled) < MAX_TEMPLATES

    def render(self, request: bytes) -> list[tuple[str, Trust]]:
        reply = self.ask(request, RENDER_S)
        try:
            text, at, runs = reply["text"], 0, []
            for length, level in reply["runs"]:
                runs.append((text[at : at + length], Trust(level)))
                at += length
            valid = at == len(text) and is_text(text)
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            self._fail("wrote what is no text")
        return runs

    def ask(self, request: bytes, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        try:
            self.child.link.send(request, deadline)
            data = self.child.link.receive(deadline, MAX_REPLY_BYTES)
            reply: dict[str, Any] | None = None if data is None else json.loads(data)
        except TimeoutError:
            self._fail("took too long, and was stopped")
        except OverflowError:
            self._fail("gave a reply without end")
        except (OSError, ValueError):
            reply = None
        except BaseException:
            self.close()  # an interrupt: the reply to this request must not be taken for the next one's
            raise
        if reply is None:
            self._fail(self._death())
        if "error" in reply:
            _refuse(reply["error"], reply["message"])
        return reply

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.child.process.wait(1.0) == -signal.SIGPROF:
                return "took too much time (it has 250 ms), and was stopped"
        return "brought down the process that renders it"

    def _fail(self, what: str) -> NoReturn:
        self.close()
        raise TokenizerError(f"the chat template {what}; choose another template")


def _json(request: Mapping[str, object]) -> bytes:
    try:
        data = json.dumps(request, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise RequestError("a message holds a lone surrogate, which no encoding can carry; send valid Unicode") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a message is no JSON value: {error}") from None
    if len(data) > MAX_REQUEST_BYTES:
        raise RequestError(f"the messages have {len(data)} bytes, wanted at most {MAX_REQUEST_BYTES}")
    return data


def _refuse(kind: str, message: str) -> NoReturn:
    if kind == "raised":
        raise RequestError(f"the chat template refuses these messages: {message}")
    if kind == "failed":
        raise RequestError(f"the chat template failed on these messages: {message}")
    if kind == "syntax":
        raise TokenizerError(f"the chat template is no valid Jinja: {message}; choose another template")
    if kind == "security":
        raise TokenizerError(f"the chat template reaches for what it must not touch: {message}")
    raise TokenizerError(f"the chat template {message}, and was stopped")


def _end(child: Child) -> None:
    child.link.close()
    child.end()
