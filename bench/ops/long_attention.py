"""On an H100 or H200: attention of one sequence behind many keys, today's kernel beside others, checked and timed.

python -m bench.ops.long_attention --out RESULTS.jsonl [--part ahead|right|alone|steps ...] [--only NAME ...]

ahead  writes the cut model and compiles every kernel, in as many processes as --jobs says
right  the rings on the contract's cases (windows, sinks, caps, groups, blocks of 16 and 32), beside NaN of other sequences
alone  one layer's attention over rotating caches, blocks in random order: microseconds and the share of the read bandwidth
steps  whole steps of Mistral-7B cut to --layers layers, behind 32,000 tokens

Others than today's are put in its place where `paged.py` launches it. NAMES of forms: `one` is `attend_one`, `warps` is
`attend_warps`, `ring` is `kernels/long_ring.py`; a number behind `x` is how many parts the keys are cut into.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bench.ops.kernels.long_ring import Ring, attend_ring, join_parts
from bench.shared import FOLDER, Notes, command_line, graph_us, synthetic
from quarrel.bench.bandwidth import read_bandwidth
from quarrel.bench.measure import run
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test
from quarrel.gguf import GGUFFile
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Case
from quarrel.ops.kv import KV_TYPES
from quarrel.ops.registry import backend
from quarrel.triton_backend.attention import paged
from quarrel.triton_backend.attention.decode import LOG2E, attend_one
from quarrel.triton_backend.attention.decode_warps import attend_warps
from quarrel.triton_backend.attention.kv_codes import TL_TYPES
from quarrel.triton_backend.attention.records import Keys, Partial, Rotation, Score, Sequences, Shape, Warps
from quarrel.triton_backend.attention.splits import MOST_SPLITS, splits_of_one, whole_rounds
from quarrel.triton_backend.linear.matvec_tiles import multiprocessors
from quarrel.triton_backend.runtime.arrays import Output
from quarrel.triton_backend.runtime.launch import cdiv, launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, DIM, SIZE = 32, 8, 128, 32
DEPTHS = (8192, 32000, 131072)
ROTATING = 512 << 20
"""Bytes of all caches together, two of them at least: more than the L2."""
DEPTH = 32000
"""Of whole steps, and of caches of codes."""
TOKENS = 64
MODEL = "mistral-7b:Q4_K_M"
Say = Callable[..., None]


@dataclass(frozen=True)
class Form:
    """What takes the place of today's launch."""

    name: str
    ring: Ring | None = None
    tile: tuple[int, int] | None = None
    """Keys and warps of `attend_one`."""
    warps: Warps | None = None
    parts: int = 0
    """0: those of today."""
    join: bool = False
    """Parts are joined by a launch of its own instead of by the last program to arrive."""
    codes: bool = False
    """For caches of codes, not for those of 16 bits."""


FORMS = (
    Form("today"),
    Form("today, joined apart", join=True),
    Form("one 64 x33", tile=(64, 4), parts=33),
    Form("one 64 x64", tile=(64, 4), parts=64),
    Form("one 64 x33, joined apart", tile=(64, 4), parts=33, join=True),
    Form("one 32 x49", tile=(32, 4), parts=49, join=True),
    Form("one 64 in 8 warps x33", tile=(64, 8), parts=33, join=True),
    Form("one 128 in 8 warps x16", tile=(128, 8), parts=16, join=True),
    Form("warps 1 head 32, 3 stages", warps=Warps(1, 32, 3)),
    Form("warps 1 head 32, 3 stages, joined apart", warps=Warps(1, 32, 3), join=True),
    Form("warps 1 head 32, 4 stages x49", warps=Warps(1, 32, 4), parts=49, join=True),
    Form("warps 1 head 16, 6 stages", warps=Warps(1, 16, 6), join=True),
    Form("warps 2 heads 32, 3 stages", warps=Warps(2, 32, 3), join=True),
    Form("warps 4 heads 32, 3 stages", warps=Warps(4, 32, 3), join=True),
    Form("ring 4x32, 3 stages x16", Ring(4, 32, 3, 16)),
    Form("ring 4x16, 6 stages x16", Ring(4, 16, 6, 16)),
    Form("ring 8x16, 3 stages x16", Ring(8, 16, 3, 16)),
    Form("ring 2x32, 3 stages x33", Ring(2, 32, 3, 33)),
    Form("ring 1x32, 6 stages x33", Ring(1, 32, 6, 33)),
    Form("codes, ring 4x32, 6 stages x16", Ring(4, 32, 6, 16), codes=True),
    Form("codes, ring 8x32, 3 stages x16", Ring(8, 32, 3, 16), codes=True),
    Form("codes, ring 2x32, 6 stages x33", Ring(2, 32, 6, 33), codes=True),
)


