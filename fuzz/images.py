"""Mutates sound pictures and decodes what comes of them: a picture or one sentence comes back, and the next one is read.

    python -m fuzz.images [--count 10000] [--seed 0] [--json FILE]

`--count` mutants of each format go through the process that decodes for a server. Bytes are changed, taken out, doubled or
cut off, numbers that are likely to hurt are written anywhere, two pictures are joined; of a PNG every other mutant has its
chunks' sums set right again, so that more than its sums is tried. A mutant that brings the process down is refused like any
other, and counted.
"""

from __future__ import annotations

import argparse
import io
import json
import struct
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from quarrel.errors import RequestError
from quarrel.vision.decode import Decoder
from quarrel.vision.patches import Preparation

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SIZE = Preparation(14, 4, 56, 0, 0, (0.5,) * 3, (0.5,) * 3, "bilinear")
HURTFUL = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
BROUGHT_DOWN, SLOW = "brought down", "too long"


def sound(form: str, seed: int) -> bytes:
    """A picture of one of several modes, sizes and ways to store it."""
    rng, data = np.random.default_rng(seed), io.BytesIO()
    width, height = (int(n) for n in rng.integers(1, 60, 2))
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
    modes = {"PNG": ("RGB", "RGBA", "P", "L", "LA", "1", "I;16"), "JPEG": ("RGB", "L", "CMYK"), "WEBP": ("RGB", "RGBA")}
    image = image.convert(str(rng.choice(modes.get(form, ("RGB", "P", "L")))))
    ways = {"JPEG": "progressive", "WEBP": "lossless"}
    options: dict[str, object] = {ways[form]: bool(seed % 2)} if form in ways else {}
    if form in ("GIF", "WEBP") and seed % 3 == 0:
        options |= {"save_all": True, "append_images": [image.copy()]}
    image.save(data, form, **options)  # type: ignore[arg-type]
    return data.getvalue()


def mutant(data: bytes, form: str, rng: np.random.Generator) -> bytes:
    """Changed in one to four ways."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(max(1, len(changed))))
        kind, length = int(rng.integers(6)), int(rng.integers(1, 17))
        if kind == 0:
            changed[at : at + 1] = bytes([int(rng.integers(256))])
        elif kind == 1:
            number, width = int(rng.choice(HURTFUL)), int(rng.choice([1, 2, 4]))
            order = "big" if rng.integers(2) else "little"
            changed[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, order)  # type: ignore[arg-type]
        elif kind == 2:
            del changed[at : at + length]
        elif kind == 3:
            changed[at:at] = changed[at : at + length]
        elif kind == 4:
            changed[at:] = b"" if rng.integers(4) == 0 else changed[at:]
        else:
            other = sound(form, int(rng.integers(1000)))
            changed[at:] = other[int(rng.integers(len(other))) :]
    return summed(bytes(changed)) if form == "PNG" and rng.integers(2) else bytes(changed)


def summed(data: bytes) -> bytes:
    """A PNG whose chunks' sums are right, as far as it has chunks."""
    made, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        body = data[at + 4 : at + 8 + length]
        if at + 12 + length > len(data):
            break
        made += data[at : at + 4] + body + struct.pack(">I", zlib.crc32(body))
        at += 12 + length
    return bytes(made) + data[at:]


def fuzz(form: str, count: int, seed: int, decoder: Decoder) -> Counter[str]:
    """How many were read, refused, and brought the process down or took too long. Raises for anything else."""
    found: Counter[str] = Counter()
    rng = np.random.default_rng([seed, FORMATS.index(form)])
    for number in range(count):
        data = mutant(sound(form, number % 500), form, rng)
        try:
            picture = decoder.picture(data, SIZE)
            assert picture.pixels.shape == (56, 56, 3)
            found["read"] += 1
        except RequestError as error:
            said = str(error)
            assert said.startswith("an image"), said
            assert "\n" not in said, said
            found["down" if BROUGHT_DOWN in said else "slow" if SLOW in said else "refused"] += 1
    assert decoder.picture(sound(form, 1), SIZE).tokens == 1
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args, decoder, rows, began = parser.parse_args(), Decoder(), {}, time.monotonic()
    try:
        for form in FORMATS:
            rows[form] = dict(fuzz(form, args.count, args.seed, decoder))
            print(form, rows[form], flush=True)
    finally:
        decoder.close()
    record = {"command": f"python -m fuzz.images --count {args.count} --seed {args.seed}", "mutants of each format": rows}
    record |= {"seconds": round(time.monotonic() - began, 1), "pillow": Image.__version__}
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
