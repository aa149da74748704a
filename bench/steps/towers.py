"""Images a second through full-size towers of random weights on one GPU, and the time to a first token behind an image.

    python -m bench.steps.towers --out RESULTS.jsonl [--only qwen3-vl-8b,gemma-3-12b] [--images 1,32] [--profile]
        [--answers qwen3-vl-8b:Q4_K_M]

Pictures of 448 x 448 pixels, as each tower wants them. A line of JSON for each number of images at once: `step_ms` is the
device's time of a step when several follow each other, `share` its products and attention (the FLOP floor) at the rate of a
product of 8192 by 8192 in the same run, `encode_ms` the time from pixels to rows that a prompt can read. Checked
first: rows in 16 bits against the same program in float32. `--profile` adds the time of each kernel. `--answers` loads a
whole model with its tower: the time to the first token of an image of 1024 x 1024 and of as many tokens of text, and images
of 448 x 448 a second that so many callers get a first token for.
"""

from __future__ import annotations

import io
import statistics
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.shared import FOLDER, Notes, command_line, synthetic
from bench.steps.encoder_steps import rate
from quarrel.engine.images import PlacedImage
from quarrel.gguf import GGMLType, GGUFFile, GGUFWriter
from quarrel.llm.images import Eyes, tower_inputs
from quarrel.models.projectors import PARTS
from quarrel.ops.contract import rel_error
from quarrel.triton_backend.backend import create
from quarrel.vision.patches import Picture

ROUNDS, SIDE = 6, 448


@dataclass(frozen=True)
class Shape:
    """A tower: keys of its file, its widths, and whether query, key and value are one matrix."""

    keys: dict[str, Any]
    out: int
    patch: int
    grid: int
    deepstack: tuple[int, ...] = ()
    fused: bool = False
    n: int = 1152
    wide: int = 4304
    blocks: int = 27
    heads: int = 16


SHAPES = {
    "qwen3-vl-8b": Shape(
        {"projector_type": "qwen3vl_merger", "vision.spatial_merge_size": 2}, 4096, 16, 48, (8, 16, 24), True
    ),
    "gemma-3-12b": Shape({"projector_type": "gemma3", "vision.image_size": 896}, 3840, 14, 64),
}


def written(name: str, folder: Path) -> Path:
    """The projector file of a shape, in float16, random."""
    path = folder / f"mmproj-{name}-F16.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    s, writer = SHAPES[name], GGUFWriter()
    writer.add("general.architecture", "clip")
    layers = [il in s.deepstack for il in range(s.blocks)]
    facts: dict[str, Any] = {
        "has_vision_encoder": True, "use_gelu": True, "vision.patch_size": s.patch, "vision.embedding_length": s.n,
        "vision.feed_forward_length": s.wide, "vision.block_count": s.blocks, "vision.attention.head_count": s.heads,
        "vision.attention.layer_norm_epsilon": 1e-6, "vision.projection_dim": s.out, "vision.image_mean": [0.5] * 3,
        "vision.image_std": [0.5] * 3, **s.keys, **({"vision.is_deepstack_layers": layers} if s.deepstack else {}),
    }  # fmt: skip
    for key, value in facts.items():
        writer.add(f"clip.{key}", value)
    pool = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)

    def matrix(name: str, rows: int, k: int, bias: bool = True, shape: tuple[int, ...] = ()) -> None:
        values = np.resize(np.roll(pool, rows), (rows, k)) * np.float32(k**-0.5)
        writer.add_tensor(f"{name}.weight", values.reshape(shape or (rows, k)), GGMLType.F16)
        if bias:
            writer.add_tensor(f"{name}.bias", 0.1 * pool[:rows], GGMLType.F32)

    def norm(name: str, n: int) -> None:
        writer.add_tensor(f"{name}.weight", 1 + 0.1 * pool[:n], GGMLType.F32)
        writer.add_tensor(f"{name}.bias", 0.1 * pool[:n], GGMLType.F32)

    matrix("v.patch_embd", s.n, 3 * s.patch**2, shape=(s.n, 3, s.patch, s.patch))
    writer.add_tensor("v.position_embd.weight", np.resize(pool, (s.grid**2, s.n)), GGMLType.F32)
    for il in range(s.blocks):
        at = f"v.blk.{il}."
        for name in ("ln1", "ln2"):
            norm(at + name, s.n)
        if s.fused:
            matrix(f"{at}attn_qkv", 3 * s.n, s.n)
        else:
            for name in "qkv":
                matrix(f"{at}attn_{name}", s.n, s.n)
        matrix(f"{at}attn_out", s.n, s.n)
        matrix(f"{at}ffn_up", s.wide, s.n)
        matrix(f"{at}ffn_down", s.n, s.wide)
    norm("v.post_ln", s.n)
    if s.keys["projector_type"] == "gemma3":
        writer.add_tensor("mm.soft_emb_norm.weight", 1 + 0.1 * pool[: s.n], GGMLType.F32)
        writer.add_tensor("mm.input_projection.weight", np.resize(pool, (s.n, s.out)) / s.n**0.5, GGMLType.F16)
    else:
        wide = 4 * s.n
        matrix("mm.0", wide, wide)
        matrix("mm.2", s.out, wide)
        for il in s.deepstack:
            norm(f"v.deepstack.{il}.norm", wide)
            matrix(f"v.deepstack.{il}.fc1", wide, wide)
            matrix(f"v.deepstack.{il}.fc2", s.out, wide)
    writer.write(path)
    return path


