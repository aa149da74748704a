"""Pictures from strangers: sizes as the model cards have them, pixels as Pillow's, and a sentence for what is none."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from PIL import Image

from fuzz.images import FORMATS, fuzz
from quarrel.errors import RequestError
from quarrel.vision import decode
from quarrel.vision.decode import Decoder
from quarrel.vision.patches import Preparation

QWEN = Preparation(16, 2, 0, 1 << 16, 1 << 22, (0.5,) * 3, (0.5,) * 3, "bicubic")
SQUARE = Preparation(14, 4, 112, 0, 0, (0.5,) * 3, (0.5,) * 3, "bilinear")


@pytest.fixture(name="decoder", scope="module")
def _decoder() -> Iterator[Decoder]:
    decoder = Decoder()
    yield decoder
    decoder.close()


def encoded(form: str, size: tuple[int, int] = (70, 50), **options: object) -> bytes:
    data, (width, height) = io.BytesIO(), size
    pixels = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3) * 7 % 256
    Image.fromarray(pixels.astype(np.uint8)).save(data, form, **options)  # type: ignore[arg-type]
    return data.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("preparation", [QWEN, SQUARE], ids=["shape kept", "square"])
def test_pixels_are_pillows_to_the_last_bit(decoder: Decoder, form: str, preparation: Preparation) -> None:
    data = encoded(form)
    own = Image.open(io.BytesIO(data)).convert("RGB")
    size = preparation.size(*own.size)
    filter = Image.Resampling[preparation.filter.upper()]
    assert np.array_equal(decoder.picture(data, preparation).pixels, np.asarray(own.resize(size, filter)))


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((640, 480), (640, 480)),
        ((100, 50), (384, 192)),
        ((3000, 4000), (1760, 2336)),
        ((1, 150), (32, 3136)),
        ((50, 50), (256, 256)),
    ],
)
def test_sizes_are_those_of_the_model_cards(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert QWEN.size(*size) == wanted


@pytest.mark.parametrize(
    ("size", "gemma4", "mistral"),
    [
        ((640, 480), (912, 672), (644, 504)),
        ((3000, 4000), (672, 912), (1176, 1540)),
        ((1, 150), (48, 9792), (28, 168)),
        ((1541, 10), (9936, 48), (1540, 28)),
        ((50, 50), (768, 768), (56, 56)),
    ],
)
def test_further_sizes_are_the_originals(size: tuple[int, int], gemma4: tuple[int, int], mistral: tuple[int, int]) -> None:
    plain, filter = (0.5,) * 3, QWEN.filter
    assert Preparation(16, 3, 0, 0, 280 * 48 * 48, plain, plain, filter, "below").size(*size) == gemma4
    assert Preparation(14, 2, 0, 0, 1540**2, plain, plain, filter, "within").size(*size) == mistral


def test_a_picture_is_padded_to_a_square_in_the_towers_colour(decoder: Decoder) -> None:
    square = Preparation(14, 1, 56, 0, 0, (0.5,) * 3, (0.5,) * 3, "bicubic", pad=(122, 116, 104))
    pixels = decoder.picture(np.full((10, 40, 3), 7, np.uint8), square).pixels
    assert (pixels[:21] == (122, 116, 104)).all()
    assert (pixels[21:35] == 7).all()
    assert (pixels[35:] == (122, 116, 104)).all()


def test_a_photograph_is_turned_as_its_camera_says(decoder: Decoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decoder.picture(encoded("JPEG", (640, 320), exif=exif), QWEN).pixels.shape == (640, 320, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_opened_photograph_is_turned_as_its_file_is(decoder: Decoder, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded("PNG", (96, 64), exif=exif)
    of_file, opened = (decoder.picture(source, SQUARE).pixels for source in (data, Image.open(io.BytesIO(data))))
    assert np.array_equal(of_file, opened)
    whole = decoder.picture(encoded("PNG", (96, 64)), SQUARE).pixels
    assert np.array_equal(of_file, whole) == (orientation == 1)


def test_an_opened_picture_of_16_bits_is_that_of_its_file(decoder: Decoder) -> None:
    grey = np.linspace(0, 65535, 64 * 96).astype(np.uint16).reshape(64, 96)
    Image.fromarray(grey).save(data := io.BytesIO(), "PNG")
    of_file, opened = (decoder.picture(s, SQUARE).pixels for s in (data.getvalue(), Image.open(data)))
    assert np.array_equal(of_file, opened)
    assert 100 < opened.mean() < 150


def bomb(width: int, height: int, values: bytes = bytes(1000)) -> bytes:
    """A PNG whose head says so many pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(values)) + chunk(b"IEND", b"")


