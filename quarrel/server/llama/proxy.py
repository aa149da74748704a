"""/cors-proxy: a page's way to MCP servers that it may not call itself, where the server was started with it.

What is sent on are the headers that the caller names for it, and no others: neither keys nor cookies of this server.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quarrel.server.dispatch import Dispatcher
from quarrel.server.errors import Refused
from quarrel.server.llama.table import Routes

PREFIX = "x-llama-server-proxy-header-"
SECONDS = 600.0
PIECE = 1 << 16
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "server", "date", "upgrade", "trailer"}
_KINDS: dict[str, type[http.client.HTTPConnection]] = {
    "http": http.client.HTTPConnection,
    "https": http.client.HTTPSConnection,
}


def routes(dispatcher: Dispatcher) -> Routes:
    """GET and POST."""
    router = Routes()

    async def proxied(request: Request) -> Response:
        """What the address in `url` answers."""
        if not dispatcher.settings.proxy:
            raise Refused(403, "forbidden", "this feature is disabled: start the server with --ui-mcp-proxy")
        url, body = request.query_params.get("url", ""), await request.body()
        connection = _connection(url)
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {k[len(PREFIX) :]: v for k, v in request.headers.items() if k.startswith(PREFIX) and k != PREFIX}

        def begin() -> http.client.HTTPResponse:
            connection.request(request.method, path, body or None, headers)
            return connection.getresponse()

        try:
            answer = await asyncio.to_thread(begin)
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            raise Refused(502, "bad_gateway", f"{url[:100]!r} gave no answer ({type(error).__name__})") from None

        async def pieces() -> AsyncIterator[bytes]:
            try:
                while piece := await asyncio.to_thread(answer.read1, PIECE):
                    yield piece
            finally:
                connection.close()

        back = {k: v for k, v in answer.getheaders() if k.lower() not in _HOP}
        if answer.status in (204, 304):
            connection.close()
            return Response(status_code=answer.status, headers=back)
        return StreamingResponse(pieces(), answer.status, headers=back)

    router.get("/cors-proxy")(proxied)
    router.post("/cors-proxy")(proxied)
    return router


def _connection(url: str) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(url)
        if parts.scheme in _KINDS and parts.hostname and not parts.password:
            return _KINDS[parts.scheme](parts.hostname, parts.port, timeout=SECONDS)
    except ValueError:
        pass
    raise Refused(400, "invalid_request", f"url is {url[:100]!r}, wanted an address of http or https", param="url")
