"""Which web pages may call: origins as browsers and desktop shells send them, by patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable

from quarrel.errors import ConfigError

LOCAL = (
    *(f"{scheme}://{host}{port}" for scheme in ("http", "https") for host in ("localhost", "127.0.0.1", "0.0.0.0")
      for port in ("", ":*")),
    *(f"{scheme}://*" for scheme in ("app", "file", "tauri", "vscode-webview", "vscode-file")),
)  # fmt: skip
"""Pages of this machine and the shells of desktop programs, which Ollama lets in too."""
_PATTERN = re.compile(r"(\*|null|file://|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+)/?")


class Origins:
    """A set of origins. `*` in a pattern stands for any characters but a slash, alone for every origin."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ConfigError for what is no pattern of an origin."""
        made = []
        for pattern in patterns:
            found = _PATTERN.fullmatch(pattern)
            if found is None:
                such = "https://example.org, http://localhost:*, app://* or *"
                raise ConfigError(f"the origin {pattern!r} is no origin: wanted one such as {such}")
            made.append(".*" if found[1] == "*" else "[^/]*".join(map(re.escape, found[1].split("*"))))
        self._match = re.compile("|".join(made) or r"(?!)", re.IGNORECASE)

    def __contains__(self, origin: str) -> bool:
        return self._match.fullmatch(origin) is not None
