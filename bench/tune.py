"""Times candidate tiles on this device, by format, shape and width of rows, and writes the table that models load.

    python bench/tune.py --out quarrel/triton_backend/tuned/sm_90.json [--seconds 90] [--only mistral-7b] [--rows 8,16,32]

Processes compile what will be timed; the timing is alone on the device (graphs over copies that outgrow its cache, medians
of 7). A candidate whose result is wrong is left out and named. Shapes and widths that were not reached keep what the file
had. The best of a width is kept only where it beats what the table has now by 3%: noise changes nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from triton_batch import MAKERS, device, timed, work

from quarrel.triton_backend import matmul, rows
from quarrel.triton_backend.runtime import cdiv
from quarrel.triton_backend.tuned import Kind, key, table

WRONG = 2e-3
"""Relative error that no candidate of these formats comes near."""
GAIN = 0.97
TABLE = Path(__file__).resolve().parents[1] / "quarrel" / "triton_backend" / "tuned" / "sm_90.json"


@dataclass(frozen=True)
class Subject:
    """The weights of one launch."""

    kind: Kind
    formats: tuple[str, ...]
    ns: tuple[int, ...]
    k: int

    @property
    def name(self) -> str:
        return key(self.kind, self.formats, self.ns, self.k)


def layer(hidden: int, kv: int, inner: int) -> list[Subject]:
    """A Q4_K_M file's layer: value and down matrices are Q6_K in half of the layers."""
    found = [
        Subject("gated", ("Q4_K", "Q4_K"), (inner, inner), hidden),
        *(Subject("one", (f,), (hidden,), inner) for f in ("Q4_K", "Q6_K")),
        *(Subject("three", ("Q4_K", "Q4_K", f), (hidden, kv, kv), hidden) for f in ("Q4_K", "Q6_K")),
    ]
    return [*found, Subject("one", ("Q4_K",), (hidden,), hidden)]


MODELS = {
    "mistral-7b": [*layer(4096, 1024, 14336), Subject("one", ("Q6_K",), (32000,), 4096)],
    "granite-4-micro": [*layer(2560, 512, 8192), Subject("one", ("Q6_K",), (100352,), 2560)],
    "tinyllama-1.1b": [*layer(2048, 256, 5632), Subject("one", ("Q6_K",), (32000,), 2048)],
}


def candidates(subject: Subject, width: int) -> Iterator[dict[str, Any]]:
    """What the makers of `triton_batch.py` time; what the table has now is the first."""
    what: dict[str, Any] = {"tokens": width, "k": subject.k}
    if subject.kind == "three":
        what |= {"formats": subject.formats, "ns": subject.ns}
    else:
        what |= {"format": subject.formats[0], "n": subject.ns[0], "gated": subject.kind == "gated"}
        what |= {"add": subject.kind == "one" and subject.ns[0] <= 8192}
    n = sum(subject.ns) if subject.kind == "three" else subject.ns[0]
    seen = []
    for family, row in (*now(subject, n, width), *rows_of(n, subject.k, width), *tiles_of(subject, n, width)):
        if (family, row) not in seen:
            seen.append((family, row))
            yield what | {"family": family, "row": row} | named(subject, family, row, width)


