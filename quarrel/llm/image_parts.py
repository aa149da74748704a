"""Which parts of a message's content are images, and a prompt's ids with places for them.

What images need is imported with a projector; texts do without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quarrel.engine.images import PlacedImage
from quarrel.errors import RequestError

IMAGE_PARTS = ("image", "image_url")
OTHER_MEDIA = ("audio", "audio_url", "input_audio", "video", "video_url", "input_video")


class IdsWithImages(list[int]):
    """A prompt's ids, and where images stand among them."""

    def __init__(self, ids: Sequence[int], images: Sequence[PlacedImage]) -> None:
        super().__init__(ids)
        self.images = tuple(images)


def has_images(messages: object) -> bool:
    """Whether any message has an image among its parts; False also for what are no messages."""
    return any(part.get("type") in IMAGE_PARTS for part in _parts(messages))


def check_media(messages: object) -> None:
    """Raises RequestError for sound and film, which a template would pass over."""
    for part in _parts(messages):
        if part.get("type") in OTHER_MEDIA:
            raise RequestError(f"a message holds a part of type {part['type']!r}, wanted text or an image", "messages")


def _parts(messages: object) -> Iterator[Mapping[str, Any]]:
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, Mapping) and isinstance(part.get("type"), str):
                yield part
