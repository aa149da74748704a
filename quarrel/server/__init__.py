"""The server: HTTP, WebSocket and the web page, over loaded models."""

from quarrel.server.app import Server, build
from quarrel.server.keys import Keyring
from quarrel.server.run import serve
from quarrel.server.settings import Rates, Settings

__all__ = ["Keyring", "Rates", "Server", "Settings", "build", "serve"]
