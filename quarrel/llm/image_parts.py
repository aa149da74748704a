"""Which parts of a message's content are images, and a prompt's ids with places for them.

What images need is imported with a projector; texts do without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quarrel.engine.images import PlacedImage

IMAGE_PARTS = ("image", "image_url")


class IdsWithImages(list[int]):
    """A prompt's ids, and where images stand among them."""

    def __init__(self, ids: Sequence[int], images: Sequence[PlacedImage]) -> None:
        super().__init__(ids)
        self.images = tuple(images)


def has_images(messages: object) -> bool:
    """Whether any message has an image among its parts; False also for what are no messages."""
    if not isinstance(messages, list | tuple):
        return False
    return any(
        isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        for part in message["content"]
    )
