"""Products with the chosen experts for many rows: a stack is decoded to 16 bits, for each step or once and for all.

Rows of x are gathered by expert, then a persistent kernel multiplies tiles that TMA brings (`decoded_kernels.py`). Gate
and up are decoded row by row in turn into one stack. Where the step has bytes for that, the stack is kept, with
`compute="fp8"` in E4M3, to which rows of x are then rounded as they are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from quarrel.triton_backend.experts.decoded_kernels import gather_rows, grouped_products
from quarrel.triton_backend.experts.maps import ExpertMaps, Grouping, Serves
from quarrel.triton_backend.formats import e4m3
from quarrel.triton_backend.linear.dequant_matmul import decoder
from quarrel.triton_backend.linear.matvec_tiles import multiprocessors
from quarrel.triton_backend.runtime.arrays import DTYPES, Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Site, starts_early

PIECE = 1 << 30
"""Values that are decoded at once where they are not kept: 2 GiB of scratch."""


@dataclass(frozen=True)
class Tile:
    """`pairs` by `rows` of the stack, `columns` to a step."""

    pairs: int
    rows: int
    columns: int
    warps: int
    stages: int


# Of an H200, in TFLOP/s for 2048 tokens of gpt-oss, Mixtral and Granite-4-h-tiny: gate and up 491, 568 and 444, which were
# 475, 526 and 401 without a pipeline over the ends of tiles, and 491, 530 and 428 with a producer warp (in Gluon). A fourth
# stage does not fit beside float32 results.
WIDE, NARROW = Tile(128, 256, 64, 8, 4), Tile(128, 256, 64, 8, 3)
WIDE_E4M3, NARROW_E4M3 = replace(WIDE, columns=128), replace(NARROW, columns=128)
_SMALL = Tile(16, 32, 32, 4, 2)
_COLUMNS = 4096


def declines(site: Site, maps: ExpertMaps) -> str | None:
    """Why these kernels do not multiply with the stacks on this device, or None."""
    format = maps.stacks[0].format
    if site.generation != 9 and not INTERPRETED:
        return "needs compute capability 9"
    if site.compute == "float32" or site.deterministic:
        return f"needs 16 bits and any order of sums, got {'deterministic ' if site.deterministic else ''}{site.compute}"
    if format in ("F16", "BF16", "F32"):
        return f"needs weights in a block format, got {format}"
    if maps.k % 32:
        return f"needs rows of whole blocks of 32 columns, got {maps.k} columns"
    return None


def build(site: Site, maps: ExpertMaps) -> Serves:
    return Serves(DecodedProducts(site, maps))


class DecodedProducts:
    """How to multiply with stacks of matrices."""

    def __init__(self, site: Site, maps: ExpertMaps) -> None:
        self._site, self._maps, self._dtype = site, maps, DTYPES[site.compute]
        count = len(maps.stacks)
        self._coarse = None if e4m3.declines(site, maps.stacks) else site.e4m3(maps.stacks)
        self._decoders = [decoder(site, stack, count) for stack in maps.stacks]
        self._kept = site.decoded(maps.stacks) if self._coarse is None else None
        each = maps.n * maps.k * count
        whole = self._kept is not None or self._coarse is not None
        self._at_once = maps.n_experts if whole else max(1, min(maps.n_experts, PIECE // each))
        # What becomes E4M3 is decoded an expert at a time, once.
        width = each if self._coarse is not None else 1 if whole else self._at_once * each
        self._scratch = site.scratch("one", width, self._dtype)
        eight = self._coarse is not None
        self._rows = site.scratch("T", maps.used * maps.k, torch.float8_e4m3fn if eight else self._dtype)
        self._scale = site.scratch("T", maps.used if eight else 1)
        self._places = site.scratch("T", 4 + 4 * maps.used, torch.int32)

    def __call__(self, y: Slot, x: Slot, group: Grouping, pairs: int, per_token: int) -> None:
        """y `[pairs, n]` from rows of x `[tokens, k]`, of which `per_token` pairs share one."""
        if pairs == 0:
            return
        maps = self._maps
        wide, narrow = (WIDE, NARROW) if self._coarse is None else (WIDE_E4M3, NARROW_E4M3)
        tile = _SMALL if INTERPRETED else wide if y.tensor.element_size() == 2 else narrow
        for first in range(0, maps.n_experts, self._at_once):
            count = min(self._at_once, maps.n_experts - first)
            stack = self._decoded(first * maps.n, (first + count) * maps.n)
            self._gather(x, group.order, group.starts, 0 if first else pairs, per_token, first, count, tile)
            self._multiply(y, stack, group.order, pairs, first, count, tile)

    def _decoded(self, begin: int, end: int) -> torch.Tensor:
        """Rows of the stack, of gate and up in turn, in the compute type."""

        def decode(out: torch.Tensor) -> None:
            for i, go in enumerate(self._decoders):
                go(begin, end, out[i * self._maps.k :])

        if self._coarse is not None:
            self._coarse.fill(self._round)
            return self._coarse.codes.view(-1)
        if self._kept is not None:
            return self._kept.filled(decode)
        decode(self._scratch.tensor)
        return self._scratch.tensor

    def _round(self) -> None:
        """Fills the stack in E4M3, of gate and up in turn."""
        assert self._coarse is not None
        n, k, count = self._maps.n, self._maps.k, len(self._maps.stacks)
        for expert in range(self._maps.n_experts):
            for i, go in enumerate(self._decoders):
                go(expert * n, (expert + 1) * n, self._scratch.tensor[i * k :])
            first = expert * n * count
            e4m3.put(
                self._site, self._coarse.codes[first:], self._coarse.scale[first:], self._scratch.tensor, n * count, k
            )  # fmt: skip

    def _gather(
        self, x: Slot, order: Slot, starts: Slot, pairs: int, per_token: int, first: int, count: int, tile: Tile
    ) -> None:
        """Gathers so many rows, and lists the tiles of these experts."""
        k, eight = self._maps.k, self._coarse is not None
        columns = power_of_two(k) if eight else min(_COLUMNS, power_of_two(k))
        self._site.launch(
            gather_rows, (pairs + 1, cdiv(k, columns)), self._rows.tensor, self._scale.tensor, self._places.tensor,
            x.tensor, order.tensor, starts.tensor, pairs, k, first, count, PADDED=power_of_two(self._maps.n_experts),
            PER_TOKEN=per_token, EIGHT=eight, BT=tile.pairs, C=columns, early=starts_early(self._site),
            warps=8 if columns > _COLUMNS else 4,
        )  # fmt: skip

    def _multiply(self, y: Slot, stack: torch.Tensor, order: Slot, pairs: int, first: int, count: int, tile: Tile) -> None:
        maps, n, k = self._maps, self._maps.n, self._maps.k
        x = TensorDescriptor.from_tensor(self._rows.tensor[: pairs * k].view(pairs, k), [tile.pairs, tile.columns])
        rows = count * n * len(maps.stacks)
        w = TensorDescriptor.from_tensor(stack[: rows * k].view(rows, k), [tile.rows, tile.columns])
        biases = [b.view(-1)[first * n :] for b in maps.biases] or [y.tensor]
        scale = self._scale.tensor if self._coarse is None else self._coarse.scale
        self._site.launch(
            grouped_products, (multiprocessors(stack.device),), y.tensor, x, w, self._scale.tensor, scale, biases[0],
            biases[-1], self._places.tensor, order.tensor, n, cdiv(k, tile.columns), GATED=maps.gated,
            KIND=maps.activation, BIAS=bool(maps.biases), EIGHT=self._coarse is not None, BT=tile.pairs, BN=tile.rows,
            BK=tile.columns, early=starts_early(self._site), warps=tile.warps, stages=tile.stages,
        )  # fmt: skip
