"""/tools: what MCP servers offer, by names such as `weather_forecast`, and calls of it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, StrictStr, TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quarrel.errors import ConfigError, QuarrelError
from quarrel.server.body import read_body
from quarrel.server.dispatch import Dispatcher, cancel_on_disconnect
from quarrel.server.errors import Refused
from quarrel.server.fields import Body
from quarrel.server.llama.table import Routes
from quarrel.toolbox import Toolbox, program_of

SECONDS = 30.0
log = logging.getLogger("quarrel.server")


class CallBody(Body):
    tool: StrictStr
    params: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class ToolServer:
    """One MCP server, which runs, and how long a call of it may take."""

    toolbox: Toolbox
    seconds: float


def servers_of(text: str, where: str) -> dict[str, tuple[Any, float]]:
    """Of `{"mcpServers": {NAME: {"command": ..., "args": [...], "env": {...}, "cwd": ..., "timeout_ms": ...}}}`. Raises
    ConfigError for what is none. where: how the text was given."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON ({error})") from None
    listed = given.get("mcpServers") if isinstance(given, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(one, dict) for one in listed.values()):
        raise ConfigError(f'{where} names no servers: wanted {{"mcpServers": {{"NAME": {{"command": "PROGRAM"}}}}}}')
    found: dict[str, tuple[Any, float]] = {}
    for name, one in listed.items():
        if not isinstance(one.get("command", one.get("url")), str):
            raise ConfigError(f"{where}: the server {name} has neither a command nor a url")
        for field, (kind, wanted) in _FIELDS.items():
            if not TypeAdapter(kind).validator.isinstance_python(one.get(field), strict=True):
                raise ConfigError(f"{where}: the server {name} has {field} {str(one[field])[:80]!r}, wanted {wanted}")
        found[name] = (program_of(one), (one.get("timeout_ms") or 1000 * SECONDS) / 1000)
    return found


_FIELDS: Mapping[str, tuple[Any, str]] = {
    "args": (list[str] | None, "a list of texts"),
    "env": (dict[str, str] | None, "an object of texts"),
    "cwd": (str | None, "a folder"),
    "timeout_ms": (Annotated[float, Field(ge=0, le=1e9)] | None, "milliseconds"),
}


class ToolServers:
    """Those that could be started, by name, while it is open."""

    def __init__(self, servers: Mapping[str, tuple[Any, float]]) -> None:
        self.running: dict[str, ToolServer] = {}
        self._servers, self._stack = servers, ExitStack()

    def __enter__(self) -> ToolServers:
        def begun(name: str) -> Toolbox | None:
            try:
                return Toolbox({name: self._servers[name][0]}).__enter__()
            except QuarrelError as error:
                log.warning("%s", error)
                return None

        with ThreadPoolExecutor() as pool:
            for name, toolbox in zip(self._servers, pool.map(begun, self._servers), strict=True):
                if toolbox is not None:
                    self._stack.push(toolbox)
                    self.running[name] = ToolServer(toolbox, self._servers[name][1])
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()


def routes(dispatcher: Dispatcher, tools: ToolServers | None) -> Routes:
    """Listed, and called. tools: None where no option asks for any."""
    router = Routes()
    named = {
        f"{name}_{tool['function']['name']}": (server, tool["function"])
        for name, server in (tools.running.items() if tools is not None else ())
        for tool in server.toolbox.tools
    }

    def check() -> None:
        if tools is None:
            raise Refused(403, "forbidden", "this feature is disabled: start the server with --mcp-servers-config")

    @router.get("/tools")
    async def listed(request: Request) -> Response:
        """As a request's `tools` has them, in `definition`."""
        check()
        definitions = {n: {"type": "function", "function": {**function, "name": n}} for n, (_, function) in named.items()}
        return JSONResponse(
            [{"tool": n, "display_name": n, "type": "mcp", "definition": d} for n, d in definitions.items()]
        )

    @router.post("/tools")
    async def call(request: Request) -> Response:
        """The text of a tool's result, or why there is none."""
        check()
        body, headers = await read_body(request, CallBody, dispatcher)
        if body.tool not in named:
            raise Refused(404, "not_found", f"there is no tool {body.tool[:80]!r}: GET /tools lists those that there are")
        server, function = named[body.tool]
        try:
            async with asyncio.timeout(server.seconds):
                found = await cancel_on_disconnect(request, server.toolbox.acall(function["name"], body.params))
        except TimeoutError:
            return JSONResponse({"error": f"{body.tool} took longer than {server.seconds:g} s"}, headers=headers)
        return JSONResponse({"error" if found.failed else "plain_text_response": found.text}, headers=headers)

    return router