def flops(name: str, patches: int) -> int:
    """Of one image: products of matrices, and of queries with keys and with values."""
    s = SHAPES[name]
    each = 2 * s.blocks * (4 * s.n**2 + 2 * s.n * s.wide) + 4 * s.blocks * patches * s.n + 6 * s.n * s.patch**2
    if s.deepstack:
        merged = 2 * (1 + len(s.deepstack)) * (16 * s.n**2 + 4 * s.n * s.out)
        return patches * each + patches // 4 * merged
    return patches * each + 256 * 2 * s.n * s.out


def pictures(eyes: Eyes, count: int, rng: np.random.Generator, side: int = SIDE) -> list[PlacedImage]:
    """Images that no cache knows."""
    width, height = eyes.preparation.size(side, side)
    made = [Picture(rng.integers(0, 256, (height, width, 3), np.uint8), eyes.preparation) for _ in range(count)]
    return [PlacedImage(0, p.placed, p.digest(), p) for p in made]


def device_ms(step: Any, inputs: Any) -> float:
    """A step's time when several follow each other; their inputs are on the device already."""
    rows, send = len(inputs.out_rows), step._inputs.send
    for _ in range(3):
        step._start(inputs, "hidden", rows)
    torch.cuda.synchronize()
    step._inputs.send = lambda *args, **named: None
    try:
        began = time.perf_counter()
        for _ in range(ROUNDS):
            step._start(inputs, "hidden", rows)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / ROUNDS
    finally:
        step._inputs.send = send


