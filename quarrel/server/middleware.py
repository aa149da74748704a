"""Middleware before every route: Host and Origin, keys, sizes, rates, security headers, request ids and the access log.

Deny by default: a path that is not listed as open needs a key as soon as there are keys, also one that leads nowhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from quarrel.errors import ConfigError
from quarrel.server.callers import Connections, Proxies
from quarrel.server.errors import Refused, error_body
from quarrel.server.keys import Keyring
from quarrel.server.metrics import Metrics
from quarrel.server.origins import LOCAL, Origins
from quarrel.server.settings import Settings, networks
from quarrel.server.shared_limits import Limits
from quarrel.server.shed import GENERATING, Gate, Shed
from quarrel.server.traces import Traces

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/healthz", "/health", "/readyz", "/api/health"})
"""Routes that say nothing but whether the server is up."""
PAGE = frozenset({"/", "/favicon.ico", "/sw.js"})
STATIC = "/static/"
"""The page and its files: the same bytes for everybody, and a browser cannot send a key with a link."""
UPLOADS = "/api/blobs/"
LLAMAS = frozenset({"/chat/completions", "/completions", "/embeddings"})
SHORT = LLAMAS | {"/models", "/responses", "/rerank", "/messages", "/messages/count_tokens"}
"""Routes that clients also ask for without /v1. The former are llama-server's own."""
MAX_HEADERS = 32 << 10
VERSIONS = ("1.0", "1.1")
SCHEMES = ("http", "https")
_NAMES = re.compile(r"[A-Za-z0-9_-]{1,64}(, ?[A-Za-z0-9_-]{1,64}){0,31}")
"""Of headers."""
METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH", "WS"})
KEY_PROTOCOL = "quarrel-key."
"""A browser's WebSocket can send no header but this: the sub-protocol `quarrel-key.<key>`, next to `quarrel`."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; manifest-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types quarrel"
)
_SECURITY = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in _SECURITY.items()]
access = logging.getLogger("quarrel.access")


class Middleware:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: App,
        settings: Settings,
        keys: Keyring,
        limits: Limits,
        metrics: Metrics,
        traces: Traces,
        check_capacity: Gate,
    ) -> None:
        self._app, self._settings, self._keys, self._limits = app, settings, keys, limits
        self._metrics, self._traces, self._check_capacity = metrics, traces, check_capacity
        self._shed = Shed(check_capacity, keys, metrics, _HEADERS, ollama=settings.ollama, llama=settings.llama)
        self._proxies = Proxies(networks(settings.trusted_proxies))
        self._forwarded = Connections(settings.connections_per_address)
        self._origins = Origins((*settings.origins, *(LOCAL if settings.ollama else ())))
        self._short = SHORT - LLAMAS if settings.llama else SHORT
        self._names = {"localhost", settings.host.lower(), *(h.lower() for h in settings.hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if scope["path"] in self._short or scope["path"].startswith("/models/"):
            scope["path"] = "/v1" + scope["path"]
        began = time.perf_counter()
        request_id = "req-" + secrets.token_hex(8)
        state = scope.setdefault("state", {})
        peer = scope["client"][0] if scope.get("client") else "local"
        behind = self._proxies.trust(peer)
        address = self._proxies.caller(peer, _all(scope, b"x-forwarded-for")) if behind else peer
        state["request_id"], state["caller"] = request_id, address
        sent = {"status": 0, "bytes": 0}
        extra = {"X-Request-Id": request_id}

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent["status"] = message["status"]
                have = {name.lower() for name, _ in message["headers"]}
                more = [*_HEADERS, *((k.lower().encode(), v.encode()) for k, v in extra.items())]
                message["headers"] = [*message["headers"], *(h for h in more if h[0] not in have)]
            elif message["type"] == "http.response.body":
                sent["bytes"] += len(message.get("body", b""))
            elif message["type"] == "websocket.accept":
                sent["status"] = 101
            elif message["type"] == "websocket.http.response.start":
                sent["status"] = message["status"]
            await send(message)

        try:
            try:
                reply = self._admit(scope, extra)
            except ConfigError as error:  # the key file is unreadable: closed, never open
                logging.getLogger("quarrel.server").error("%s", error)
                raise Refused(503, "engine_error", "the API keys cannot be read: see the server's log") from error
            if reply is not None:
                await _respond(answer, 200 if self._settings.llama else 204, {}, reply, close=False)
                return
            if scope["path"] not in OPEN and not _is_page(scope):
                await self._limits.charge(state["caller"], "requests", 1)
            if scope["path"] in GENERATING and scope.get("method") == "POST":
                scope["route"] = SimpleNamespace(path=scope["path"])
                self._check_capacity(scope["path"])  # before the body is read and parsed
            method = scope.get("method", "WS")
            place = self._forwarded.counted(address) if behind else nullcontext()
            with place, self._traces.request(method, scope["path"], _headers(scope)) as span:
                # What has an answer has a head, whose body the protocol leaves out.
                inner = {**scope, "method": "GET"} if method == "HEAD" else scope
                await self._app(inner, self._bounded(scope, receive), answer)
                scope["route"] = inner.get("route")
                route = getattr(scope.get("route"), "path", "none")
                self._traces.answered(span, method, route, sent["status"], request_id)
        except Refused as refusal:
            await self._refuse(scope, answer, refusal)
        finally:
            seconds = time.perf_counter() - began
            self._count(scope, sent, seconds)
            _log(scope, request_id, state["caller"], sent, seconds)

    def shed(self, data: bytes, caller: str) -> tuple[bytes, bool] | None:
        """What a full server answers to these bytes of a new request, and whether the connection ends; None: it is read."""
        try:
            answer = self._shed(data)
        except ConfigError:  # the key file is unreadable
            return None
        if answer is None:
            return None
        scope = {"method": "POST", "path": answer.path}
        _log(scope, answer.request_id, caller, {"status": 503, "bytes": len(answer.data)}, 0.0)
        return answer.data, answer.close

    def crowded(self, data: bytes, caller: str, refusal: Refused) -> bytes:
        """What a connection gets whose address holds too many."""
        answer = self._shed.crowded(data, refusal)
        scope = {"method": "other", "path": answer.path}
        _log(scope, answer.request_id, caller, {"status": refusal.status, "bytes": len(answer.data)}, 0.0)
        return answer.data

    def _count(self, scope: Scope, sent: dict[str, int], seconds: float) -> None:
        where = getattr(scope.get("route"), "path", "none")
        method = scope.get("method", "WS")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        received = int(length) if length.isdigit() and len(length) < 16 else 0
        known = method if method in METHODS else "other"
        self._metrics.answered(known, where, sent["status"], seconds, received, sent["bytes"])

    def _admit(self, scope: Scope, extra: dict[str, str]) -> dict[str, str] | None:
        """Raises `Refused`, or returns the headers of a preflight's answer, or None to go on."""
        # Each counts 32 bytes more, as what holds it does.
        if sum(len(name) + len(value) + 32 for name, value in scope["headers"]) > MAX_HEADERS:
            raise Refused(431, "too_large", f"the request's headers are over {MAX_HEADERS} bytes: send less")
        headers = _headers(scope)
        _check_framing(scope, headers)
        self._check_host(scope, headers)
        origin = headers.get("origin")
        known = origin is None or self._known(origin, headers.get("host", ""))
        if origin is not None and (known or not self._settings.llama):  # one that is refused reads why
            extra |= {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
            extra |= {"Access-Control-Expose-Headers": "X-Request-Id, X-Quarrel-Ignored, Retry-After"}
        if scope["type"] == "http" and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            allowed = {"Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, DELETE", "Access-Control-Max-Age": "600"}
            wanted = headers.get("access-control-request-headers", "")  # clients have headers of their own
            named = wanted if _NAMES.fullmatch(wanted) else "Authorization, Content-Type, X-API-Key"
            if self._settings.llama:
                allowed["Access-Control-Allow-Credentials"] = "true"
            return {**allowed, "Access-Control-Allow-Headers": named}
        if origin is not None and not known:
            raise Refused(403, "forbidden_origin", f"the origin {origin[:80]!r} may not call the server: see --origin")
        self._authenticate(scope, headers)
        if scope["type"] == "http":
            self._check_length(headers, self._limit(scope))
        return None

    def _check_host(self, scope: Scope, headers: dict[str, str]) -> None:
        """A page of another site that made its name resolve to this address must not get in (DNS rebinding)."""
        values = [v for k, v in scope["headers"] if k.lower() == b"host"]
        host = headers.get("host", "")
        name = _host_name(host)
        if not values and scope["http_version"] == "1.0":
            return  # which had no such header; a browser speaks a later version
        if len(values) != 1 or name is None:
            raise Refused(400, "invalid_request", "the request has no usable Host header, or more than one")
        if name in self._names or "*" in self._names or _is_loopback(name):
            return
        if not self._settings.loopback and _is_address(name):
            return
        raise Refused(421, "unknown_host", f"this server is not called {name[:80]!r}: add the name with --host-name")

    def _known(self, origin: str, host: str) -> bool:
        return origin in self._origins or (bool(host) and origin.lower() in (f"{s}://{host.lower()}" for s in SCHEMES))

    def _authenticate(self, scope: Scope, headers: dict[str, str]) -> None:
        # Open routes first: keys that cannot be read close the server, but do not make it look dead.
        if (scope["type"] == "http" and (scope["path"] in OPEN or _is_page(scope))) or not self._keys.keys():
            return
        secret = _secret(headers)
        key = None if secret is None else self._keys.find(secret)
        if key is None:
            what = "no API key" if secret is None else "an API key that is unknown, expired or revoked"
            raise Refused(401, "unauthorized", f"{what} came with the request: send Authorization: Bearer <key>")
        scope["state"]["caller"] = f"key {key.id}"

    def _limit(self, scope: Scope) -> int:
        """Bytes of a body; those of model files have no bound but the disk."""
        return 1 << 50 if self._settings.ollama and scope["path"].startswith(UPLOADS) else self._settings.body_limit

    def _check_length(self, headers: dict[str, str], limit: int) -> None:
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            raise Refused(400, "invalid_request", "Content-Length is no number")
        if int(length[:20]) > limit:
            raise _too_large(limit)

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """Counts and times a body that comes in pieces."""
        if scope["type"] != "http":
            return receive
        limit = left = self._limit(scope)
        over, end = False, time.monotonic() + self._settings.body_timeout

        async def pull() -> Message:
            nonlocal left, over, end
            if over:
                return await receive()  # from now on only its end is waited for
            try:
                message = await asyncio.wait_for(receive(), max(end - time.monotonic(), 0.001))
            except TimeoutError as error:
                raise Refused(408, "timeout", "the request's body did not come in time") from error
            left -= len(message.get("body", b""))
            if left < 0:
                raise _too_large(limit)
            if limit > self._settings.body_limit:  # of a large file each piece has the time of a whole body
                end = time.monotonic() + self._settings.body_timeout
            over = not message.get("more_body", False)
            return message

        return pull

    async def _refuse(self, scope: Scope, send: Send, refusal: Refused) -> None:
        if scope["type"] == "websocket":
            send = denying(send)
        self._metrics.errors.labels(refusal.code).inc()
        body = error_body(scope["path"], refusal, ollama=self._settings.ollama, llama=self._settings.llama)
        # A caller who should retry keeps the connection; the rest of a body with a length is read and dropped. One
        # that sent Expect may not send a body.
        unsure = {b"transfer-encoding", b"expect"}
        close = refusal.status not in (429, 503) or any(name in unsure for name, _ in scope["headers"])
        await _respond(send, refusal.status, body, refusal.headers(), close=close)


def denying(send: Send) -> Send:
    """Answers a WebSocket's handshake as HTTP, with a status that says why there is none."""

    async def deny(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return deny


async def _respond(send: Send, status: int, body: dict[str, object], headers: dict[str, str], *, close: bool) -> None:
    raw = b"" if status == 204 else json.dumps(body).encode()
    lines = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    lines += [(b"connection", b"close")] if close else []  # what is left of the request is not read
    lines += [(k.lower().encode(), v.encode()) for k, v in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines if raw else lines[2:]})
    await send({"type": "http.response.body", "body": raw})


def _check_framing(scope: Scope, headers: dict[str, str]) -> None:
    """Refuses what another server may take for another request; the connection ends with the answer."""
    if scope["http_version"] not in VERSIONS:
        raise Refused(505, "invalid_request", f"HTTP/{scope['http_version'][:8]} is not understood, wanted HTTP/1.1")
    if "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0"):
        raise Refused(400, "invalid_request", "Transfer-Encoding comes with Content-Length or HTTP/1.0: leave one out")


