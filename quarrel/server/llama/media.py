"""Pictures of the server's own: messages name them by file://, below the folder of --media-path and nowhere else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from quarrel.server.errors import Refused
from quarrel.server.messages import ChatMessage, ImageURL

SCHEME = "file://"
MOST = 64 << 20


def with_files(messages: Sequence[ChatMessage], folder: Path | None) -> None:
    """Puts the bytes of such pictures in the place of their names. Reads the disk."""
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            image = part.image_url
            url = image.url if isinstance(image, ImageURL) else image
            if url is not None and url.startswith(SCHEME):
                part.image_url = ImageURL(url=f"data:;base64,{_read(url, folder)}")


def _read(url: str, folder: Path | None) -> str:
    if folder is None:
        text = "file:// URLs are not allowed unless the server is started with --media-path"
        raise Refused(400, "invalid_request", text, param="messages")
    root = folder.resolve()
    try:
        path = (root / url.removeprefix(SCHEME).lstrip("/")).resolve()
        if path.is_relative_to(root) and path.is_file() and path.stat().st_size <= MOST:
            return base64.b64encode(path.read_bytes()).decode()
    except (OSError, ValueError):
        pass
    raise Refused(400, "invalid_request", f"{url[:100]!r} is no picture below the media path", param="messages")
