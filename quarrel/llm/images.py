"""Images in messages: found, decoded, given their places among a prompt's tokens, and encoded by the model's tower.

A part of a message's content that is an image is one of

    {"type": "image", "image": X}       X a path, bytes, a data URL, a PIL image, an array [H, W, 3] uint8
    {"type": "image", "data": B}        B the bytes in base64, as JSON carries them
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}      (OpenAI's)

A URL of http or https in the place of a path or of a data URL is fetched where the model was loaded with
`allow_image_urls`. Every protocol makes one of these of its own.

A message with images becomes a text with a mark for each, which no caller can guess, so that no template needs to know of
images; marks in the rendered text become the model's tokens.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from quarrel.engine.images import ROW_BUDGET, PlacedImage, SightRules
from quarrel.errors import QuarrelError, RequestError, UnsupportedModel
from quarrel.gguf import GGUFFile
from quarrel.llm.image_parts import IMAGE_PARTS, IdsWithImages, has_images
from quarrel.models import EncoderSpec, Keys, ModelSpec
from quarrel.models.mixers import Attention
from quarrel.models.projectors import BREAK, PARTS, Tower
from quarrel.models.tower import assemble_tower, position_table, positions, read_tower, seeing, tower_tensors
from quarrel.ops.step import Backend, ComputeChoice, KeepsRows, Limits, Rows, Step, StepInputs
from quarrel.tokenizer import Tokenizer
from quarrel.tokenizer.special import Trust
from quarrel.tokenizer.tokenizer import checked_text
from quarrel.vision.decode import MAX_BYTES, Decoder, from_base64
from quarrel.vision.fetch import SECONDS, fetched, is_address
from quarrel.vision.patches import Picture, Preparation, in_groups, places_of

log = logging.getLogger("quarrel")
Array = npt.NDArray[Any]
Message = Mapping[str, object]
MOST_IMAGES = 64
MOST_PATCHES = 1 << 14
"""Of one step of a tower."""
MOST_ARRANGED = 4
MOST_THREADS = 8
"""That make patches of pixels: NumPy lets others run meanwhile."""
_MARK = re.compile("\ue0f0([0-9a-f]{16})-([0-9]+)\ue0f1")


@dataclass(frozen=True)
class Layout:
    """What stands around an image's tokens: a text, a control token, behind them another one and a text; any may be empty.
    `pad` is the token that stands for each, if the vocabulary has it."""

    before: str
    start: str
    pad: str
    end: str
    after: str


LAYOUTS: Mapping[str, Layout] = {
    "qwen3vl_merger": Layout("", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", ""),
    "qwen2.5vl_merger": Layout("", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", ""),
    "gemma3": Layout("\n\n", "<start_of_image>", "<image_soft_token>", "<end_of_image>", "\n\n"),
    "gemma4v": Layout("", "<|image>", "<|image|>", "<image|>", ""),
    "pixtral": Layout("", "", "[IMG]", "[IMG_END]", ""),
    "mlp": Layout("", "", "<image>", "", ""),
}
BILINEAR = ("gemma3",)
"""Projectors whose images are resized so; all others bicubic."""


Decoded = dict[int, Picture]
Span = tuple[str, Trust]


class Eyes:
    """A projector file, opened for a model, and the process that decodes its pictures."""

    def __init__(self, file: GGUFFile, *, urls: bool = False) -> None:
        self._urls = urls
        self.file, self.tensors = file, tower_tensors(file)
        self.tower: Tower = read_tower(file, self.tensors)
        self.preparation = preparation_of(self.tower)
        self.layout = LAYOUTS[self.tower.projector]
        self.decoder = Decoder()

    def seeing(self, spec: ModelSpec | EncoderSpec, metadata: Any) -> ModelSpec:
        """The model with room for images. Raises UnsupportedModel where they do not fit it."""
        if isinstance(spec, EncoderSpec):
            raise UnsupportedModel("an encoder of texts sees no images: leave mmproj out")
        return seeing(spec, Keys(metadata, spec.architecture), self.tower)

    def rules(self, spec: ModelSpec) -> SightRules:
        """How the engine places them."""
        mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
        axes = max((m.rope.axes for m in mixers if m.rope is not None), default=1)
        return SightRules(axes, any(m.image_spans for m in mixers), spec.image_parts * spec.n_embd)

    @property
    def fixed_tokens(self) -> int:
        """Of an image, where all have as many; else 0."""
        return (self.tower.side // self.tower.patch // self.tower.merge) ** 2

    def patches(self, n_ctx: int) -> int:
        """Of one step: of the largest image that a context holds."""
        most = min(max(MOST_PATCHES, self.fixed_tokens * self.tower.group), n_ctx * self.tower.group)
        return most + self.tower.classes

    def nbytes(self, n_ctx: int, keeps_rows: bool = False) -> int:
        """Device memory that the tower takes, about, with the rows of images if they stay there."""
        widths = 16 * self.tower.n_embd + 2 * self.tower.patch_size
        rows = ROW_BUDGET if keeps_rows else 0
        return sum(t.nbytes for t in self.file.tensors.values()) + 4 * widths * self.patches(n_ctx) + rows

    def encoder(self, backend: Backend, compute: ComputeChoice, n_ctx: int) -> TowerEncoder:
        """Compiles the tower."""
        most = self.patches(n_ctx)
        limits = Limits(most, max(1, most // self.tower.group), 1, 1, 16)
        step = backend.compile(assemble_tower(self.tower, self.tensors), self.tensors, limits, compute)
        return TowerEncoder(step, self.tower, self.file)

    def ids(self, messages: Sequence[Message], tokenizer: Tokenizer, decoded: Decoded, **options: Any) -> IdsWithImages:
        """A chat's ids with a place for each token of its images. decoded: pictures by the parts that they are, which other
        beginnings of the same messages share. Raises RequestError for pictures that are none."""
        nonce, sources = secrets.token_hex(8), list[Mapping[str, Any]]()
        texts = [_marked(message, nonce, sources) for message in messages]
        pictures = self._pictures(sources, decoded)
        ids = tokenizer.apply_chat(texts, rewrite=self._unmarked(nonce, tokenizer), **options)
        if len({id for id in ids if id < 0}) < len(pictures):
            raise RequestError("the chat template changes the places of images: choose another template", "template")
        return self._placed(ids, pictures, tokenizer)

    def prompt_ids(self, parts: Sequence[Any], tokenizer: Tokenizer, parse_special: bool) -> IdsWithImages:
        """As `ids`, of a plain prompt in parts, with an image among them."""
        nonce, sources = secrets.token_hex(8), list[Mapping[str, Any]]()
        text = checked_text(str(_marked({"content": parts}, nonce, sources)["content"]))
        pictures, trust = self._pictures(sources, {}), Trust.TEMPLATE if parse_special else Trust.REPLY
        ids = tokenizer.encode_spans(self._unmarked(nonce, tokenizer)([(text, trust)]))
        return self._placed(ids, pictures, tokenizer)

    def _pictures(self, sources: Sequence[Mapping[str, Any]], decoded: Decoded) -> list[Picture]:
        if len(sources) > MOST_IMAGES:
            raise RequestError(f"the messages hold {len(sources)} images, wanted at most {MOST_IMAGES}", "messages")
        new = {id(part): _source(part) for part in sources if id(part) not in decoded}
        for key, source in self._fetched(new).items():
            decoded[key] = self._placeable(self.decoder.picture(source, self.preparation))
        return [decoded[id(part)] for part in sources]

    def _placeable(self, picture: Picture) -> Picture:
        longest, tower = max(picture.grid) * self.tower.merge, self.tower
        if tower.places == "by axis" and longest > tower.grid:
            said = f"an image is {longest} patches long, and the model has places for {tower.grid}"
            raise RequestError(f"{said}: send one that is nearer to a square", "image")
        return picture

    def _fetched(self, sources: Mapping[int, object]) -> dict[int, object]:
        """With bytes in the place of addresses: all together within the limits of one."""
        made, rest, until = dict(sources), MAX_BYTES, time.monotonic() + SECONDS
        for key, source in made.items():
            if is_address(source):
                if not self._urls:
                    raise RequestError("an image's URL is not fetched: send it as data:image/...;base64,...", "messages")
                data = made[key] = fetched(str(source), rest, max(0.0, until - time.monotonic()))
                rest -= len(data)
        return made

    def _unmarked(self, nonce: str, tokenizer: Tokenizer) -> Callable[[Sequence[Span]], list[Span]]:
        """What puts an image's surroundings, with a gap between them, where a text has its mark."""
        around = self.layout
        for name in (around.start, around.end):
            if name and tokenizer.token_id(name) is None:
                raise UnsupportedModel(f"the vocabulary has no {name}: this is no model that sees")

        def spans(text: str, trust: Trust) -> Iterator[Span]:
            at = 0
            for mark in _MARK.finditer(text):
                if mark[1] == nonce:
                    yield text[at : mark.start()] + around.before, trust
                    yield around.start + tokenizer.gap(int(mark[2])) + around.end, Trust.TEMPLATE
                    yield around.after, trust
                    at = mark.end()
            yield text[at:], trust

        return lambda given: [span for text, trust in given for span in spans(text, trust)]

    def _placed(self, ids: list[int], pictures: Sequence[Picture], tokenizer: Tokenizer) -> IdsWithImages:
        pad = tokenizer.token_id(self.layout.pad)
        made, placed = list[int](), list[PlacedImage]()
        for id in ids:
            if id >= 0:
                made.append(id)
                continue
            picture = pictures[-1 - id]
            placed.append(PlacedImage(len(made), picture.placed, picture.digest(), picture))
            made += [0 if pad is None else pad] * picture.tokens
        return IdsWithImages(made, placed)


