"""Models that share a machine: idle ones go, the one used longest ago makes room, and one loads while another answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from quarrel.errors import OutOfMemory
from quarrel.server.errors import Refused
from quarrel.server.models import ModelManager

SECONDS = 60


class Machine:
    """Loads models of `size` bytes each into `room` bytes; one called late waits for `goes`."""

    def __init__(self, room: int, size: int = 10) -> None:
        self.room, self.size = room, size
        self.memory: list[int | None] = []
        self.goes, self.begun = threading.Event(), threading.Event()

    def load(self, source: str, memory: int | None = None) -> Any:
        self.memory.append(memory)
        if source == "late":
            self.begun.set()
            assert self.goes.wait(SECONDS)
        if min(self.room, memory if memory is not None else self.room) < self.size:
            raise OutOfMemory(f"{source} does not fit")
        self.room -= self.size
        return SimpleNamespace(
            close=self.close,
            when_lost=lambda callback: None,
            explain=lambda: SimpleNamespace(memory=SimpleNamespace(total=self.size)),
        )

    def close(self) -> None:
        self.room += self.size


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, SECONDS))


def loaded(models: ModelManager) -> set[str]:
    return {entry.name for entry in models.entries() if entry.loaded is not None}


async def use(models: ModelManager, name: str) -> None:
    async with models.use(name):
        pass


@pytest.mark.parametrize("budget", [None, 25])
def test_the_model_that_was_used_longest_ago_makes_room(budget: int | None) -> None:
    machine = Machine(25 if budget is None else 1000)

    async def work() -> None:
        models = ModelManager("abc", None, machine.load, budget=budget)
        await use(models, "a")
        await use(models, "b")
        await use(models, "a")
        await use(models, "c")
        assert loaded(models) == {"a", "c"}
        async with models.use("a"), models.use("c"):
            with pytest.raises(Refused, match="does not fit"):
                await use(models, "b")
        assert loaded(models) == {"a", "c"}, "nobody makes room while it answers"

    run(work())
    if budget is not None:
        assert machine.memory == [25, 15, 5, 15, 5], "each may take what the others leave"


def test_a_model_that_fits_nowhere_is_refused_when_all_have_gone() -> None:
    machine = Machine(5)

    async def work() -> None:
        with pytest.raises(Refused, match="does not fit"):
            await use(ModelManager("a", None, machine.load), "a")

    run(work())


def test_a_model_loads_while_another_answers() -> None:
    machine = Machine(100)

    async def work() -> None:
        models = ModelManager(["a", "late"], None, machine.load)
        await use(models, "a")
        waiting = asyncio.create_task(use(models, "late"))
        assert await asyncio.to_thread(machine.begun.wait, SECONDS)
        await use(models, "a")
        assert not waiting.done()
        machine.goes.set()
        await waiting
        assert loaded(models) == {"a", "late"}

    run(work())


def test_idle_models_go_and_come_back() -> None:
    machine = Machine(100)

    async def gone(models: ModelManager, names: set[str]) -> None:
        while loaded(models) & names:
            await asyncio.sleep(0.001)

    async def work() -> None:
        models = ModelManager("ab", None, machine.load, idle=0.01)
        await models.load("a")
        await gone(models, {"a"})
        assert models.entry("a").rested
        async with models.use("a"):
            await use(models, "b")
            await gone(models, {"b"})
            assert loaded(models) == {"a"}, "what answers is not idle"
            await models.keep("a", -1)
        await use(models, "b")
        await gone(models, {"b"})
        assert loaded(models) == {"a"}, "a request may keep it for ever"
        await models.keep("a", None)
        await gone(models, {"a"})

    run(work())
