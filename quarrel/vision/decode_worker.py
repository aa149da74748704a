"""The process that decodes pictures: they come from strangers, and decoders have had many holes.

Run as a script by `decode.py`, never imported by it; needs nothing but the standard library, Pillow, `sandbox.py` and
`upright.py`. It has no file, no child, so much memory and so much time; whatever a picture brings down is this process.

A picture is four frames: its head in JSON with its bytes behind a line feed, the reply in JSON with its size; the size
wanted in JSON, and the pixels, three bytes each.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import warnings
from typing import Any

from PIL import Image, ImageOps, MpoImagePlugin, TiffImagePlugin  # noqa: F401  (Pillow would import the last two late)

from quarrel.child.sandbox import limit_cpu, limit_resources, received, send
from quarrel.vision.upright import MAX_PIXELS, Refused, upright

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MEMORY_BYTES = 1 << 30
CPU_S = 10.0


def opened(head: dict[str, Any], data: bytes) -> Image.Image:
    """The picture, upright and in RGB; of several frames the first."""
    if "raw" in head:
        return Image.frombytes("RGB", tuple(head["raw"]), data)
    image: Image.Image
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise Refused(f"has more than {MAX_PIXELS // 1_000_000} million pixels") from None
    except Exception:
        raise Refused("is not to be read as one: wanted PNG, JPEG, WebP, GIF or BMP") from None
    try:
        image.seek(0)
    except Exception as error:
        raise Refused(f"is broken or cut short ({type(error).__name__})") from None
    return upright(image)


def warm_up() -> None:
    """Loads every decoder while files can still be opened."""
    for name in FORMATS:
        with contextlib.suppress(Exception):
            data = io.BytesIO()
            Image.new("RGB", (2, 2)).save(data, name)
            opened({}, data.getvalue()).resize((3, 3), Image.Resampling.BICUBIC)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    warm_up()
    limit_resources(MEMORY_BYTES)
    while (request := received()) is not None:
        head, data = request.split(b"\n", 1)
        limit_cpu(CPU_S)
        try:
            image = opened(json.loads(head), data)
        except Refused as reason:
            send(json.dumps({"error": str(reason)}).encode())
            continue
        send(json.dumps({"size": image.size}).encode())
        wanted = received()
        if wanted is None:
            return
        to = json.loads(wanted)
        if to["size"] is not None and tuple(to["size"]) != image.size:
            size, method = tuple(to["size"]), Image.Resampling[to["filter"].upper()]
            image = ImageOps.pad(image, size, method, tuple(to["pad"])) if to["pad"] else image.resize(size, method)
        limit_cpu(0)
        send(b"" if to["size"] is None else image.tobytes())


if __name__ == "__main__":
    main()
