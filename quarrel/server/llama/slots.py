"""/slots: places that keep the text which was last computed there, saved to disk, restored and erased by their numbers.

Sequences have no fixed places here: a slot is a name for a text, which the cache keeps as any other. A request that names
none takes the idle slot whose text begins most like its own, or else the one that was used longest ago.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import StrictStr
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quarrel.engine import Request as Prepared
from quarrel.engine import Result
from quarrel.engine.prefix import common_prefix
from quarrel.errors import RequestError
from quarrel.llm import Model
from quarrel.server.body import read_body
from quarrel.server.dispatch import Dispatcher, Generation
from quarrel.server.errors import Refused
from quarrel.server.fields import Body
from quarrel.server.llama.figures import Figures
from quarrel.server.llama.lora import Lora
from quarrel.server.llama.table import Routes

Json = dict[str, Any]
ALIKE = 0.1
"""A request that names no slot goes to the one whose text has more than such a part of it."""
_FORBIDDEN = re.compile('[\\x00-\\x1f\\x7f-\\x9f/\\\\:*?"<>|\\uff0e\\u2215\\u2216\\ufffd\\ufeff\\ud800-\\udfff]')
LONGEST_NAME = 255


@dataclass(frozen=True)
class Kept:
    """A text that was computed: its tokens, and whose they are."""

    tokens: tuple[int, ...] = ()
    salt: str = ""
    adapter: int = 0


@dataclass
class Slot:
    kept: Kept = field(default_factory=Kept)
    running: int = 0
    used: int = 0
    """The turn in which it was used last."""
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Slots:
    """Those of the model. Written on the event loop alone."""

    def __init__(self, figures: Figures) -> None:
        self._slots: dict[str, list[Slot]] = {}
        self._figures = figures
        self._turn = 0

    def of(self, llm: Model) -> list[Slot]:
        """As many as sequences run at once."""
        explanation = llm.explain()
        slots = self._slots.setdefault(explanation.model, [])
        while len(slots) < explanation.max_seqs:
            slots.append(Slot())
        return slots

    @contextmanager
    def taken(self, generation: Generation, wanted: int | None) -> Iterator[list[int]]:
        """The slots of a generation's requests, while they run."""
        slots, ids = self.of(generation.llm), list[int]()
        for request in generation.requests:
            ids.append(self._chosen(slots, request, wanted))
            slots[ids[-1]].running += 1
            slots[ids[-1]].done.clear()
        try:
            yield ids
        finally:
            for id, request, stream in zip(ids, generation.requests, generation.streams, strict=True):
                slot, self._turn = slots[id], self._turn + 1
                slot.running, slot.used = slot.running - 1, self._turn
                if stream.result is not None:
                    used = stream.result.usage
                    self._figures.longest = max(self._figures.longest, used.prompt_tokens + used.completion_tokens)
                    slot.kept = Kept(computed(request, stream.result), request.service.cache_salt, request.adapter)
                if not slot.running:
                    slot.done.set()

    def _chosen(self, slots: Sequence[Slot], request: Prepared, wanted: int | None) -> int:
        if wanted is not None and wanted >= 0:
            return wanted % len(slots)
        idle = [i for i, slot in enumerate(slots) if not slot.running] or list(range(len(slots)))
        shared = {i: common_prefix(slots[i].kept.tokens, request.tokens) for i in idle}
        best = max(idle, key=lambda i: shared[i])
        return best if shared[best] > ALIKE * len(request.tokens) else min(idle, key=lambda i: slots[i].used)


def computed(request: Prepared, result: Result) -> tuple[int, ...]:
    """The tokens that have run, the last one drawn has not. None of a text with images, whose tokens are their places, or
    of one that left some out to go on."""
    if request.sight is not None or result.shifted or result.finish_reason == "error":
        return ()
    drawn = len(result.token_ids) - (bool(result.token_ids) and not isinstance(result.stopped_by, int))
    return (*request.tokens, *result.token_ids[:drawn])


class FileBody(Body):
    filename: StrictStr = ""


def file_of(folder: Path, name: str) -> Path:
    """The file of that name in the folder. Raises Refused for a name that leads elsewhere, or is none on some system."""
    sound = 0 < len(name.encode(errors="replace")) <= LONGEST_NAME and ".." not in name and not _FORBIDDEN.search(name)
    if not sound or name[0] == " " or name[-1] in " .":
        raise Refused(400, "invalid_request", "Invalid filename", param="filename")
    return folder / name


def alone(salt: str) -> str:
    """Of a caller's request that shares nothing, with its own ones neither."""
    return f"{salt}/{secrets.token_hex(8)}"


def owner_of(salt: str) -> str:
    """The caller whose request had it."""
    return salt.partition("/")[0]


