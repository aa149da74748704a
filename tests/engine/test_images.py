"""Rows of images: encoded together as far as they can be kept, once each, and handed on in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quarrel.engine.images import ImageRows, PlacedImage
from quarrel.ops.step import Joined, StepInputs

WIDTH = 3


class Encoder:
    """Counts what it is given."""

    def __init__(self) -> None:
        self.calls: list[list[bytes]] = []

    def encode(self, images: Sequence[PlacedImage]) -> list[np.ndarray]:
        self.calls.append([image.digest for image in images])
        return [np.full((image.tokens, WIDTH), image.digest[0], np.float32) for image in images]

    def close(self) -> None:
        pass


def placed(digest: int, tokens: int = 4) -> PlacedImage:
    return PlacedImage(0, (1, tokens), bytes([digest]), None)


def test_what_comes_soon_is_encoded_ahead_as_far_as_it_can_be_kept() -> None:
    encoder, images = Encoder(), [placed(i) for i in range(6)]
    rows = ImageRows(encoder, WIDTH, budget=3 * 4 * 4 * WIDTH)
    for first in range(6):
        found = rows.of([images[first]], images[first:])
        assert found[bytes([first])][0, 0] == first
    # Three at a time, and none of them twice.
    assert encoder.calls == [[b"\0", b"\1", b"\2"], [b"\3", b"\4", b"\5"]]
    assert rows.encoded == 6


def test_images_beyond_the_budget_are_encoded_all_the_same() -> None:
    encoder = Encoder()
    rows = ImageRows(encoder, WIDTH, budget=1)
    assert set(rows.of([placed(1), placed(2)], [placed(3)])) == {b"\1", b"\2"}
    assert encoder.calls == [[b"\1", b"\2"]]


def test_pieces_are_one_array_to_a_step_on_the_host() -> None:
    none, parts = np.zeros(0, np.int32), [np.full((2, WIDTH), 1, np.float32), np.full((1, WIDTH), 2, np.float64)]
    joined = Joined(parts)
    assert len(joined) == 3
    images = StepInputs(none, none, none, none, none, none, none, images=joined).named("images")
    assert images is not None
    assert images.dtype == np.float32
    assert images.tolist() == [[1] * 3, [1] * 3, [2] * 3]
