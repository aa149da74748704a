"""Pictures of one coloured digit or shape, and conversations about them, for a small model that sees."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

SIDE = 48
COLOURS = {
    "red": (215, 35, 35),
    "green": (35, 150, 50),
    "blue": (35, 70, 215),
    "yellow": (235, 215, 40),
    "orange": (240, 135, 20),
    "purple": (135, 45, 160),
    "pink": (245, 130, 180),
    "brown": (120, 75, 40),
}
GROUNDS = {"white": (245, 245, 245), "black": (15, 15, 15), "grey": (128, 128, 128)}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
OF_ALL = (
    "What do you see?",
    "Describe the picture.",
    "What is in the picture?",
    "What is shown here?",
    "Tell me what you see.",
)
OF_NAME = ("What is this?", "What is it?", "Which thing is this?", "What did I draw?")
OF_COLOUR = ("What colour is it?", "Which colour is this?", "What is its colour?", "What color is it?")
OF_GROUND = ("What colour is the background?", "What is behind it?", "On what is it drawn?")
Turn = tuple[str, str]


@dataclass(frozen=True)
class Scene:
    """What a picture shows."""

    name: str
    colour: str
    ground: str

    def answer(self, question: str) -> str:
        if question in OF_ALL:
            return f"{_article(self.colour).capitalize()} {self.colour} {self.name} on {self.ground}."
        if question in OF_NAME:
            return f"{_article(self.name).capitalize()} {self.name}."
        if question in OF_COLOUR:
            return f"{self.colour.capitalize()}."
        return f"{self.ground.capitalize()}."


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" and word != "one" else "a"


def scene(rng: random.Random) -> Scene:
    names = DIGITS if rng.random() < 0.6 else SHAPES
    return Scene(rng.choice(names), rng.choice(list(COLOURS)), rng.choice(list(GROUNDS)))


def drawn(what: Scene, rng: random.Random) -> Image.Image:
    """The scene `[SIDE, SIDE]`, somewhere, of some size, a little turned and in a shade of its colours."""
    near = lambda colour: tuple(min(255, max(0, c + rng.randint(-12, 12))) for c in colour)  # noqa: E731
    ground, ink = near(GROUNDS[what.ground]), near(COLOURS[what.colour])
    size = rng.uniform(0.55, 0.9) * SIDE
    room = (SIDE - size) / 2
    x, y = SIDE / 2 + rng.uniform(-room, room), SIDE / 2 + rng.uniform(-room, room)
    turn = math.radians(rng.uniform(-15, 15))
    scale = 2
    image = Image.new("RGB", (SIDE * scale, SIDE * scale), ground)
    pen = ImageDraw.Draw(image)

    def at(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Points of a figure between -1 and 1 as pixels."""
        c, s = math.cos(turn) * size / 2, math.sin(turn) * size / 2
        return [((x + c * a - s * b) * scale, (y + s * a + c * b) * scale) for a, b in points]

    if what.name in DIGITS:
        glyph = Image.new("L", image.size)
        font = ImageFont.load_default(size * scale * 1.15)
        middle = (x * scale, y * scale)
        ImageDraw.Draw(glyph).text(middle, str(DIGITS.index(what.name)), 255, font, "mm", stroke_width=rng.randint(0, 3))
        image.paste(ink, mask=glyph.rotate(-math.degrees(turn), center=middle, resample=Image.Resampling.BILINEAR))
    elif what.name in ("circle", "ring"):
        box = [(v - size / 2) * scale for v in (x, y)] + [(v + size / 2) * scale for v in (x, y)]
        pen.ellipse(box, fill=ink if what.name == "circle" else None, outline=ink, width=int(size * scale / 7))
    else:
        pen.polygon(at(_FIGURES[what.name]), fill=ink)
    return image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)


_THIRD = 0.3
_FIGURES: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "triangle": [(0.0, -1.0), (0.95, 0.8), (-0.95, 0.8)],
    "star": [
        ((0.4 if i % 2 else 1.0) * math.sin(i * math.pi / 5), -(0.4 if i % 2 else 1.0) * math.cos(i * math.pi / 5))
        for i in range(10)
    ],
    "cross": [
        (-_THIRD, -1.0), (_THIRD, -1.0), (_THIRD, -_THIRD), (1.0, -_THIRD), (1.0, _THIRD), (_THIRD, _THIRD), (_THIRD, 1.0),
        (-_THIRD, 1.0), (-_THIRD, _THIRD), (-1.0, _THIRD), (-1.0, -_THIRD), (-_THIRD, -_THIRD),
    ],
}  # fmt: skip


def conversation(what: Scene, rng: random.Random) -> list[Turn]:
    """Questions about a picture and their answers."""
    kinds = rng.sample((OF_ALL, OF_NAME, OF_COLOUR, OF_GROUND), 3)
    return [(question, what.answer(question)) for question in map(rng.choice, kinds)]
