"""The server: HTTP, WebSocket and the web page, over loaded models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quarrel.server.app import Server, build
    from quarrel.server.keys import Keyring
    from quarrel.server.run import serve
    from quarrel.server.settings import Rates, Settings

__all__ = ["Keyring", "Rates", "Server", "Settings", "build", "serve"]

_HOMES = {"Server": "app", "build": "app", "Keyring": "keys", "serve": "run", "Rates": "settings", "Settings": "settings"}


def __getattr__(name: str) -> object:
    # Imported when first asked for: API keys are made without FastAPI, which takes a second.
    if name not in _HOMES:
        raise AttributeError(f"module 'quarrel.server' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"quarrel.server.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
