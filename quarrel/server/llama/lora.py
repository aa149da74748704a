"""The model's LoRA adapter: with what scale requests have it, which may say so themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, StrictInt, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quarrel.server.dispatch import Dispatcher
from quarrel.server.errors import Refused
from quarrel.server.fields import Body, Number
from quarrel.server.llama.table import Routes
from quarrel.server.settings import Settings

Json = dict[str, Any]
FIRST = 0
"""Its number, as there is one at most."""


class Scale(Body):
    id: StrictInt = Field(ge=0, lt=2**31)
    scale: Number


_SCALES = TypeAdapter(list[Scale])


class Lora:
    """The adapter of one server."""

    def __init__(self, settings: Settings) -> None:
        self._name, self._file = settings.adapter, settings.adapter_file
        self._on = settings.adapter_applied

    def rows(self) -> list[Json]:
        """As llama-server lists it."""
        row = {"id": FIRST, "path": self._file, "scale": float(self._on), "task_name": "", "prompt_prefix": ""}
        return [] if self._name is None else [row]

    def change(self, scales: Sequence[Scale]) -> None:
        """For all requests that follow. Raises Refused."""
        self._on = self._wanted(scales)

    def chosen(self, scales: Sequence[Scale] | None) -> str | None:
        """What a request has: as it says, or as the server does. Raises Refused."""
        return self._name if (self._on if scales is None else self._wanted(scales)) else None

    def _wanted(self, scales: Sequence[Scale]) -> bool:
        """One that is not named has no part, as with llama-server."""
        wanted = False
        for one in scales:
            if self._name is None or one.id != FIRST:
                known = "0 alone" if self._name is not None else "none: start it with --lora FILE"
                raise Refused(
                    400, "invalid_request", f"there is no LoRA adapter {one.id}, this server has {known}", param="lora"
                )
            if one.scale not in (0, 1):
                text = (
                    f"the LoRA adapter's scale is {one.scale:g}, wanted 0 or 1: here it is left out, or used as it was made"
                )
                raise Refused(400, "unsupported", text, param="lora")
            wanted = bool(one.scale)
        return wanted


def routes(dispatcher: Dispatcher, lora: Lora) -> Routes:
    """Listed, and set for all."""
    router = Routes()

    @router.get("/lora-adapters")
    async def listed(request: Request) -> Response:
        """The adapter with its scale."""
        return JSONResponse(lora.rows())

    @router.post("/lora-adapters")
    async def changed(request: Request) -> Response:
        """A list of numbers and scales."""
        try:
            scales = _SCALES.validate_json(await request.body())
        except ValidationError:
            text = 'the body is no list of scales, wanted one such as [{"id": 0, "scale": 1.0}]'
            raise Refused(400, "invalid_request", text) from None
        lora.change(scales)
        return JSONResponse({"success": True})

    return router
