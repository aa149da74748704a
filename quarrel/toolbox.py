"""Tools of MCP servers, for a conversation: programs that are started here (stdio), or addresses (HTTP)."""

from __future__ import annotations

import asyncio
import shlex
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from quarrel.errors import QuarrelError, installing

SECONDS = 120.0
"""How long a server may take to begin, and for a call."""
LONGEST = 100_000
"""Characters of a result that the model gets."""


def server_of(given: str) -> Any:
    """What `--mcp` names: a URL, or a command with its arguments. Raises QuarrelError where mcp is not installed."""
    try:
        from mcp import StdioServerParameters
    except ImportError:
        raise QuarrelError(f"servers of tools are spoken to by mcp: {installing('mcp')}") from None
    if given.startswith(("http://", "https://")):
        return given
    try:
        command, *arguments = shlex.split(given)
    except ValueError as error:
        raise QuarrelError(f"--mcp is {given!r}, wanted a command or a URL ({error})") from None
    return StdioServerParameters(command=command, args=arguments)


def program_of(given: Mapping[str, Any]) -> Any:
    """A server as the files of MCP's clients describe one: `command`, `args`, `env` and `cwd`, or a `url`."""
    if "url" in given:
        return given["url"]
    parameters = server_of(shlex.quote(given["command"]))
    more = {name: given[name] for name in ("args", "env", "cwd") if given.get(name)}
    return parameters.model_copy(update=more)


@dataclass(frozen=True)
class ToolResult:
    """What a call came to, as the model is to read it."""

    text: str
    failed: bool = False


class Connection:
    """To one server, kept by a task of its own, which alone may leave what it entered."""

    def __init__(self, words: str, server: Any) -> None:
        self.words, self._server = words, server
        self._task: asyncio.Task[None] | None = None
        self._made: asyncio.Future[Any] | None = None
        self._over = asyncio.Event()

    async def client(self) -> Any:
        """What speaks to the server, which is started where it does not run."""
        if self._task is None or self._task.done() or self._made is None:
            self._made, self._over = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._task = asyncio.create_task(self._keep(self._made, self._over))
        return await asyncio.shield(self._made)

    async def close(self) -> None:
        """Ends it; `client` starts it again."""
        self._over.set()
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait([task])

    async def _keep(self, made: asyncio.Future[Any], over: asyncio.Event) -> None:
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(SECONDS):
                    client = await stack.enter_async_context(Client(self._server))
                made.set_result(client)
                await over.wait()
        except Exception as error:
            if not made.done():
                made.set_exception(error)


def _lost(error: Exception) -> bool:
    """Whether a call failed because nobody is there, or nobody who knows this connection, and not by what was asked."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        # The number of a connection that has closed is also that of any fault of a server's own.
        text = str(error).lower()
        return (error.code == CONNECTION_CLOSED and "closed" in text) or "session terminated" in text
    streams = type(error).__module__.partition(".")[0] in ("anyio", "httpcore", "httpx")
    return streams or (isinstance(error, OSError) and not isinstance(error, TimeoutError))


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


class Toolbox:
    """Connections to servers, kept by a thread of its own while this is open. `tools`: as OpenAI's protocol lists them."""

    def __init__(self, servers: Mapping[str, Any]) -> None:
        """servers: what `mcp.Client` takes, by the words that name each for a person."""
        self.tools: list[dict[str, Any]] = []
        self._servers = servers
        self._owners: dict[str, tuple[Connection, str]] = {}
        self._events = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="quarrel-mcp", daemon=True)

    def __enter__(self) -> Toolbox:
        """Raises QuarrelError for a server that cannot be reached."""
        self._thread.start()
        self._ready.result()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._events.call_soon_threadsafe(self._end.set)
            self._thread.join(SECONDS)

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """A tool's result, or its failure. Waits for it."""
        running = self._started(name, arguments)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    async def acall(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """As `call`, for an event loop."""
        return await asyncio.wrap_future(self._started(name, arguments))

    def _started(self, name: str, arguments: Mapping[str, Any]) -> Future[ToolResult]:
        return asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._events)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if name not in self._owners:
            return ToolResult(f"There is no tool {name!r}.", failed=True)
        server, own_name = self._owners[name]
        try:
            async with asyncio.timeout(SECONDS):
                found: Any = await (await server.client()).call_tool(own_name, dict(arguments))
        except Exception as error:  # whatever a server does, the conversation goes on
            if not _lost(error):
                return ToolResult(f"The tool failed: {_reason(error)}", failed=True)
            await server.close()  # the call is not made twice: it may have done what it was to do
            said = f"the MCP server {server.words!r} has ended ({_reason(error)}); the next call starts it again"
            return ToolResult(f"The tool failed: {said}.", failed=True)
        data = found.model_dump(mode="json", by_alias=True)
        parts = [p["text"] if p.get("type") == "text" else f"({p.get('type')})" for p in data.get("content") or ()]
        text = "\n".join(parts)[:LONGEST]
        return ToolResult(f"The tool failed: {text}", failed=True) if data.get("isError") else ToolResult(text)

    def _run(self) -> None:
        try:
            self._events.run_until_complete(self._serve())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._events.close()

    async def _serve(self) -> None:
        servers = [Connection(words, server) for words, server in self._servers.items()]
        try:
            for server in servers:
                try:
                    async with asyncio.timeout(SECONDS):
                        await self._list(server)
                except Exception as error:
                    raise QuarrelError(
                        f"the MCP server {server.words!r} does not answer ({_reason(error)}): try it by itself"
                    ) from error
            self._ready.set_result(None)
            await self._end.wait()
        finally:
            for server in reversed(servers):
                await server.close()

    async def _list(self, server: Connection) -> None:
        client, cursor = await server.client(), None
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.model_dump(mode="json", by_alias=True)["tools"]:
                name, number = tool["name"], 2
                while name in self._owners:  # two servers may have tools of one name
                    name, number = f"{tool['name']}_{number}", number + 1
                self._owners[name] = (server, tool["name"])
                function = {"name": name, "description": tool.get("description") or "", "parameters": tool["inputSchema"]}
                self.tools.append({"type": "function", "function": function})
            cursor = page.model_dump(by_alias=True).get("nextCursor")
            if not cursor:
                return


def names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tools are called."""
    return [tool["function"]["name"] for tool in tools]