def now(subject: Subject, n: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    found = table(9)
    measured = found.rows.get(subject.name, {})
    if width in measured:
        yield "rows", measured[width]
    elif width in rows.WIDTHS and width not in found.tiles.get(subject.name, {}) and (width < 32 or n < rows.MOST_FOR_32):
        deal = rows.deal(n, subject.k, width)
        yield "rows", (deal.rows, deal.tall, deal.turns, int(deal.deep))
    widths, tiles = found.widths[subject.kind], found.tiles.get(subject.name, {})
    shape = matmul.shape_of(matmul.shapes_for(n, subject.k, widths, tiles), width)
    if shape.tokens == width or width > 16:
        yield "tiles", (shape.rows, shape.blocks, shape.parts, shape.warps, shape.stages)


def rows_of(n: int, k: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Deals whose warps come near what keeps a device busy, and whose sums fit registers."""
    if width > 32 or k % 256:
        return
    high = {8: ((16, 1), (32, 2)), 16: ((16, 1), (32, 1), (32, 2)), 32: ((16, 1), (32, 2), (64, 4))}[width]
    for tall_rows, tall in high:
        for turns in (1, 2, 4, 8):
            warps = cdiv(n, tall_rows) * tall * turns
            if turns * tall > 16 or k < 256 * turns or (turns > 1 and warps > 6000) or (turns < 8 and warps < 700):
                continue
            for deep in (0, 1):
                yield "rows", (tall_rows, tall, turns, deep)


def tiles_of(subject: Subject, n: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tiles for more than 16 rows; what asks for too much memory fails as it is compiled."""
    if width < 32:
        return
    shapes = ((64, 8, 4, 3), (64, 4, 4, 3), (128, 4, 8, 3), (128, 4, 8, 4), (128, 4, 8, 2), (128, 2, 8, 3))
    for tall_rows, blocks, warps, stages in shapes:
        if subject.kind == "gated" and (tall_rows, blocks) in ((128, 8), (64, 8)):
            continue
        programs = cdiv(n, tall_rows)
        for parts in (1, 2, 4, 8):
            if 90 <= programs * parts <= 520 and (subject.k // 32) % blocks == 0 and subject.k // 32 // blocks >= 4 * parts:
                yield "tiles", (tall_rows, blocks, parts, warps, stages)


def named(subject: Subject, family: str, row: tuple[int, ...], width: int) -> dict[str, Any]:
    three = subject.kind == "three"
    if family == "rows":
        tall_rows, tall, turns, deep = row
        part = "rows_three" if three else "rows"
        return {"part": part, "bm": tall_rows, "tall": tall, "turns": turns, "deep": bool(deep), "bt": width}
    tall_rows, blocks, parts, warps, stages = row
    part = "three" if three else "batch"
    return {
        "part": part, "bn": tall_rows, "nb": blocks, "parts": parts, "warps": warps, "stages": stages, "bt": max(16, width)
    }  # fmt: skip


def prepare(todo: list[dict[str, Any]], until: float, jobs: int) -> set[str]:
    """Compiles on all cores until then; returns those that could not be."""
    context = multiprocessing.get_context("fork")  # before this process touches the device
    queue, results = context.Queue(), context.Queue()
    for item in todo:
        queue.put(("compile", item))
    for _ in range(jobs):
        queue.put(None)
    workers = [context.Process(target=work, args=(queue, results)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    failed, done = set(), 0
    while done < len(todo) and time.perf_counter() < until:
        try:
            row = results.get(timeout=0.5)
        except Exception:  # the queue's Empty: nothing came yet
            continue
        done += 1
        if "raised" in row:
            failed.add(row["failed"])
    for worker in workers:
        worker.terminate()
        worker.join()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TABLE, help="the table; every candidate goes to its .jsonl beside it")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--only", default=",".join(MODELS), help="models by name")
    parser.add_argument("--rows", default="8,16,32,64,128", help="widths of rows")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--list", action="store_true", help="print the candidates and stop")
    args = parser.parse_args()
    began = time.perf_counter()
    subjects = list(dict.fromkeys(s for name in args.only.split(",") for s in MODELS[name]))
    pairs = [(s, w, list(candidates(s, w))) for s in subjects for w in map(int, args.rows.split(","))]
    todo = [c for _, _, found in pairs for c in found]
    if args.list:
        for item in todo:
            print(item)
        return 0
    failed = prepare(todo, began + args.seconds * 0.6, args.jobs)
    print(f"{len(todo)} candidates, {len(failed)} could not be compiled, {time.perf_counter() - began:.0f} s", flush=True)
    torch.cuda.set_device(0)
    kept = json.loads(TABLE.read_text())
    log = args.out.with_suffix(".jsonl").open("w")
    for subject, width, found in pairs:
        if time.perf_counter() - began > args.seconds:
            print("the time is over")
            break
        times: dict[tuple[str, tuple[int, ...]], float] = {}
        for item in found:
            if str(item)[:300] in failed:
                continue
            try:
                go, count, error, _ = MAKERS[item["part"]](item, False)
                for i in range(count):
                    go(i)
                torch.cuda.synchronize()
                wrong = error()
                us = timed(go, count) * 1e6
            except Exception as failure:
                print(subject.name, width, item["family"], item["row"], f"{type(failure).__name__}: {failure}"[:200])
                continue
            log.write(json.dumps({"shape": subject.name, "rows": width, "us": round(us, 2), "error": wrong} | item) + "\n")
            log.flush()
            if wrong < WRONG:
                times[item["family"], item["row"]] = us
            else:
                print(subject.name, width, item["family"], item["row"], f"is wrong by {wrong:.1e}")
        if times:
            settle(kept, subject, width, times, (found[0]["family"], found[0]["row"]))
            args.out.write_text(dumps(kept))
    print(f"{time.perf_counter() - began:.0f} s")
    return 0


def settle(
    kept: dict[str, Any], subject: Subject, width: int, times: dict[tuple[str, tuple[int, ...]], float],
    before: tuple[str, tuple[int, ...]],
) -> None:  # fmt: skip
    """Notes the best, and its microseconds."""
    best = min(times, key=lambda how: times[how])
    if before in times and times[best] > GAIN * times[before]:
        best = before
    family, row = best
    for other in ("rows", "tiles"):
        kept.setdefault(other, {}).get(subject.name, {}).pop(str(width), None)
    kept[family].setdefault(subject.name, {})[str(width)] = list(row)
    kept.setdefault("us", {}).setdefault(subject.name, {})[str(width)] = round(times[best], 1)
    kept |= {"device": torch.cuda.get_device_name(device()), "triton": triton.__version__}
    was = f" (before: {times[before]:.1f})" if before in times else ""
    print(f"{subject.name} x {width}: {times[best]:.1f} us with {family} {row}{was}", flush=True)


def dumps(kept: dict[str, Any]) -> str:
    """A line for each shape."""
    parts = []
    for name, value in kept.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items() if v)
            parts.append(f" {json.dumps(name)}: {{\n{inner}\n }}" if inner else f" {json.dumps(name)}: {{}}")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