class TowerEncoder:
    """A compiled tower (`engine.images.EncodesImages`)."""

    def __init__(self, step: Step, tower: Tower, file: GGUFFile) -> None:
        self._step, self._tower, self._table = step, tower, position_table(file, tower)
        self._behind = file.array(f"v.{BREAK}").reshape(1, 1, -1) if tower.breaks else None
        self._arranged: OrderedDict[tuple[tuple[int, int], ...], Arranged] = OrderedDict()
        """The newest last: images' sizes repeat."""
        self._equal: tuple[tuple[int, int], Array] | None = None
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "quarrel-patches")

    def encode(self, images: Sequence[PlacedImage]) -> list[Rows]:
        """In as few steps as hold them, equally full: steps of one size have one arrangement, which is on the device."""
        pictures = [image.pixels for image in images]
        most, sizes = self._step.limits.max_tokens, [self._rows(picture) for picture in pictures]
        share = -(-sum(sizes) // -(-sum(sizes) // most))
        rows: list[Rows] = []
        group, taken = list[Picture](), 0
        for picture, size in zip(pictures, sizes):
            if group and (taken >= share or taken + size > most):
                rows += self._encode(group)
                group, taken = [], 0
            group.append(picture)
            taken += size
        return [*rows, *self._encode(group)]

    def close(self) -> None:
        self._threads.shutdown()
        self._step.close()

    def _rows(self, image: Picture) -> int:
        rows, columns = image.grid
        return rows * columns * self._tower.group + self._tower.classes

    def _encode(self, images: Sequence[Picture]) -> Sequence[Rows]:
        shapes = tuple(image.shape for image in images)
        if shapes not in self._arranged:
            self._arranged[shapes] = arranged(self._tower, self._table, shapes, self._stream(shapes))
            if len(self._arranged) > MOST_ARRANGED:
                self._arranged.popitem(last=False)
        self._arranged.move_to_end(shapes)
        inputs, grids = self._arranged[shapes].of(images, self._threads), [image.grid for image in images]
        if isinstance(self._step, KeepsRows):
            return self._step.keep(inputs, grids, self._behind)
        out = self._step(inputs, "hidden")
        parts = [rows for name in PARTS if (rows := getattr(out, name)) is not None]
        ends = np.cumsum([0, *(rows * columns for rows, columns in grids)])
        # Each image has memory of its own: it is forgotten by itself.
        each = (np.concatenate([rows[start:end] for rows in parts], 1) for start, end in pairwise(ends))
        return [self._broken(part, grid) for part, grid in zip(each, grids, strict=True)]

    def _stream(self, shapes: Sequence[tuple[int, int]]) -> Array | None:
        """Of images of one shape, the beginning of one array for all numbers of them: a device that has it has all."""
        shape, count = shapes[0], len(shapes)
        if len(set(shapes)) > 1:
            return None
        each = self._tower.classes + shape[0] * shape[1]
        if self._equal is None or self._equal[0] != shape or len(self._equal[1]) < count * each:
            most = max(1, self._step.limits.max_tokens // each)
            copies = max(count, min(most, 1 << (count - 1).bit_length()))
            self._equal = shape, _streams(self._tower, self._table, [shape] * copies)
        return self._equal[1][: count * each]

    def _broken(self, part: Array, grid: tuple[int, int]) -> Array:
        if self._behind is None:
            return part
        rows = part.reshape(*grid, -1)
        rows = np.concatenate([rows, np.broadcast_to(self._behind, (len(rows), 1, rows.shape[-1]))], 1)
        return np.ascontiguousarray(rows.reshape(-1, rows.shape[-1])[:-1], np.float32)


def preparation_of(tower: Tower) -> Preparation:
    """How a tower wants its images."""
    t = tower
    sizes = (t.patch, t.merge, t.side, t.min_pixels, t.max_pixels, t.mean, t.std)
    return Preparation(*sizes, "bilinear" if t.projector in BILINEAR else "bicubic", t.shape, t.pad, t.breaks)


@dataclass(frozen=True)
class Arranged:
    """A tower's step for images of these sizes, all but the patches."""

    inputs: StepInputs
    starts: Array
    """Where each image's patches begin."""
    orders: Sequence[Array | None]
    """In which order they stand, if not in their own."""
    classes: int
    """Tokens before them that are no patches."""

    def of(self, images: Sequence[Picture], threads: Executor | None = None) -> StepInputs:
        """The step that encodes these. threads: what fills in several images at once."""
        values = np.empty((len(self.inputs.ids), 3 * images[0].preparation.patch ** 2), np.float32)

        def fill(place: int) -> None:
            start, image, order = self.starts[place], images[place], self.orders[place]
            end = start + image.shape[0] * image.shape[1]
            values[start - self.classes : start] = 0
            if order is None:
                image.put(values[start:end])
            else:
                values[start:end] = image.patches()[order]

        places = range(len(images))
        if threads is None or len(images) == 1:
            for place in places:
                fill(place)
        else:
            list(threads.map(fill, places))
        return replace(self.inputs, patches=values)


def tower_inputs(tower: Tower, table: Array | None, images: Sequence[Picture]) -> StepInputs:
    """A step that encodes these."""
    return arranged(tower, table, [image.shape for image in images]).of(images)


def arranged(tower: Tower, table: Array | None, shapes: Sequence[tuple[int, int]], stream: Array | None = None) -> Arranged:
    """The step of images of so many rows and columns of patches. Each begins with its class token, where there is one.
    Groups stand window by window, where there are windows, and `out_rows` row by row. stream: of these, if it is known."""
    first = tower.classes
    starts = np.cumsum([0, *(first + rows * columns for rows, columns in shapes)]).astype(np.int32)
    windows, orders = list[Array](), list[Array | None]()
    none = np.zeros(starts[-1], np.int32)
    places, out_rows = np.zeros((starts[-1], 2), np.int32), list[Array]()
    for start, end, shape in zip(starts, starts[1:], shapes):
        order, ends = _windows(tower, *(side // tower.merge for side in shape))
        at, rows = places_of(*shape, tower.merge), _order(tower, order)
        places[start + first : end] = at if rows is None else at[rows]
        orders.append(rows)
        windows.append(start + tower.group * ends)
        out_rows.append(start + first + tower.group * np.argsort(order))
    window_start, seqs, query_start = None, len(shapes), starts
    if tower.window:
        # As many sequences as windows: those behind the images are empty.
        window_start = np.concatenate([[0], *windows]).astype(np.int32)
        seqs = len(window_start) - 1
        query_start = np.pad(starts, (0, seqs - len(shapes)), mode="edge")
    inputs = StepInputs(
        ids=none,
        positions=none,
        slots=none,
        query_start=query_start,
        kv_len=np.ones(seqs, np.int32),
        block_table=np.zeros((seqs, 1), np.int32),
        out_rows=np.concatenate(out_rows).astype(np.int32),
        stream=_streams(tower, table, shapes) if stream is None else stream,
        places=places,
        window_start=window_start,
    )
    return Arranged(inputs, starts[:-1] + first, orders, first)


def _streams(tower: Tower, table: Array | None, shapes: Sequence[tuple[int, int]]) -> Array:
    """What the patches of such images, and their class tokens, are before they have been looked at."""
    known: dict[tuple[int, int], Array] = {}
    for shape in shapes:
        if shape not in known:
            order, _ = _windows(tower, *(side // tower.merge for side in shape))
            embedded, rows = in_groups(positions(tower, table, *shape), tower.merge), _order(tower, order)
            parts = [embedded if rows is None else embedded[rows]]
            if tower.classes:
                none = np.zeros((1, tower.n_embd), np.float32)
                parts.insert(0, none if table is None else table[:1])
            known[shape] = np.concatenate(parts)
    return np.concatenate([known[shape] for shape in shapes], dtype=np.float32)


def _order(tower: Tower, groups: Array) -> Array | None:
    """The order of patches whose groups have this one; None where it is their own."""
    return (tower.group * groups[:, None] + np.arange(tower.group)).reshape(-1) if tower.window else None


def _windows(tower: Tower, rows: int, columns: int) -> tuple[Array, Array]:
    """The groups of an image in their order, window by window, and how many there are up to each window's end."""
    at = np.arange(rows * columns)
    size = tower.window or max(rows, columns)
    window = at // columns // size * -(-columns // size) + at % columns // size
    return np.argsort(window, kind="stable"), np.cumsum(np.bincount(window))


def _marked(message: Message, nonce: str, sources: list[Mapping[str, Any]]) -> Message:
    """The message with a text for content, and its images among the sources."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple) or not has_images([message]):
        return message
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in IMAGE_PARTS:
            texts.append(f"\ue0f0{nonce}-{len(sources)}\ue0f1")
            sources.append(part)
        else:
            found = f"of type {str(kind)[:40]!r}" if kind else f"that is a {type(part).__name__}"
            raise RequestError(f"a message holds a part {found}, wanted text or an image", "messages")
    return {**message, "content": "".join(texts)}


def _source(part: Mapping[str, Any]) -> object:
    if part["type"] == "image_url":
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if not isinstance(url, str) or not (url[:5].lower() == "data:" or is_address(url)):
            raise RequestError("an image's URL is not fetched: send it as data:image/...;base64,...", "messages")
        return url
    if isinstance(part.get("data"), str):
        return from_base64(part["data"])
    if part.get("image") is None:
        raise RequestError('a part of type "image" holds none: give it as "image", or in base64 as "data"', "messages")
    return part["image"]


def opened_eyes(
    name: str | PathLike[str],
    opened: Callable[[str | PathLike[str]], GGUFFile],
    model: GGUFFile,
    spec: ModelSpec | EncoderSpec,
    *,
    found: bool,
    urls: bool,
) -> Eyes | None:
    """What a projector file holds. found: beside the model and not asked for; one that does not run is passed over."""
    try:
        eyes = Eyes(opened(name), urls=urls)
        eyes.seeing(spec, model.metadata)
        return eyes
    except QuarrelError as error:
        if not found:
            raise
        log.warning("%s is not used: %s", name, error)
        return None
