"""The cases with an image, run on anything that compiles programs: tower, then the model around its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from quarrel.convert.folder import FolderFile
from quarrel.engine.images import PlacedImage, Sight
from quarrel.gguf import GGUFFile
from quarrel.llm.images import Eyes, preparation_of, tower_inputs
from quarrel.models import Keys, Tensors, assemble, read_spec
from quarrel.models.projectors import PARTS
from quarrel.models.tower import assemble_tower, position_table, read_tower, seeing, tower_tensors
from quarrel.ops.program import Program
from quarrel.ops.step import Backend, ComputeChoice, Limits, StepInputs
from quarrel.vision.patches import Picture

CASES = ("qwen3vl", "qwen35_vl", "gemma3_vl")
EYES, KINDS = Path(__file__).with_name("eyes"), ("pixtral", "mistral3", "llava", "gemma4", "qwen25vl")
WHOLE = EYES / "whole"
WHOLES = ("pixtral", "mistral3", "llava", "qwen25vl", "qwen3vlmoe", "gemma4", "gemma4_e")
IMAGE = 380
"""The id that stands for an image's token."""

Run = Callable[[Program, Tensors, StepInputs, str], Mapping[str, np.ndarray]]


def on(backend: Backend) -> Run:
    """Programs compiled by a backend, in float32."""

    def run(program: Program, tensors: Tensors, inputs: StepInputs, want: str) -> Mapping[str, np.ndarray]:
        tokens, rows = len(inputs.ids), len(inputs.out_rows)
        step = backend.compile(program, tensors, Limits(tokens, max(2, rows), 8, 8, 16), "float32")
        try:
            return {name: array for name, array in vars(step(inputs, want)).items() if array is not None}  # type: ignore[arg-type]
        finally:
            step.close()

    return run


def image_rows(folder: Path, run: Run, name: str = "mmproj-f16.gguf") -> tuple[np.ndarray, tuple[int, int]]:
    """What the tower makes of the case's image, `[tokens, parts * E]`, and the rows and columns of tokens."""
    with GGUFFile.open(folder / name) as file:
        tensors = tower_tensors(file)
        tower = read_tower(file, tensors)
        picture = Picture(np.load(folder / "image.npy"), preparation_of(tower))
        inputs = tower_inputs(tower, position_table(file, tower), [picture])
        out = run(assemble_tower(tower, tensors), tensors, inputs, "hidden")
        return np.concatenate([out[name] for name in PARTS if name in out], 1), picture.grid


def encoded_rows(kind: str, backend: Backend, compute: ComputeChoice = "float32") -> list[np.ndarray]:
    """What a tower of `tests/eyes` makes of its picture and, in the same step, of its mirror image: a row for a token."""
    with GGUFFile.open(EYES / kind / "mmproj.gguf") as file:
        eyes = Eyes(file)
        encoder = eyes.encoder(backend, compute, 256)
        try:
            pixels = np.load(EYES / kind / "image.npy")
            pictures = [Picture(np.ascontiguousarray(each), eyes.preparation) for each in (pixels, pixels[:, ::-1])]
            return encoder.encode([PlacedImage(0, p.placed, p.digest(), p) for p in pictures])
        finally:
            encoder.close()


def _one_prompt(ids: np.ndarray, **more: np.ndarray) -> StepInputs:
    """A step of one sequence that begins, all of whose rows are wanted."""
    at = np.arange(len(ids), dtype=np.int32)
    return StepInputs(
        ids=ids,
        positions=at,
        slots=at,
        query_start=np.array([0, len(ids)], np.int32),
        kv_len=np.array([len(ids)], np.int32),
        block_table=np.arange(-(-len(ids) // 16), dtype=np.int32)[None],
        out_rows=at,
        **more,
    )


def whole_logits(kind: str, backend: Backend) -> np.ndarray:
    """Logits of all tokens of a prompt of `tests/eyes/whole`, of the folder as it is, tokens placed as by the engine."""
    folder = WHOLE / kind
    with FolderFile(folder) as file, FolderFile(folder, mmproj=True) as projector:
        eyes, tensors = Eyes(projector), Tensors(file)
        spec = eyes.seeing(read_spec(file), file.metadata)
        picture = Picture(np.load(folder / "image.npy"), eyes.preparation)
        given = np.load(folder / "ids.npy")
        image = PlacedImage(int(np.flatnonzero(given < 0)[0]), picture.placed, picture.digest(), picture)
        assert image.tokens == (given < 0).sum()
        encoder = eyes.encoder(backend, "float32", 256)
        try:
            (rows,) = encoder.encode([image])
        finally:
            encoder.close()
        ids = np.where(given < 0, 0, given).astype(np.int32)
        sight = Sight([image], ids.tolist(), eyes.rules(spec))
        inputs = _one_prompt(
            ids,
            images=rows,
            image_rows=np.where(given < 0, np.cumsum(given < 0) - 1, -1).astype(np.int32),
            places=sight.places(0, len(ids)),
            see_to=sight.see_to(0, len(ids)),
        )
        return on(backend)(assemble(spec, tensors), tensors, inputs, "logits")["logits"]


def text_logits(folder: Path, rows: np.ndarray, grid: tuple[int, int], run: Run) -> np.ndarray:
    """Logits of the case's tokens that are no image's."""
    with GGUFFile.open(folder / "model-q4_0x.gguf") as file, GGUFFile.open(folder / "mmproj-f16.gguf") as projector:
        tensors, spec = Tensors(file), read_spec(file)
        tower = read_tower(projector, tower_tensors(projector))
        spec = seeing(spec, Keys(file.metadata, spec.architecture), tower)
        ids = np.load(folder / "image_ids.npy").astype(np.int32)
        image, at = ids == IMAGE, np.arange(len(ids), dtype=np.int32)
        first, last = np.flatnonzero(image)[[0, -1]]
        places, see_to = np.stack([at] * 3, 1), at.copy()
        see_to[first : last + 1] = last
        if len(projector.metadata.str("clip.projector_type")) > len("gemma3"):
            token = np.arange(rows.shape[0])
            places[first : last + 1] = first + np.stack([0 * token, token // grid[1], token % grid[1]], 1)
            places[last + 1 :] -= last + 1 - first - max(grid)
        inputs = _one_prompt(
            np.where(image, 0, ids).astype(np.int32),
            state_slots=np.array([1], np.int32),
            images=rows.astype(np.float32),
            image_rows=np.where(image, np.cumsum(image) - 1, -1).astype(np.int32),
            places=places,
            see_to=see_to,
        )
        return run(assemble(spec, tensors), tensors, inputs, "logits")["logits"][~image]
