"""A picture upright and in RGB: in the process that decodes, and what a caller has opened with Pillow, where it is."""

from __future__ import annotations

from PIL import Image, ImageOps

MAX_PIXELS = 50_000_000


class Refused(Exception):
    """Why a picture is not decoded, as the end of a sentence."""


def upright(image: Image.Image) -> Image.Image:
    """Decoded now if it has only been opened, upright as its camera says, in RGB. Raises Refused."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise Refused(f"has {width} x {height} pixels, wanted at most {MAX_PIXELS // 1_000_000} million")
    try:
        image.load()
        deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
        image = ImageOps.exif_transpose(image)
        if deep:
            image = image.point(lambda value: value / 256).convert("L")
        return image.convert("RGB")
    except MemoryError:
        raise Refused("needs too much memory") from None
    except Exception as error:
        raise Refused(f"is broken or cut short ({type(error).__name__})") from None
