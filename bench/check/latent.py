"""Attention over compressed keys by itself, as a layer of GLM-4.7-Flash (20 heads) or DeepSeek V3 (128) runs it: checked,
then timed in several tiles.

    python -m bench.check.latent [--sweep]

Of decoding, the bytes are those of the cache, 1152 a key in float16; of a prompt, operations are 2 * (576 + 512) a pair of
a query's head and a key. The last line is JSON. With TRITON_INTERPRET=1 small shapes are checked, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from quarrel.triton_backend.attention.latent import (
    LatentShape,
    Tile,
    absent,
    attend_latent_many,
    attend_latent_one,
    combine_latent,
    tiles,
)
from quarrel.triton_backend.attention.records import Keys, Partial, Sequences
from quarrel.triton_backend.attention.split_starts import split_starts
from quarrel.triton_backend.attention.splits import most_splits
from quarrel.triton_backend.linear.heads import head_rows, head_tiles, rows_alone
from quarrel.triton_backend.runtime.arrays import Planes
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, launch, power_of_two

DIM, RANK, SIZE = 64, 512, 32
SCALE = 576**-0.5
LOG2E = 1.4426950408889634
DEVICE = "cpu" if INTERPRETED else "cuda"
LIMIT = 2e-3


class Layer:
    """Random queries and keys of some sequences, `new` queries each."""

    def __init__(self, heads: int, seqs: int, keys: int, new: int) -> None:
        torch.manual_seed(7)
        self.heads, self.seqs, self.keys, self.new = heads, seqs, keys, new
        blocks = cdiv(keys, SIZE)
        order = torch.from_numpy(np.random.default_rng(3).permutation(seqs * blocks).astype(np.int32))
        self.table = order.reshape(seqs, blocks).to(DEVICE)
        kept = {"dtype": torch.float16, "device": DEVICE}
        self.k = torch.randn(seqs * blocks + 1, 1, SIZE, DIM, **kept)
        self.v = torch.randn(seqs * blocks + 1, 1, SIZE, RANK, **kept)
        self.q = torch.randn(seqs * new, heads, DIM + RANK, **kept)
        self.out = torch.full((seqs * new, heads, RANK), float("nan"), **kept)
        self.kv_len = torch.full((seqs,), keys, dtype=torch.int32, device=DEVICE)
        self.starts, _ = split_starts(self.kv_len)
        self.query_start = torch.arange(seqs + 1, dtype=torch.int32, device=DEVICE) * new
        items = most_splits(seqs * keys, seqs)
        self.items = items
        sums = torch.empty(items * heads * RANK, dtype=torch.float32, device=DEVICE)
        tops = torch.empty(items * heads * 2, dtype=torch.float32, device=DEVICE)
        self.partial = Partial(sums, tops, self.starts)
        width = torch.tensor([blocks], dtype=torch.int32, device=DEVICE)
        self.sequences = Sequences(self.query_start, self.kv_len, self.table, width)
        self.cache = Keys(self.k, self.v, self.k, self.v)
        self.shape = LatentShape(heads, DIM, RANK, SIZE, "plain")

    def decode(self, tile: Tile) -> None:
        common = {"S": self.shape, "early": not INTERPRETED}
        launch(
            attend_latent_one, (self.items, cdiv(self.heads, tile.rows)), out=self.out, partial=self.partial, q=self.q,
            append=absent(self.q), cache=self.cache, sequences=self.sequences, item_start=self.starts, seqs=self.seqs,
            scale=SCALE * LOG2E, ROTATE="", NORMS=False, BLOCK_M=tile.rows, BLOCK_N=tile.keys, EARLY=True,
            COMPUTE=tl.float16, warps=tile.warps, stages=tile.stages, **common,
        )  # fmt: skip
        launch(
            combine_latent, (self.seqs, self.heads), out=self.out, partial=self.partial, query_start=self.query_start,
            item_start=self.starts, **common,
        )  # fmt: skip

    def prefill(self, tile: Tile) -> None:
        together = min(self.heads, tile.rows)
        grid = (self.seqs * self.new // (tile.rows // together) + self.seqs, cdiv(self.heads, together))
        launch(
            attend_latent_many, grid, out=self.out, q=self.q, cache=self.cache, sequences=self.sequences, seqs=self.seqs,
            scale=SCALE * LOG2E, S=self.shape, BLOCK_M=tile.rows, TOGETHER=together, BLOCK_N=tile.keys, LEAST=1,
            COMPUTE=tl.float16, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip

    def error(self) -> float:
        """Relative error of some rows against float32 products."""
        bad = []
        for seq in {0, self.seqs - 1}:
            rows = self.table[seq].long()
            k, v = (a[rows].reshape(-1, a.shape[-1])[: self.keys].float() for a in (self.k, self.v))
            for row in {0, self.new - 1}:
                seen = self.keys - self.new + row + 1
                q = self.q[seq * self.new + row].float()
                score = (q[:, :DIM] @ k[:seen].T + q[:, DIM:] @ v[:seen].T) * SCALE
                want = torch.softmax(score, 1) @ v[:seen]
                got = self.out[seq * self.new + row].float()
                bad.append(float((got - want).square().mean().sqrt() / want.square().mean().sqrt()))
        return max(bad) if all(np.isfinite(bad)) else float("inf")


def timed(run: Callable[[], None]) -> float:
    """Microseconds of a call, caches cold."""
    return 1000.0 * float(triton.testing.do_bench(run, warmup=20, rep=100, return_mode="median"))


def one_head_linear(heads: int, n: int, k: int, rest: int, tokens: int) -> dict[str, Any]:
    torch.manual_seed(1)
    w = torch.randn(heads, n, k, dtype=torch.float16, device=DEVICE)
    x = torch.randn(tokens, heads, k + rest, dtype=torch.float16, device=DEVICE)
    y = torch.empty(tokens, heads, rest + n, dtype=torch.float16, device=DEVICE)
    wide = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    blocks = next(b for b in (4, 2, 1) if k // 32 % b == 0)
    common: dict[str, Any] = {"N": n, "K": k, "HEADS": heads, "REST": rest, "WIDE_REST": power_of_two(rest)}
    common["FORMAT"] = "F16"
    planes, rows, whole, warps = Planes(w, w, w, w), *rows_alone(k, False)

    def run() -> None:
        if tokens == 1:
            launch(
                head_rows, (cdiv(n, rows), heads), y, y, x, planes, Partial(x, x, x), x, **common, COMBINES=False,
                FORM="plain", BN=rows, NB=whole, warps=warps, early=not INTERPRETED,
            )  # fmt: skip
            return
        launch(
            head_tiles, (cdiv(n, 64), heads, cdiv(tokens, wide)), y, x, planes, tokens, **common, FAST=False,
            COMPUTE=tl.float16, EXACT=False, BN=64, BT=wide, NB=blocks, STAGES=2, warps=4, stages=2,
            early=not INTERPRETED,
        )  # fmt: skip

    run()
    want = torch.cat([x[..., k:].float(), torch.einsum("thk,hnk->thn", x[..., :k].float(), w.float())], -1)
    error = float((y.float() - want).square().mean().sqrt() / want.square().mean().sqrt())
    row: dict[str, Any] = {"heads": heads, "n": n, "k": k, "tokens": tokens, "error": error, "ok": error < LIMIT}
    if not INTERPRETED and row["ok"]:
        row["us"] = timed(run)
        row["GB/s"] = w.numel() * 2 / row["us"] / 1000
    return row


def sweep(layer: Layer, run: Callable[[Tile], None], shapes: list[Tile], work: float, unit: str) -> list[dict[str, Any]]:
    """Of each tile its error and, where that is small, its time; a tile that the device has no room for says so."""
    rows = []
    for tile in shapes:
        row: dict[str, Any] = {"heads": layer.heads, "seqs": layer.seqs, "keys": layer.keys, "new": layer.new}
        row["tile"] = [tile.rows, tile.keys, tile.warps, tile.stages]
        layer.out.fill_(float("nan"))
        try:
            run(tile)
            row["error"] = layer.error()
            row["ok"] = row["error"] < LIMIT
            if not INTERPRETED and row["ok"]:
                row["us"] = timed(lambda tile=tile: run(tile))  # type: ignore[misc]
                row[unit] = work / row["us"] / 1e6
        except triton.runtime.errors.OutOfResources as error:
            row["ok"], row["no room"] = True, str(error).splitlines()[0]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Attention over compressed keys, checked and timed.")
    parser.add_argument("--sweep", action="store_true", help="other tiles than those that steps use, too")
    sweeps = parser.parse_args().sweep and not INTERPRETED
    results: list[dict[str, Any]] = []
    decodes = [(20, 1, 4096), (20, 1, 32768), (20, 32, 4096), (128, 1, 4096), (128, 32, 4096), (16, 64, 2048)]
    for heads, seqs, keys in [(5, 2, 300)] if INTERPRETED else decodes:
        layer = Layer(heads, seqs, keys, 1)
        usual, _ = tiles("float16", heads, 9)
        others = [Tile(usual.rows, n, w, s) for n, s in ((16, 3), (32, 1), (32, 2), (32, 3), (64, 1)) for w in (4, 8)]
        shapes = [usual] + [t for t in others if t != usual and sweeps and seqs == 32]
        results += sweep(layer, layer.decode, shapes, seqs * keys * (DIM + RANK) * 2 * 1e-3 * 1e6, "GB/s")
    for heads, seqs, keys, new in [(5, 2, 70, 40)] if INTERPRETED else [(20, 1, 4096, 4096), (128, 1, 2048, 2048)]:
        layer = Layer(heads, seqs, keys, new)
        _, usual = tiles("float16", heads, 9)
        others = [Tile(64, n, w, s) for n, s in ((16, 2), (32, 1), (32, 2), (64, 1)) for w in (4, 8)]
        shapes = [usual] + [t for t in others if t != usual and sweeps and heads == 20]
        pairs = heads * seqs * (new * keys - new * (new - 1) / 2)
        results += sweep(layer, layer.prefill, shapes, pairs * 2 * (DIM + 2 * RANK), "TFLOP/s")
    maps = [(20, 512, 192, 64), (20, 256, 512, 0), (128, 512, 128, 64)]
    for tokens in (1, 16, 512):
        for heads, n, k, rest in [(3, 70, 96, 16)] if INTERPRETED else maps:
            results.append(one_head_linear(heads, n, k, rest, tokens))
            print(json.dumps(results[-1]), flush=True)
    device = "interpreter" if INTERPRETED else torch.cuda.get_device_name()
    print(json.dumps({"bench": "latent", "device": device, "ok": all(r["ok"] for r in results), "results": results}))
    return 0 if all(r["ok"] for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
