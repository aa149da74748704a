"""/api/tools: what MCP servers offer to models, and calls of it, which the page makes when its user allows them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from quarrel.server.body import body_of, read_body
from quarrel.server.dispatch import Dispatcher, cancel_on_disconnect
from quarrel.server.errors import Refused
from quarrel.server.fields import Body
from quarrel.toolbox import Toolbox, names

MAX_CALLS = 16
"""That run at once."""


class ToolBody(Body):
    arguments: dict[str, Any] = Field(default_factory=dict)


def routes(dispatcher: Dispatcher, toolbox: Toolbox | None) -> APIRouter:
    """The two routes. toolbox: open while the server runs; None offers nothing."""
    router = APIRouter()
    running = 0

    @router.get("/api/tools")
    async def tools() -> dict[str, Any]:
        """As a request's `tools` lists them."""
        return {"tools": [] if toolbox is None else toolbox.tools}

    @router.post("/api/tools/{name:path}", **body_of(ToolBody))
    async def call(request: Request, name: str) -> Response:
        """The text of a tool's result, or of its failure."""
        nonlocal running
        body, headers = await read_body(request, ToolBody, dispatcher)
        if toolbox is None or name not in names(toolbox.tools):
            raise Refused(404, "not_found", f"there is no tool {name[:80]!r}: GET /api/tools lists those that there are")
        if running >= MAX_CALLS:
            raise Refused(503, "queue_full", f"{MAX_CALLS} calls of tools run already: try again later", retry_after=1.0)
        running += 1
        try:
            found = await cancel_on_disconnect(request, toolbox.acall(name, body.arguments))
        finally:
            running -= 1
        return JSONResponse({"name": name, "text": found.text, "failed": found.failed}, headers=headers)

    return router
