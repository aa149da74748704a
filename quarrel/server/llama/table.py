"""A table of routes for Starlette alone: FastAPI takes longer to import than a small model to load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]


class Routes:
    """Routes in their order."""

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def post(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return self._add(path, "POST")

    def get(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return self._add(path, "GET")

    def include(self, other: Routes) -> None:
        self.routes += other.routes

    def _add(self, path: str, method: str) -> Callable[[Endpoint], Endpoint]:
        def add(endpoint: Endpoint) -> Endpoint:
            self.routes.append(Route(path, endpoint, methods=[method]))
            return endpoint

        return add