def test_what_cannot_be_decoded_is_a_sentence_and_the_next_picture_is_read(decoder: Decoder) -> None:
    for data, sentence in (
        (bomb(60_000, 60_000), "million"),
        (bomb(10_000, 6_000), "wanted at most 50 million"),
        (bomb(300, 300), "broken or cut short"),
        (encoded("JPEG")[:700], "broken or cut short"),
        (encoded("PNG")[:30], "wanted PNG, JPEG|broken"),
        (encoded("BMP", (1000, 3)), "at most 200 times"),
        (Image.open(io.BytesIO(encoded("PNG", (400, 400))[:900])), "broken or cut short"),
        (Image.open(io.BytesIO(bomb(9_000, 6_000))), "9000 x 6000 pixels, wanted at most 50 million"),
        (b"\xef\xbb\xbf<!-- drawn -->\n<svg/>", "is SVG"),
        (b"<?xml version='1.0'?><feed/>", "wanted PNG, JPEG"),
        ("DATA:image/svg+xml;BASE64,PHN2Zy8+", "is SVG"),
        ("data:image/svg+xml;utf8,<svg/>", "no data:image/...;base64"),
        ("a\0.png", "cannot be read"),
        ("x" * 10_000, "cannot be read"),
    ):
        with pytest.raises(RequestError, match=sentence):
            decoder.picture(data, QWEN)
    assert decoder.picture(encoded("GIF"), SQUARE).pixels.shape == (112, 112, 3)


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_pictures_are_read_or_refused(decoder: Decoder, form: str) -> None:
    found = fuzz(form, 60, 5, decoder)
    assert (found["read"] + found["refused"], found["refused"] > 0) == (60, True)


def test_a_picture_that_takes_too_long_is_left_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, row = Decoder(1), bytes(7000 * 3 + 1)
    try:
        assert decoder.picture(encoded("PNG"), SQUARE).tokens == 4
        monkeypatch.setattr(decode, "DECODE_S", 0.05)
        with pytest.raises(RequestError, match="takes too long to decode: send another"):
            decoder.picture(bomb(7000, 7000, b"".join([row] * 7000)), SQUARE)
        monkeypatch.undo()
        assert decoder.picture(encoded("PNG"), SQUARE).tokens == 4
    finally:
        decoder.close()


def test_callers_do_not_wait_for_each_others_pictures() -> None:
    """Two pictures at once are two processes; one after the other they are one."""
    decoder, both = Decoder(2), Barrier(2, timeout=60)

    class Slow(Preparation):
        """Both are being decoded when either is."""

        def size(self, width: int, height: int) -> tuple[int, int]:
            both.wait()
            return super().size(width, height)

    slow = Slow(**vars(QWEN))
    try:
        alone = [decoder.picture(encoded("PNG"), QWEN).pixels for _ in range(2)]
        assert sum(worker._child is not None for worker in decoder._idle) == 1
        with ThreadPoolExecutor(2) as threads:
            made = list(threads.map(lambda _: decoder.picture(encoded("PNG"), slow).pixels, range(2)))
        assert sum(worker._child is not None for worker in decoder._idle) == 2
        assert all(np.array_equal(each, alone[0]) for each in (*alone, *made))
    finally:
        decoder.close()