def callers_folder(folder: Path, caller: str) -> Path:
    """Where a caller's files are: one with a key has a folder of its own, as who restores a text learns by what is cached
    whether a guess of it is right. Raises Refused."""
    if not caller:
        return folder
    try:
        (made := folder / caller.replace(" ", "-")).mkdir(exist_ok=True)
    except OSError as error:
        raise Refused(507, "no_space", f"no folder can be made for this key's slots: {error.strerror or error}") from error
    return made


def routes(dispatcher: Dispatcher, slots: Slots, lora: Lora) -> Routes:
    """Listed, and by number."""
    router, folder = Routes(), dispatcher.settings.slot_save_path

    @router.get("/slots")
    async def listed(request: Request) -> Response:
        """As many as requests run at once."""
        if not dispatcher.settings.slots:
            raise Refused(501, "not_supported", "This server does not support slots endpoint. Start it with `--slots`")
        async with dispatcher.models.use(request.query_params.get("model")) as (_, llm):
            rows = [_row(i, slot, llm) for i, slot in enumerate(slots.of(llm))]
        if request.query_params.get("fail_on_no_slot") and all(row["is_processing"] for row in rows):
            raise Refused(503, "unavailable", "no slot available")
        return JSONResponse(rows)

    @router.post("/slots/{id_slot}")
    async def act(request: Request) -> Response:
        """action: save, restore or erase."""
        if folder is None:
            message = "This server does not support slots action. Start it with `--slot-save-path`"
            raise Refused(501, "not_supported", message)
        action, number = request.query_params.get("action"), str(request.path_params["id_slot"])
        if not re.fullmatch("[0-9]{1,9}", number):
            raise Refused(400, "invalid_request", "Invalid slot ID")
        if action not in ("save", "restore", "erase"):
            raise Refused(400, "invalid_request", "Invalid action")
        own = dispatcher.service(request.state.caller)
        path, headers = folder, dict[str, str]()
        if action != "erase":
            body, headers = await read_body(request, FileBody, dispatcher)
            path = file_of(folder if dispatcher.settings.llama else callers_folder(folder, own.cache_salt), body.filename)
        async with dispatcher.models.use(request.query_params.get("model")) as (_, llm):
            known = slots.of(llm)
            slot, began = known[int(number) % len(known)], time.perf_counter()
            while slot.running:
                await slot.done.wait()
            owner = owner_of(slot.kept.salt)
            if action != "restore" and owner and own.cache_salt and owner != own.cache_salt:
                raise Refused(403, "forbidden", f"slot {number} holds a text of another caller")
            row: Json = {"id_slot": int(number)}
            if action == "erase":
                row["n_erased"] = len(slot.kept.tokens)
                erased, slot.kept = slot.kept, Kept()
                await asyncio.to_thread(_forget, llm, erased, [s.kept for s in known])
                return JSONResponse(row, headers=headers)
            names = {"save": ("n_saved", "n_written"), "restore": ("n_restored", "n_read")}[action]
            if action == "save":
                counts = await asyncio.to_thread(_save, llm, slot.kept, path)
            else:
                slot.kept = Kept()
                adapter = lora.chosen(None)
                slot.kept, size = await asyncio.to_thread(_restore, llm, path, own.cache_salt, adapter)
                counts = len(slot.kept.tokens), size
            milliseconds = round(1000 * (time.perf_counter() - began), 3)
            row |= {"filename": path.name, **dict(zip(names, counts)), "timings": {f"{action}_ms": milliseconds}}
            return JSONResponse(row, headers=headers)

    return router


def _row(id: int, slot: Slot, llm: Model) -> Json:
    row = {"id": id, "n_ctx": llm.n_ctx, "speculative": False, "is_processing": slot.running > 0}
    return {**row, "n_prompt_tokens": len(slot.kept.tokens)} if slot.used or slot.kept.tokens else row


def _adapter(llm: Model, index: int) -> str | None:
    return llm.adapters[index - 1] if index else None


def _save(llm: Model, kept: Kept, path: Path) -> tuple[int, int]:
    try:
        return llm.prefixes.save(kept.tokens, path, salt=kept.salt, adapter=_adapter(llm, kept.adapter))
    except RequestError as error:
        raise Refused(400, "invalid_request", f"Unable to save slot: {error}") from error


def _restore(llm: Model, path: Path, salt: str, adapter: str | None) -> tuple[Kept, int]:
    try:
        tokens, size = llm.prefixes.restore(path, salt=salt, adapter=adapter)
    except RequestError as error:
        raise Refused(400, "invalid_request", f"Unable to restore slot: {error}") from error
    return Kept(tuple(tokens), salt, 1 + llm.adapters.index(adapter) if adapter else 0), size


def _forget(llm: Model, erased: Kept, others: Sequence[Kept]) -> None:
    """What another slot's text begins with, too, stays."""
    alike = (o for o in others if replace(o, tokens=()) == replace(erased, tokens=()))
    shared = max((common_prefix(erased.tokens, o.tokens) for o in alike), default=0)
    if erased.tokens:
        llm.prefixes.forget(erased.tokens, shared=shared, salt=erased.salt, adapter=_adapter(llm, erased.adapter))