def kernels(step: Any, inputs: Any) -> list[tuple[str, float, float]]:
    """Each kernel of a step: its name, launches, and microseconds in all."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(2):
            step._start(inputs, "hidden", len(inputs.out_rows))
        torch.cuda.synchronize()
    found = [(e.key[:80], e.count / 2, round(e.device_time_total / 2, 1)) for e in prof.key_averages()]
    return sorted(found, key=lambda each: -each[2])[:16]


def tower(name: str, folder: Path, counts: list[int], notes: Notes, peak: float, profiled: bool) -> None:
    """All figures of one tower."""
    backend, rng = create(), np.random.default_rng(1)
    with GGUFFile.open([written(name, folder)]) as file:
        eyes = Eyes(file)
        try:
            (one,) = pictures(eyes, 1, rng)
            rows = []
            for compute in ("float32", "float16"):
                encoder = eyes.encoder(backend, compute, 1 << 15)  # type: ignore[arg-type]
                rows.append(encoder.encode([one])[0])
                if compute == "float32":
                    encoder.close()
            notes.say(tower=name, error=float(rel_error(rows[1], rows[0])))
            step = encoder._step
            patches = len(one.pixels.patches())
            for count in counts:
                images = pictures(eyes, count, rng)
                at_once = min(count, step.limits.max_tokens // patches)
                inputs = tower_inputs(eyes.tower, encoder._table, [i.pixels for i in images[:at_once]])
                ms = device_ms(step, inputs)
                work = at_once * flops(name, patches)
                waits = []
                for _ in range(2 if count > 8 else 5):
                    images = pictures(eyes, count, rng)
                    began = time.perf_counter()
                    encoder.encode(images)
                    torch.cuda.synchronize()
                    waits.append(1e3 * (time.perf_counter() - began))
                began = time.perf_counter()
                tower_inputs(eyes.tower, encoder._table, [i.pixels for i in images[:at_once]])
                prepared = 1e3 * (time.perf_counter() - began)
                notes.say(
                    tower=name, images=count, at_once=at_once, patches=patches, tflop=round(work / 1e12, 3),
                    step_ms=round(ms, 3), images_s=round(1e3 * at_once / ms, 1), tflop_s=round(work / ms / 1e9, 1),
                    share=round(work / ms * 1e3 / peak, 3), floor_ms=round(1e3 * work / peak, 3),
                    encode_ms=round(statistics.median(waits), 2), prepare_ms=round(prepared, 2),
                    encoded_s=round(1e3 * count / statistics.median(waits), 1),
                )  # fmt: skip
                if profiled:
                    notes.say(tower=name, images=at_once, kernels=kernels(step, inputs))
            encoder.close()
        finally:
            eyes.decoder.close()


def answers(model: str, folder: Path, notes: Notes, callers: int = 32) -> None:
    """A whole model behind its tower."""
    import quarrel
    from quarrel.engine import SamplingParams

    name = model.partition(":")[0]
    path, eyes = synthetic(model, folder), written(name, folder)
    params, rng = SamplingParams(temperature=0, max_tokens=1), np.random.default_rng(2)
    with quarrel.load(path, backend="triton", mmproj=eyes, n_ctx=8192, max_seqs=callers) as llm:

        def asked(side: int, png: bool = False) -> float:
            """Seconds to one token behind an image."""
            pixels = rng.integers(0, 256, (side, side, 3), np.uint8)
            parts = [{"type": "image", "image": as_png(pixels) if png else pixels}, {"type": "text", "text": "?"}]
            began = time.perf_counter()
            llm.chat([{"role": "user", "content": parts}], params, template="{{ messages[0].content }}")
            return time.perf_counter() - began

        def read(tokens: int) -> float:
            ids = rng.integers(1000, 20000, tokens).tolist()
            began = time.perf_counter()
            llm.generate(ids, params)
            return time.perf_counter() - began

        first = asked(1024)
        behind = [asked(1024) for _ in range(6)]
        tokens = 1026
        read(tokens)
        notes.say(
            model=model, image=1024, first_s=round(first, 3), first_token_ms=round(1e3 * statistics.median(behind[2:]), 1),
            as_text_ms=round(1e3 * statistics.median(read(tokens) for _ in range(5)), 1),
        )  # fmt: skip
        notes.say(
            model=model, image=SIDE, first_token_ms=round(1e3 * statistics.median([asked(SIDE) for _ in range(7)][2:]), 1)
        )
        for png in (False, True):
            rounds = []
            for _ in range(5):
                threads = [threading.Thread(target=asked, args=(SIDE, png)) for _ in range(callers)]
                began = time.perf_counter()
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                rounds.append(time.perf_counter() - began)
            took = statistics.median(rounds[2:])
            notes.say(
                model=model, callers=callers, image=SIDE, png=png, images_s=round(callers / took, 1),
                all_s=round(took, 3), rounds=[round(each, 3) for each in rounds],
            )  # fmt: skip
        least = min(texts(llm, params, rng, callers) for _ in range(3))
        notes.say(model=model, callers=callers, text_tokens=callers * 198, text_s=round(least, 3))


def texts(llm: Any, params: Any, rng: np.random.Generator, callers: int) -> float:
    """Seconds to a first token of so many callers' texts, each as long as a prompt with an image."""
    prompts = [rng.integers(1000, 20000, 198).tolist() for _ in range(callers)]
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def as_png(pixels: np.ndarray) -> bytes:
    """The picture as callers send one, hardly compressed: noise cannot be."""
    from PIL import Image

    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG", compress_level=1)
    return data.getvalue()


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(SHAPES), help="towers, separated by commas; empty for none")
    parser.add_argument("--images", default="1,32")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--answers", default="", help="a model with its tower, SHAPE:QUANT")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    notes, failed = Notes(args.out), 0
    peak = rate(8192, 8192, 8192)
    notes.say(device=torch.cuda.get_device_name(), peak_tflop_s=round(peak / 1e12), parts=len(PARTS))
    if args.answers:
        try:
            answers(args.answers, args.folder, notes)
        except Exception:
            failed += 1
            notes.say(model=args.answers, failed=traceback.format_exc(limit=-8))
    for name in filter(None, args.only.split(",")):
        try:
            tower(name, args.folder, [int(n) for n in args.images.split(",")], notes, peak, args.profile)
        except Exception:
            failed += 1
            notes.say(tower=name, failed=traceback.format_exc(limit=-8))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
