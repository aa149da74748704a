"""Images among a request's tokens: where they stand, what each of their tokens rotates by and sees, and their rows.

An image is encoded once, and its rows are kept within a budget. Images that running sequences still have before them are
encoded together. For the prefix cache a token of an image is a number that depends on the whole image and on its place
in it, so that two texts begin alike only where their images are the same.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quarrel.ops.step import Rows

Array = npt.NDArray[Any]
_SECRET = secrets.token_bytes(32)
ROW_BUDGET = 512 << 20
"""Bytes of encoded images that are kept."""


@dataclass(frozen=True)
class SightRules:
    """How a model takes images. axes: positions of a token that rotates, 1 for its own alone; both_ways: an image's tokens
    see its later ones, so a launch ends with none half done; width: numbers of a token's row."""

    axes: int
    both_ways: bool
    width: int


@dataclass(frozen=True)
class PlacedImage:
    """An image in a prompt: its first token, the rows and columns of its tokens, its digest, and what encodes it."""

    start: int
    grid: tuple[int, int]
    digest: bytes
    pixels: Any = field(repr=False)

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def end(self) -> int:
        return self.start + self.tokens


class EncodesImages(Protocol):
    """A tower. Called on the engine's thread."""

    def encode(self, images: Sequence[PlacedImage]) -> Sequence[Rows]:
        """Each image's rows, `[tokens, width]` float32, where the tower has made them."""

    def close(self) -> None: ...


class Sight:
    """The images of one prompt of so many tokens."""

    def __init__(self, images: Sequence[PlacedImage], tokens: Sequence[int], rules: SightRules) -> None:
        self.images, self.rules, self._n = tuple(images), rules, len(tokens)
        at = np.arange(self._n, dtype=np.int32)
        self._see_to = at.copy()
        places, keys, behind = np.repeat(at[:, None], rules.axes, 1), list(tokens), 0
        for image in images:
            rows, columns = image.grid
            each = np.arange(image.tokens, dtype=np.int32)
            self._see_to[image.start : image.end] = image.end - 1
            keys[image.start : image.end] = _keys(image)
            if rules.axes > 1:
                # A text goes on behind the longer side of an image that stands in front of it.
                first = image.start - behind
                places[image.start : image.end] = first + np.stack([0 * each, each // columns, each % columns], 1)
                behind = image.end - first - max(rows, columns)
                places[image.end :] = at[image.end :, None] - behind
        self._places, self._keys, self._behind = places, keys, behind

    def keyed(self, tokens: list[int]) -> list[int]:
        """A sequence's tokens as the prefix cache compares them."""
        return [*self._keys, *tokens[self._n :]]

    def places(self, start: int, count: int) -> Array:
        """`[count, axes]` of tokens from `start` on."""
        past = np.arange(max(start, self._n), start + count, dtype=np.int32) - self._behind
        return np.concatenate([self._places[start : start + count], np.repeat(past[:, None], self.rules.axes, 1)])

    def see_to(self, start: int, count: int) -> Array:
        """`[count]`, the last position that each sees."""
        past = np.arange(max(start, self._n), start + count, dtype=np.int32)
        return np.concatenate([self._see_to[start : start + count], past])

    def whole(self, start: int, count: int) -> int:
        """As much of a launch of so many tokens as cuts no image whose tokens see each other."""
        end = start + count
        for image in self.images if self.rules.both_ways else ():
            if image.start < end < image.end:
                return max(0, image.start - start)
        return count

    def least(self, start: int) -> int:
        """The fewest tokens that a launch from there on may have."""
        whole = self.images if self.rules.both_ways else ()
        return next((image.tokens for image in whole if image.start == start), 1)

    def pieces(self, start: int, end: int) -> int:
        """Into how many launches these tokens could be split."""
        whole = self.between(start, end) if self.rules.both_ways else ()
        return end - start - sum(image.tokens - 1 for image in whole)

    def between(self, start: int, end: int) -> Iterable[PlacedImage]:
        return (image for image in self.images if image.start < end and image.end > start)


def _keys(image: PlacedImage) -> list[int]:
    """Numbers below zero, which no token has."""
    digest, count = blake2b(image.digest, key=_SECRET).digest(), image.tokens
    made = (blake2b(digest + i.to_bytes(4, "big"), digest_size=8).digest() for i in range(count))
    return [-1 - (int.from_bytes(each, "big") >> 1) for each in made]


class ImageRows:
    """Rows by digest, the least recently used forgotten first. width: numbers of a row; budget: bytes."""

    def __init__(self, encoder: EncodesImages, width: int, budget: int = ROW_BUDGET) -> None:
        self._encoder, self.width, self._budget = encoder, width, budget
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()
        self.encoded = 0

    def of(self, wanted: Sequence[PlacedImage], soon: Iterable[PlacedImage]) -> dict[bytes, Rows]:
        """The rows of these; what is encoded for them is encoded together with what will be wanted soon, as far as there is
        room to keep it until then."""
        missing = {image.digest: image for image in wanted if image.digest not in self._kept}
        if missing:
            needed = {image.digest: image for image in wanted}
            room = self._budget - 4 * self.width * sum(image.tokens for image in needed.values())
            for image in soon:
                if image.digest not in needed:
                    room -= 4 * self.width * image.tokens
                    if room < 0:
                        break
                    needed[image.digest] = image
            new = [image for digest, image in needed.items() if digest not in self._kept]
            self._kept |= {image.digest: rows for image, rows in zip(new, self._encoder.encode(new), strict=True)}
            self.encoded += len(new)
            for digest in reversed(needed):
                self._kept.move_to_end(digest)
        for image in wanted:
            self._kept.move_to_end(image.digest)
        found = {image.digest: self._kept[image.digest] for image in wanted}
        while len(self._kept) > 1 and sum(rows.nbytes for rows in self._kept.values()) > self._budget:
            self._kept.popitem(last=False)
        return found

    def close(self) -> None:
        self._encoder.close()