class Other:
    """Puts a form in the place of `attend_one` or `attend_warps` at their launch."""

    def __init__(self) -> None:
        self.form, self.keys, self.count = FORMS[0], 0, 0
        self._kept: dict[Any, Any] = {}

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        form = self.form
        if kernel not in (attend_one, attend_warps) or form.name == "today" or not named["EARLY"]:
            launch(kernel, grid, *args, **named)
            return
        self.count += 1
        if form.ring is not None:
            self._ring(form.ring, named)
            return
        named, heads = dict(named), 1
        if form.tile is not None:
            named |= {"BLOCK_N": form.tile[0], "warps": form.tile[1], "AT_ONCE": 4 * form.tile[1]}
        if form.warps is not None:
            heads, kernel = form.warps.heads, attend_warps
            named.pop("BLOCK_N", None)
            named |= {"W": form.warps, "warps": heads, "stages": form.warps.stages, "AT_ONCE": 4}
        items = grid[0]
        if form.parts:
            split = cdiv(cdiv(self.keys, form.parts), 32) * 32
            items = cdiv(self.keys, split)
            named |= {"item_start": self._tensor([0, items])}
        elif form.join:
            items = splits_of_one(self.keys, most())
        if form.join:
            # Never so many arrivals that a program joins the parts itself.
            arrived = self._keep("arrived", lambda: torch.full((64,), -(1 << 30), dtype=torch.int32, device=DEVICE))
            named["partial"] = named["partial"]._replace(arrived=arrived)
        launch(kernel, (items if form.parts else grid[0], grid[1] // heads), **named)
        if form.join:
            self._join(items, named)

    def _keep(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return self._keep(tuple(values), lambda: torch.tensor(values, dtype=torch.int32, device=DEVICE))

    def _join(self, parts: int, named: dict[str, Any]) -> None:
        shape: Shape = named["S"]
        # A program a query head.
        each = shape._replace(KV_HEADS=shape.HEADS, SHARE=1)
        at_once = min(64, 1 << (parts - 1).bit_length(), max(1, 8192 // shape.WIDE))
        launch(
            join_parts, (named["seqs"], shape.HEADS), output=named["output"], partial=named["partial"],
            sinks=named["sinks"], sequences=named["sequences"], S=each, PARTS=parts, AT_ONCE=at_once, FORM=named["FORM"],
            warps=8, early=named["early"],
        )  # fmt: skip

    def _ring(self, ring: Ring, named: dict[str, Any]) -> None:
        shape: Shape = named["S"]
        cache: Keys = named["cache"]
        rows, device = named["seqs"] * ring.PARTS, cache.k.device
        sums, tops = self._keep(
            (rows, shape.HEADS, shape.DIM),
            lambda: [torch.full((rows * shape.HEADS * n,), torch.nan, device=device) for n in (shape.DIM, 2)],
        )
        named = named | {"partial": Partial(sums, tops, named["partial"].arrived)}
        where = (cache.k.data_ptr(), cache.v.data_ptr(), cache.k.shape, cache.k.dtype, ring)
        copies = self._keep(where, lambda: copies_of(cache, shape, ring))
        given = {name: named[name] for name in (*attend_ring.arg_names, "early") if name in named}
        launch(attend_ring, (rows, shape.KV_HEADS), **copies, R=ring, warps=ring.W, **given)
        self._join(ring.PARTS, named)


def copies_of(cache: Keys, shape: Shape, ring: Ring) -> dict[str, Any]:
    """Descriptors of keys and values, and of their scales, as `attend_ring` has them."""
    bits = cache.k.element_size() * 8
    box, columns = min(shape.SIZE, ring.KEYS), min(shape.DIM, 1024 // bits)
    layout = gl.NVMMASharedLayout(columns * bits // 8, bits, 2)
    k, v = (TensorDescriptor.from_tensor(x.view(-1, shape.DIM), [box, columns], layout) for x in (cache.k, cache.v))
    copies = {"k_copy": k, "v_copy": v, "k_scale_copy": k, "v_scale_copy": v}
    if cache.k.dtype == torch.uint8:
        layout = gl.NVMMASharedLayout(0, 32, 2)
        for name, x in (("k_scale_copy", cache.k_scale), ("v_scale_copy", cache.v_scale)):
            copies[name] = TensorDescriptor.from_tensor(x.view(-1, box), [1, box], layout)
    return copies


OTHER = Other()


class _Site:
    """A site whose launches go through OTHER."""

    launch = staticmethod(OTHER)

    def __init__(self, site: Any) -> None:
        self._site = site

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site, name)


@contextmanager
def in_its_place(form: Form, keys: int = 0) -> Iterator[None]:
    """Attention that is built meanwhile may run this form; it does until another is chosen."""
    (one,) = paged.IMPLEMENTATIONS
    object.__setattr__(one, "build", lambda site, node: paged.build_attention(_Site(site), node))
    OTHER.form, OTHER.keys = form, keys
    try:
        yield
    finally:
        OTHER.form = FORMS[0]
        object.__setattr__(one, "build", paged.build_attention)


def most() -> int:
    """Parts of one sequence's keys at most, as the package cuts them."""
    return whole_rounds(KV_HEADS, 2 * multiprocessors(DEVICE)) if DEVICE.type == "cuda" else MOST_SPLITS


class Layer:
    """A step's attention of one sequence behind `depth` keys, over caches that take turns."""

    def __init__(self, depth: int, copies: int, style: str = "norm", kind: str = "plain") -> None:
        torch.manual_seed(0)
        self.depth, self.keys, self.kind = depth, depth + 1, kind
        self.style = style if kind == "plain" else ""
        blocks = cdiv(self.keys, SIZE)
        shape = (blocks + 1, KV_HEADS, SIZE, DIM)
        self.caches = [Keys(*drawn(shape, kind), *scales(shape, kind)) for _ in range(copies)]
        self.table = torch.randperm(blocks, device=DEVICE).int()

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        self.sequences = Sequences(ints(0, 1), ints(self.keys), self.table, ints(blocks))
        self.q, self.k, self.v = (
            torch.randn(n * DIM, device=DEVICE, dtype=torch.float16) for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.freq = 1e6 ** (-torch.arange(0, DIM, 2, device=DEVICE) / DIM)
        slot = self.table[depth // SIZE] * SIZE + depth % SIZE
        self.rotation = Rotation(self.k, self.v, ints(depth), self.freq, slot.view(1), 1.0, 1.0)
        self.out = torch.empty(HEADS * DIM, device=DEVICE, dtype=torch.float16)
        self.starts = ints(0, splits_of_one(self.keys, most()))
        self.partial = Partial(
            torch.empty(64 * HEADS * DIM, device=DEVICE), torch.empty(64 * HEADS * 2, device=DEVICE),
            torch.zeros(KV_HEADS, dtype=torch.int32, device=DEVICE),
        )  # fmt: skip

    def launch(self, cache: int = 0) -> None:
        """As `paged.py` launches it."""
        keys = self.caches[cache]
        OTHER.keys = self.keys
        OTHER(
            attend_one, (most(), KV_HEADS), output=Output(self.out, self.out), partial=self.partial, q=self.q,
            rotation=self.rotation, sequences=self.sequences, item_start=self.starts, seqs=1, cache=keys, sinks=keys.k,
            score=Score(DIM**-0.5 * LOG2E, 0.0, 0),
            S=Shape(HEADS, KV_HEADS, DIM, DIM, HEADS // KV_HEADS, SIZE, False, False, False, self.kind),
            COMPUTE=TL_TYPES["float16"], ROTATE=self.style, BLOCK_M=16, AT_ONCE=16, FORM="plain", EARLY=True,
            BLOCK_N=64, warps=4, stages=2, early=DEVICE.type == "cuda",
        )  # fmt: skip

    def turn(self) -> None:
        for i in range(len(self.caches)):
            self.launch(i)

    def reference(self) -> torch.Tensor:
        """In float32, by PyTorch."""
        cache = self.caches[0]
        tensors = (decoded(cache.k, cache.k_scale, self.kind), decoded(cache.v, cache.v_scale, self.kind))
        blocks = (x[self.table.long()].transpose(1, 2) for x in tensors)
        k, v = (x.reshape(-1, KV_HEADS, DIM)[: self.keys].float() for x in blocks)
        q = self.q.float().view(KV_HEADS, -1, DIM)
        angle = self.depth * self.freq

        def turned(x: torch.Tensor) -> torch.Tensor:
            x = x.float().view(-1, DIM)
            a, b = (x[:, ::2], x[:, 1::2]) if self.style == "norm" else x.chunk(2, 1)
            pair = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
            return (torch.stack(pair, 2).flatten(1) if self.style == "norm" else torch.cat(pair, 1)).half().float()

        if self.style:
            q = turned(self.q).view(KV_HEADS, -1, DIM)
            k[-1], v[-1] = turned(self.k), self.v.float().view(KV_HEADS, DIM)
        p = torch.softmax(torch.einsum("hgd,nhd->hgn", q, k) * DIM**-0.5, 2)
        return torch.einsum("hgn,nhd->hgd", p, v).reshape(-1)

    def error(self, want: torch.Tensor) -> float:
        """Of the form that is chosen; it must also write the new key and value."""
        self.out.fill_(torch.nan)
        block, at = int(self.table[self.depth // SIZE]), self.depth % SIZE
        cache = self.caches[0]
        free = at + (self.style == "")
        for x in (cache.k, cache.v) if self.kind == "plain" else (cache.k_scale, cache.v_scale):
            x[block, :, free:] = torch.nan
        self.launch()
        written = self.style == "" or all(bool(torch.isfinite(x[block, :, at]).all()) for x in (cache.k, cache.v))
        error = float((self.out.float() - want).norm() / want.norm())
        return error if written else float("nan")


def drawn(shape: tuple[int, ...], kind: str) -> list[torch.Tensor]:
    """Keys and values, or their codes."""
    x = [torch.randn(shape, device=DEVICE, dtype=torch.float16) for _ in "kv"]
    if kind == "plain":
        return x
    made = [(y * 40).clamp(-127, 127).to(torch.int8) if kind == "int8" else y.to(torch.float8_e4m3fn) for y in x]
    return [y.view(torch.uint8) for y in made]


def scales(shape: tuple[int, ...], kind: str) -> list[torch.Tensor]:
    """Of codes, as `kv_codes.py` keeps them: values have about 1 as their size."""
    if kind == "plain":
        return drawn((1, 1, 1, 1), kind)
    return [(0.5 + torch.rand(shape[:3], device=DEVICE)) * (128 / 40 if kind == "int8" else 256) for _ in "kv"]


def decoded(x: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "plain":
        return x
    if kind == "int8":
        return x.view(torch.int8).float() * (scale / 128)[..., None]
    return x.view(torch.float8_e4m3fn).float() * (scale / 256)[..., None]


def chosen(only: Sequence[str], kind: str = "") -> list[Form]:
    """Those that are asked for, of `kind` those that take such a cache."""
    found = [f for f in FORMS if not only or f.name == "today" or any(o in f.name for o in only)]
    found = [f for f in found if f.name not in HUNG]
    if kind == "":
        return found
    return [f for f in found if f.name == "today" or f.codes == (kind != "plain")]


def alone(say: Say, args: Any) -> None:
    speed, _ = read_bandwidth(backend("triton"), 5)
    say(what="read bandwidth", device=torch.cuda.get_device_name(), TB_per_s=round(speed / 1e12, 3))
    for kind, depth in [("plain", depth) for depth in args.depths] + [("int8", DEPTH), ("fp8", DEPTH)]:
        nbytes = 2 * depth * KV_HEADS * (2 * DIM if kind == "plain" else DIM + 4)
        layer = Layer(depth, max(2, cdiv(ROTATING, nbytes)), "norm", kind)
        want, today = layer.reference(), 0.0
        for form in chosen(args.only, kind):
            OTHER.form = form
            try:
                error = layer.error(want)
                us = graph_us(layer.turn, max(1, 24 // len(layer.caches))) / len(layer.caches)
            except Exception as problem:
                say(
                    what="alone",
                    kind=kind,
                    depth=depth,
                    form=form.name,
                    failed=f"{type(problem).__name__}: {problem}"[:300],
                )
                torch.cuda.synchronize()
                continue
            today = today or us
            say(
                what="alone", kind=kind, depth=depth, form=form.name, error=error, ok=error < 2e-3, us=round(us, 2),
                TB_per_s=round(nbytes / us / 1e6, 3), share=round(nbytes / us * 1e6 / speed, 3),
                to_today=round(today / us, 3),
            )  # fmt: skip
        OTHER.form = FORMS[0]
        del layer, want
        torch.cuda.empty_cache()


CASES = [
    Case(spec, {"S": seqs, "Q": 1, "KV": keys, "block_size": size})
    for i, (spec, seqs, keys) in enumerate(
        (
            (AttentionSpec(4, 2, 64, 0.125), 3, 300),
            (AttentionSpec(8, 2, 64, 0.125, window=37, sinks=True), 3, 300),
            (AttentionSpec(4, 4, 128, 0.09, window=33, cap=20.0), 2, 300),
            (AttentionSpec(6, 2, 128, 0.1, cap=15.0), 1, 1200),
            (AttentionSpec(32, 8, 128, 0.09), 1, 3000),
            (AttentionSpec(16, 1, 128, 0.09, window=700, chunked=True), 2, 900),
            (AttentionSpec(5, 1, 64, 0.125), 4, 1),
        )
    )
    for size in ((16, 32) if keys == 3000 else ((16, 32)[i % 2],))
]
CODED = [
    Case(case.spec, case.dims | {"kv": KV_TYPES.index(kind)})
    for case in CASES
    if case.dims["block_size"] == 32
    for kind in ("int8", "fp8", "fp8_e5m2")
    if case.dims["KV"] == 3000 or (kind != "fp8" and (case.spec.window == 37 or case.spec.cap == 15.0))
]


RINGS = [f for f in FORMS if f.ring is not None]


def checks(form: Form) -> list[tuple[Case, str]]:
    """What a ring is checked on: the first on everything."""
    if form.codes:
        first = form.ring == Ring(4, 32, 6, 16)
        return [(c, "float16") for c in CODED if first or (c.dims["KV"] == 3000 and KV_TYPES[c.dims["kv"]] != "fp8_e5m2")]
    if form is not RINGS[0]:
        return [(c, "float16") for c in CASES if c.dims["KV"] == 3000 and c.dims["block_size"] == 32]
    return [(c, compute) for c in CASES for compute in ("float16", "bfloat16")[: 1 + (c.dims["KV"] == 3000)]]


def right(say: Say, args: Any) -> None:
    """Every ring on the contract's cases, and beside what other sequences may have left."""
    from tests.poison import check_poison

    triton: Any = backend("triton")
    for form in chosen(args.only):
        if form.ring is None:
            continue
        failed, worst = [], 0.0
        with in_its_place(form):
            OTHER.count = 0
            for case, compute in checks(form):
                try:
                    check_poison(triton, ATTENTION, case, compute)  # type: ignore[arg-type]
                    error = case_error(triton, case, compute)
                    worst = max(worst, error)
                    if not error <= ATTENTION.tolerance[compute]:  # type: ignore[index]
                        failed.append(f"{case} {compute}: {error}")
                except Exception as problem:
                    failed.append(f"{case} {compute}: {type(problem).__name__}: {problem}"[:300])
            ok = not failed and OTHER.count > 0
            say(what="right", form=form.name, launches=OTHER.count, worst=worst, ok=ok, failed=failed)
    for style in ("neox", "norm") if RINGS[0].name not in HUNG else ():
        layer = Layer(5000, 1, style)
        OTHER.form = RINGS[0]
        error = layer.error(layer.reference())
        say(what="right, rotation", style=style, error=error, ok=error < 2e-3)
    OTHER.form = FORMS[0]


def case_error(triton: Any, case: Case, compute: Any) -> float:
    from quarrel.ops.compare import case_error as measured

    return measured(triton, ATTENTION, case, compute, 0)


class Steps:
    """The cut model behind 32,000 tokens of random keys and values."""

    def __init__(self, args: Any) -> None:
        self.depth = DEPTH
        test = Test("decode", TOKENS, self.depth)
        path = synthetic(f"{MODEL}:{args.layers}", args.folder)
        with in_its_place(FORMS[0]):
            file = GGUFFile.open(str(path))
            self.subject = Subject(Source.of(file, test.length), backend("triton"), limits_for([test], 128, False), "auto")
        self.step: Any = self.subject.step
        torch.manual_seed(1)
        for cache in self.step._plan.caches:
            for x in cache.tensors:
                x.normal_()

    def choose(self, form: Form) -> None:
        """Graphs are captured anew."""
        OTHER.form, OTHER.keys, OTHER.count = form, self.depth + TOKENS, 0
        self.step._graphs.clear()

    def logits(self) -> np.ndarray:
        return np.asarray(self.step(self.subject.layout.decode(self.depth, 1, False), "logits").logits, np.float32)

    def tokens(self, count: int = TOKENS) -> float:
        """Seconds of so many steps."""
        layout = self.subject.layout
        began = time.perf_counter()
        run(self.subject, (layout.decode(self.depth + i, 1, from_last=i > 0) for i in range(count)))
        return time.perf_counter() - began


def steps(say: Say, args: Any) -> None:
    made = Steps(args)
    layers, want, first = args.layers, None, 0.0
    for form in chosen(args.only, "plain"):
        try:
            made.choose(form)
            got = made.logits()
            want = got if want is None else want
            error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
            for _ in range(3):
                made.tokens(8)
            us = sorted(made.tokens() / TOKENS * 1e6 for _ in range(7))
        except Exception as problem:
            say(what="step", form=form.name, failed=f"{type(problem).__name__}: {problem}"[:300])
            torch.cuda.synchronize()
            continue
        first = first or us[3]
        say(
            what="step", layers=layers, form=form.name, to_todays_logits=error, launches=OTHER.count, us=round(us[3], 1),
            least=round(us[0], 1), saved_a_layer=round((first - us[3]) / layers, 2),
        )  # fmt: skip
    made.subject.close()


def ahead(say: Say, args: Any) -> None:
    began = time.perf_counter()
    forms = chosen(args.only)
    work: list[tuple[str, Any]] = [("steps", args)] if "steps" in args.part else []
    plain = [f for f in forms if not f.codes]
    work += [("form", (f.name, "norm", depth)) for f in plain for depth in args.depths[: None if f.parts else 1]]
    for kind in ("int8", "fp8"):
        work += [("form", (f.name, "norm", DEPTH, kind)) for f in chosen(args.only, kind)]
    if "right" in args.part:
        work += [("right", (f.name, i)) for f in forms if f.ring is not None for i in range(len(checks(f)))]
        work += [("form", (RINGS[0].name, "neox", 5000))]
    # What takes longest begins first.
    work.sort(key=lambda item: 0 if item[0] == "steps" else 1 if "ring" in item[1][0] else 2)
    said, left = {"ok"}, dict(enumerate(work))
    with multiprocessing.get_context("spawn").Pool(min(args.jobs, len(work))) as pool:
        ready = pool.imap_unordered(share, left.items())
        with contextlib.suppress(multiprocessing.TimeoutError):
            while left:
                number, text = ready.next(max(0.0, began + args.limit - time.perf_counter()))
                del left[number]
                said.add(text)
    HUNG.update(given[0] for what, given in left.values() if what != "steps")
    say(what="compiled ahead", seconds=round(time.perf_counter() - began, 1), said=sorted(said), left_out=sorted(HUNG))


HUNG: set[str] = set()
"""Forms that were not ready in time, and may never be."""


def share(numbered: tuple[int, tuple[str, Any]]) -> tuple[int, str]:
    """Runs a piece of what will be measured, so that its kernels are in Triton's cache. What fails here fails again."""
    number, (what, given) = numbered
    try:
        if what == "steps":
            made = Steps(given)
            made.choose(FORMS[0])
            made.logits()
            made.tokens(3)
            made.subject.close()
        else:
            name, *rest = given
            (form,) = (f for f in FORMS if f.name == name)
            with in_its_place(form):
                if what == "right":
                    case_error(backend("triton"), *checks(form)[rest[0]])
                else:
                    Layer(rest[1], 1, rest[0], *rest[2:]).launch()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as problem:
        return number, f"{what} {given if what != 'steps' else ''}: {type(problem).__name__}: {problem}"[:400]
    return number, "ok"


def main() -> int:
    parts = {"ahead": ahead, "right": right, "alone": alone, "steps": steps}
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="*", choices=list(parts), default=list(parts))
    parser.add_argument("--only", nargs="*", default=[], help="forms whose names contain one of these, beside today's")
    parser.add_argument("--depths", nargs="*", type=int, default=list(DEPTHS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--limit", type=float, default=75, help="seconds for what is compiled ahead")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    failed, say = 0, Notes(args.out).say
    for part in args.part:
        try:
            parts[part](say, args)
        except Exception:
            failed += 1
            traceback.print_exc()
    return failed


if __name__ == "__main__":
    sys.exit(main())