def _headers(scope: Scope) -> dict[str, str]:
    return {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}


def _secret(headers: dict[str, str]) -> str | None:
    """From `Authorization: Bearer` or `ApiKey`, `X-API-Key`, or a WebSocket's sub-protocol."""
    kind, _, secret = headers.get("authorization", "").partition(" ")
    if kind.lower() in ("bearer", "apikey") and secret.strip():
        return secret.strip()
    if headers.get("x-api-key"):
        return headers["x-api-key"]
    for protocol in headers.get("sec-websocket-protocol", "").split(","):
        if protocol.strip().startswith(KEY_PROTOCOL):
            return protocol.strip().removeprefix(KEY_PROTOCOL)
    return None


def _is_page(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return False
    path: str = scope["path"]
    return path in PAGE or (path.startswith(STATIC) and ".." not in path)


def _all(scope: Scope, name: bytes) -> str:
    """The values of a header that may come more than once, as one list."""
    return ",".join(v.decode("latin-1") for k, v in scope["headers"] if k.lower() == name)


def _host_name(host: str) -> str | None:
    """The name in a Host header, without its port."""
    if not host or any(c in host for c in "/\\@?# \t") or not host.isascii():
        return None
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        port = port.removeprefix(":") if port else ""
        return name.lower() if bracket and (not port or port.isdigit()) else None
    name, _, port = host.partition(":")
    return name.lower() if name and (not port or port.isdigit()) else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def _too_large(limit: int) -> Refused:
    return Refused(413, "too_large", f"the request's body is over {limit} bytes: send less at once")


def _log(scope: Scope, request_id: str, caller: str, sent: dict[str, int], seconds: float) -> None:
    line = {
        "request": request_id,
        "caller": caller,
        "method": scope.get("method", "WS"),
        "path": scope["path"][:200],
        "status": sent["status"],
        "bytes": sent["bytes"],
        "ms": round(seconds * 1000, 1),
    }
    access.info("%s", json.dumps(line))
