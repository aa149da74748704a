"""The models that a server offers: loaded when wanted, swapped while old requests finish on old weights.

A model whose process ends is loaded again: at once the first time, after growing delays if it keeps ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from quarrel.errors import OutOfMemory, QuarrelError
from quarrel.llm import Model
from quarrel.server.entries import Entry, LoadedModel
from quarrel.server.errors import Refused, refused
from quarrel.server.names import Name, Names, folded

Load = Callable[..., Model]
"""Of a source, and `adapters` by name where there are some."""
STEADY = 30.0
"""A process that ran for so many seconds is started again at once."""
LONGEST = 1e6
"""Seconds that a model may be kept at most where a time is given; for ever is longer."""
SOONEST, LATEST = 0.5, 5.0
"""Seconds before a process that keeps ending is started again."""
log = logging.getLogger("quarrel.server")


LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


class ModelManager:
    """Models by name. For one event loop; loading runs on a thread."""

    def __init__(
        self,
        sources: Iterable[str],
        folder: Path | None,
        load: Load,
        made: Names | None = None,
        *,
        idle: float | None = None,
        budget: int | None = None,
        any_name: bool = False,
        most: int = 0,
        autoload: bool = True,
    ) -> None:
        """made: names that requests make. any_name: one that is none here means the first model. idle: seconds without use
        behind which a model is unloaded; None keeps it.

        budget: bytes that all models share; `load` is given what is left of them as `memory`. Where a model does not fit,
        those that wait for requests are unloaded, the one that was used longest ago first. most: how many are loaded at
        once, 0 for any number; whoever wants one more makes room in the same way, or waits until one has no requests.
        autoload: whether a request loads the model that it names.
        """
        self._load, self._idle, self._budget = load, idle, budget
        self._folder, self._any_name = folder, any_name
        self._entries: dict[str, Entry] = {}
        self._sources: list[str] = []
        self._unlisted: list[Entry] = []
        self.made = made or Names(None)
        self._locks: dict[int, asyncio.Lock] = {}
        self._revivals: set[asyncio.Task[Any]] = set()
        self._most, self._autoload, self._loading = most, autoload, set[Entry]()
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()
        self._closed = False
        self._passed_over: set[str] = set()
        self._loads: set[asyncio.Future[Model]] = set()
        self.stopped: Future[None] = Future()
        """Done when nothing is loaded any more: whoever loads may end at once."""
        for source in sources:
            name = name_of(source)
            self._entries[name] = Entry(name, source, created=int(time.time()))
            self._sources.append(name)

    async def renew(self, sources: Iterable[str]) -> None:
        """From now on these are on offer; what is not among them any more ends with its last request."""
        wanted = {name_of(source): source for source in sources}
        for name in [name for name in self._sources if name not in wanted]:
            self._sources.remove(name)
            await self._unload(self._entries.pop(name))
        for name in wanted.keys() - self._entries.keys():
            self._entries[name] = Entry(name, wanted[name], created=int(time.time()))
            self._sources.append(name)

    @property
    def default(self) -> str | None:
        """The model of requests that name none."""
        return next((name for name in self._sources if name in self._entries), None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all models on offer; empty where a folder may have more."""
        return tuple(self._entries) if self._folder is None else ()

    def entries(self) -> list[Entry]:
        """All models on offer, those in the folder included; what is none there is one warning."""
        if self._folder is not None:
            for path in sorted(self._folder.glob("*.gguf")):
                # Hidden files are what a system or a download keeps there; a split model is offered by its first file.
                if not path.name.startswith(".") and not LATER_SHARD.search(path.name):
                    self._offer(path)
        return list(self._entries.values())

    def _offer(self, path: Path) -> None:
        name, source = name_of(str(path)), str(path)
        known = self._entries.get(name)
        if known is not None and known.source == source:
            return
        wrong, created = "", 0
        try:
            status = path.stat()
            created = int(status.st_mtime)
            name.encode()
            wrong = "" if stat.S_ISREG(status.st_mode) else "it is no file"
            if source in self.made.forgotten:
                return
        except OSError as error:
            wrong = error.strerror or str(error)
        except UnicodeEncodeError:
            wrong = "its name is not in UTF-8"
        if known is not None and not wrong and not _same(known.source, path):
            wrong = f"another model is called {name}: rename it"
        if wrong and source not in self._passed_over:
            self._passed_over.add(source)
            log.warning("%a is not offered: %s", source, wrong)
        if not wrong and known is None:
            self._entries[name] = Entry(name, source, created=created)

    def entry(self, name: str | None) -> Entry:
        """The model of that name, the first one for None."""
        return self.named(name)[1]

    def named(self, name: str | None) -> tuple[Name, Entry]:
        """What the model is called, and the model; the first one for None."""
        offered = self.entries()
        wanted = name if name is not None else offered[0].name if offered else ""
        made = self.made.get(wanted)
        if made is not None:
            return made, self._entry_of(made)
        for same in (lambda e: e.name == wanted, lambda e: folded(e.name) == folded(wanted)):
            for entry in filter(same, offered):
                return Name(entry.name, entry.source, created=entry.created), entry
        if self._any_name and offered:
            return self.named(None)
        known = ", ".join([*(e.name for e in offered), *(n.name for n in self.made)]) or "none"
        raise Refused(404, "model_not_found", f"there is no model {wanted[:80]!r} here, wanted one of {known}")

    def has(self, name: str) -> bool:
        """Whether there is a model of that name."""
        try:
            self.named(name)
        except Refused:
            return False
        return True

    def listed(self) -> list[tuple[Name, Entry]]:
        """All names, with their models."""
        own = [(Name(e.name, e.source, created=e.created), e) for e in self.entries() if self.made.get(e.name) is None]
        return [*own, *((made, self._entry_of(made)) for made in self.made)]

    def _entry_of(self, made: Name) -> Entry:
        """One model for all names of a source with the same adapters."""
        for entry in (*self._entries.values(), *self._unlisted):
            if entry.source == made.source and entry.adapters == made.adapters:
                return entry
        entry = Entry(made.name, made.source, created=made.created, adapters=made.adapters)
        self._unlisted.append(entry)
        return entry

    async def forget(self, name: str) -> str | None:
        """Takes a name away, and its model out of memory where it has no other. Returns the model's source in this case;
        the file stays where it is. Raises `Refused` where there is no such name."""
        entry = self.entry(name)
        if self.made.get(name) is not None:
            self.made.remove(name)
        else:
            self._unlisted.append(self._entries.pop(entry.name))
            if self._folder is not None and Path(entry.source).parent == self._folder:
                self.made.forget(entry.source)
        if entry in self._entries.values() or any(self._entry_of(other) is entry for other in self.made):
            return None
        await self._unload(entry)
        self._unlisted.remove(entry)
        others = (*self._entries.values(), *self._unlisted)
        return None if any(e.source == entry.source for e in others) else entry.source

    def parts(self, name: str | None) -> tuple[str | None, str | None]:
        """A model and one of its adapters, where a name is both, as in "model:adapter"; the name and None elsewhere."""
        model, colon, adapter = (name or "").rpartition(":")
        return (model, adapter) if colon and not self.has(name or "") and self.has(model) else (name, None)

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[tuple[str, Model]]:
        """The model for one request, loaded if it was not. It stays open until the block ends, whatever else happens."""
        made, entry = self.named(name)
        _stop_resting(entry)
        wait = entry.again_at - time.monotonic()
        if entry.loaded is None and wait > 0:
            message = f"the process of {entry.name} ended and will be started again: ask again in {wait:.0f} s"
            raise Refused(503, "engine_restarting", message, retry_after=wait)
        if entry.loaded is None:
            if not self._autoload:
                raise Refused(400, "model_not_loaded", f"model {entry.name} is not loaded: POST /models/load first")
            await self._load_entry(entry)
            _stop_resting(entry)
        loaded = entry.loaded
        if loaded is None:
            raise Refused(503, "model_unloaded", f"{entry.name} was unloaded: ask again", retry_after=1.0)
        loaded.take()
        try:
            yield made.name, made.prompting.of(loaded.llm)
        finally:
            loaded.drop()
            if entry.loaded is loaded and not loaded.users and entry.resting is None:
                self._let_rest(entry)
            if not loaded.users:
                self._freed.set()

    async def load(self, name: str, *, again: bool = False) -> Entry:
        """Loads a model, or with `again` a fresh copy in place of the one that runs, which ends with its last request."""
        entry = self.entry(name)
        _stop_resting(entry)
        return await self._load_entry(entry, again=again)

    async def _load_entry(self, entry: Entry, *, again: bool = False) -> Entry:
        async with self._locks.setdefault(id(entry), asyncio.Lock()):
            if self.stopped.done():
                raise _going_down()
            if entry.loaded is not None and not again:
                return entry
            before = entry.loaded
            entry.state = "loading" if before is None else "loaded"
            began = time.perf_counter()
            try:
                await self._make_room(entry)
                llm = await self._fitted(entry)
            except Exception as error:
                if self.stopped.done():
                    entry.state = "unloaded" if before is None else "loaded"
                    raise
                known = isinstance(error, QuarrelError)
                entry.error = str(error) if known else f"it failed ({type(error).__name__}): see the server's log"
                log.error("%s could not be loaded: %s", entry.name, entry.error, exc_info=None if known else error)
                entry.state = "failed" if before is None else "loaded"
                raise refused(error if isinstance(error, QuarrelError) else QuarrelError(entry.error)) from error
            except BaseException:
                entry.state = "unloaded" if before is None else "loaded"
                raise
            finally:
                self._loading.discard(entry)
                self._freed.set()
            entry.loaded, entry.state, entry.error, entry.rested = LoadedModel(llm), "loaded", "", False
            entry.load_seconds = time.perf_counter() - began
            self._watch(entry, entry.loaded, llm)
            log.info("loaded %s in %.1f s", entry.name, entry.load_seconds)
            if before is not None:
                before.retire()
            self._let_rest(entry)
        return entry

    async def _make_room(self, entry: Entry) -> None:
        """Until there is a place for one more, in the order of asking."""
        async with self._turn:
            while self._most:
                others = [e for e in self._all() if e is not entry and (e.loaded is not None or e in self._loading)]
                if len(others) < self._most:
                    break
                idle = [(e, e.loaded) for e in others if e.loaded is not None and not e.loaded.users]
                if idle:
                    other, oldest = min(idle, key=lambda pair: pair[1].used)
                    log.info("%s makes room for %s", other.name, entry.name)
                    await self._unload(other)
                    if oldest.closing is not None:
                        await asyncio.wait({oldest.closing})
                else:
                    self._freed.clear()
                    await self._freed.wait()
            self._loading.add(entry)

    async def _fitted(self, entry: Entry) -> Model:
        """The model; others are unloaded where it does not fit beside them. Raises what loading does."""
        while True:
            try:
                return await self._loaded(entry)
            except OutOfMemory:
                others = [e for e in self._all() if e is not entry and e.loaded is not None and not e.loaded.users]
                loaded = [(e, e.loaded) for e in others if e.loaded is not None]
                if not loaded or self.stopped.done():
                    raise
                other, oldest = min(loaded, key=lambda pair: pair[1].used)
            log.info("%s makes room for %s", other.name, entry.name)
            await self._unload(other)
            if oldest.closing is not None:
                await asyncio.wait({oldest.closing})

    def _all(self) -> list[Entry]:
        return [*self._entries.values(), *self._unlisted]

    def _left(self) -> int:
        """Bytes of the budget that no model has."""
        assert self._budget is not None
        used = sum(e.loaded.llm.explain().memory.total for e in self._all() if e.loaded is not None)
        return max(1, self._budget - used)

    def _loaded(self, entry: Entry) -> asyncio.Future[Model]:
        """The model, by a thread that nobody waits for when the program ends."""
        events = asyncio.get_running_loop()
        made: asyncio.Future[Model] = events.create_future()
        self._loads.add(made)

        def settle(llm: Model | None, error: BaseException | None) -> None:
            self._loads.discard(made)
            if made.done():  # loading was stopped, or nobody waits any more
                if llm is not None:  # closing waits for its process, and no answer of others does
                    threading.Thread(target=llm.close, name="quarrel-close", daemon=True).start()
            elif error is not None:
                made.set_exception(error)
            elif llm is not None:
                made.set_result(llm)

        more: dict[str, Any] = {"adapters": entry.adapters} if entry.adapters else {}
        if self._budget is not None:
            more["memory"] = self._left()

        def work() -> None:
            llm, failed = None, None
            try:
                llm = self._load(entry.source, **more)
            except BaseException as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the server has ended
                events.call_soon_threadsafe(settle, llm, failed)

        threading.Thread(target=work, name="quarrel-load", daemon=True).start()
        return made

    def stop_loading(self) -> None:
        """Whoever waits for a model that is being loaded is refused, and no other is loaded."""
        if not self.stopped.done():
            self.stopped.set_result(None)
        for made in self._loads:
            if not made.done():
                made.set_exception(_going_down())

    async def unload(self, name: str) -> Entry:
        """Takes a model out; requests that use it finish."""
        return await self._unload(self.entry(name))

    async def _unload(self, entry: Entry) -> Entry:
        _stop_resting(entry)
        async with self._locks.setdefault(id(entry), asyncio.Lock()):
            loaded, entry.loaded, entry.state = entry.loaded, None, "unloaded"
            if loaded is not None:
                loaded.retire()
        return entry

    async def keep(self, name: str, seconds: float | None) -> None:
        """How long a model stays in memory behind a request: not at all for 0, for ever below it, as the server has it for
        None; until nobody has used it for so many seconds otherwise."""
        entry = self.entry(name)
        _stop_resting(entry)
        entry.lasting = None if not seconds else math.inf if seconds < 0 else min(seconds, LONGEST)
        if seconds == 0:
            await self._unload(entry)
        else:
            self._let_rest(entry)

    def _let_rest(self, entry: Entry) -> None:
        seconds = self._idle if entry.lasting is None else entry.lasting
        if seconds is not None and seconds < math.inf and entry.loaded is not None:
            _stop_resting(entry)
            self._rest(entry, seconds)

    def _rest(self, entry: Entry, seconds: float) -> None:
        def over() -> None:
            if entry.loaded is not None and entry.loaded.users:
                self._rest(entry, seconds)
            else:
                entry.rested = True
                log.info("%s is unloaded: nobody has used it for %g s", entry.name, seconds)
                task = events.create_task(self._unload(entry))
                self._revivals.add(task)
                task.add_done_callback(self._revivals.discard)

        events = asyncio.get_running_loop()
        entry.until, entry.resting = time.time() + seconds, events.call_later(seconds, over)

    def _watch(self, entry: Entry, loaded: LoadedModel, llm: Model) -> None:
        events = asyncio.get_running_loop()

        def lost() -> None:
            with contextlib.suppress(RuntimeError):  # the server's loop is closed
                events.call_soon_threadsafe(self._lost, entry, loaded)

        llm.when_lost(lost)

    def _lost(self, entry: Entry, loaded: LoadedModel) -> None:
        if entry.loaded is not loaded or self._closed:
            return  # swapped or unloaded meanwhile: only its own requests are affected
        entry.loaded, entry.state = None, "loading"
        entry.restarts += 1
        steady = time.monotonic() - loaded.since >= STEADY
        entry.delay = 0.0 if steady or entry.restarts == 1 else min(max(SOONEST, 2 * entry.delay), LATEST)
        entry.again_at = time.monotonic() + entry.delay
        loaded.retire()
        log.error("the process of %s has ended; it is started again in %g s", entry.name, entry.delay)
        task = asyncio.get_running_loop().create_task(self._revive(entry))
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _revive(self, entry: Entry) -> None:
        while not self._closed:
            await asyncio.sleep(max(0.0, entry.again_at - time.monotonic()))
            if entry.state == "unloaded" or entry.loaded is not None:
                return
            try:
                await self._load_entry(entry)
                return
            except QuarrelError as error:
                entry.delay = min(max(SOONEST, 2 * entry.delay), LATEST)
                entry.again_at = time.monotonic() + entry.delay
                log.error("%s could not be started again: %s; the next attempt is in %g s", entry.name, error, entry.delay)

    async def close(self) -> None:
        """Closes every model at once; what runs is cancelled."""
        self._closed = True
        self.stop_loading()
        for task in self._revivals:
            task.cancel()
        for entry in self._all():
            loaded, entry.loaded, entry.state = entry.loaded, None, "unloaded"
            if loaded is not None:
                await asyncio.to_thread(loaded.llm.close)


def _stop_resting(entry: Entry) -> None:
    if entry.resting is not None:
        entry.resting.cancel()
    entry.resting = entry.until = None


def _going_down() -> Refused:
    return Refused(503, "server_shutdown", "the server is going down: ask again in a moment", retry_after=5.0)


def _same(source: str, path: Path) -> bool:
    try:
        return path.samefile(source)
    except (OSError, ValueError):
        return False


def name_of(source: str) -> str:
    """What a model is called: a file by its name without `.gguf`, others as they are named."""
    return Path(source).name.removesuffix(".gguf") if source.endswith(".gguf") else source
