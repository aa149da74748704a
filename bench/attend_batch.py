"""Attention of sequences with one new token each on a CUDA device: forms of `attend_warps`, and `attend_one`.

    python bench/attend_batch.py --out attend.jsonl [--seconds 85] [--jobs 14] [--loads 128x5,..] [--variants A|B] [--list]

A variant takes its place in what a step launches, with rotation and append before it. Processes compile it for every load
and hold its rows and the cache against those of `attend_one`. Times are of graphs over caches that outgrow the device's, a
small kernel between two launches as in a step, less the small kernels alone; medians of 9, and the least and the most. A
line of JSON each as it comes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from notes import Notes
from prep import replaced

from quarrel.ops.attention import ATTENTION, ROPE_APPEND, AttentionSpec, RopeAppendSpec
from quarrel.ops.contract import CacheRef, ConstRef, Value
from quarrel.ops.kv import KVType, scaled
from quarrel.ops.program import KVLayer, Node, Program
from quarrel.ops.registry import lower
from quarrel.ops.rope import RopeSpec
from quarrel.triton_backend import attention, inputs
from quarrel.triton_backend.attend_one import attend_one
from quarrel.triton_backend.attend_warps import attend_warps
from quarrel.triton_backend.attention import Warps
from quarrel.triton_backend.backend import REGISTRY
from quarrel.triton_backend.cache import allocate
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime import Cache, Live, Slot, Work, cdiv

BEGAN = time.perf_counter()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROTATE = 240 << 20
"""Bytes of keys and values that no cache of the device holds."""
SIZE, ROUNDS = 32, 9
LIMIT = ATTENTION.tolerance["float16"]


@dataclass(frozen=True)
class Variant:
    """A form of `attend_warps`, or `attend_one` if there is none, and what else may differ from a step of the backend."""

    name: str
    form: Warps | None = None
    shipped: bool = False
    """Whatever the backend takes."""
    split: int = 0
    """What `split_keys` says, if it is to say something else."""
    exact: bool = False
    """As many programs as there is work for; else as a step's graph has."""

    def takes(self, load: Load) -> bool:
        """Whether it can, and differs: one sequence has splits of its own."""
        fits = self.form is None or load.spec.n_kv % self.form.heads == 0
        return fits and not (self.split and load.seqs == 1)


VARIANTS = (
    Variant("as shipped", shipped=True),
    Variant("attend_one"),
    Variant("one head, 3 stages", Warps(1, 32, 3)),
    Variant("one head, 4 stages", Warps(1, 32, 4)),
    Variant("one head of 16, 5 stages", Warps(1, 16, 5)),
    Variant("two heads, 3 stages", Warps(2, 32, 3)),
    Variant("two heads of 16, 4 stages", Warps(2, 16, 4)),
    Variant("four heads of 16, 3 stages", Warps(4, 16, 3)),
    Variant("four heads of 32, 2 stages", Warps(4, 32, 2)),
    Variant("one head, splits of 128", Warps(1, 32, 3), split=128),
    Variant("one head, splits of 512", Warps(1, 32, 3), split=512),
    Variant("two heads, splits of 512", Warps(2, 32, 3), split=512),
    Variant("as shipped, no empty programs", shipped=True, exact=True),
)
"""The most wanted first."""


@dataclass(frozen=True)
class Load:
    """Sequences whose keys are spread from `least` to `most`."""

    spec: AttentionSpec
    seqs: int
    least: int
    most: int
    kv: KVType = "auto"

    @property
    def name(self) -> str:
        keys = f"{self.least}" if self.least == self.most else f"{self.least}-{self.most}"
        shape = f"{self.spec.n_heads}/{self.spec.n_kv}/{self.spec.head_dim}"
        return f"{self.seqs}x{keys}" + ("" if self.kv == "auto" else f" {self.kv}") + f" of {shape}"

    def lengths(self) -> np.ndarray:
        spread = np.linspace(self.least, self.most, self.seqs).astype(np.int32)
        return np.random.default_rng(1).permutation(spread)

    def bytes(self) -> int:
        """Keys, values and scales that attention reads."""
        each = self.spec.head_dim + 4 if scaled(self.kv) else 2 * self.spec.head_dim
        return 2 * int(self.lengths().sum()) * self.spec.n_kv * each


MISTRAL = AttentionSpec(32, 8, 128, 128**-0.5)
TINYLLAMA = AttentionSpec(32, 4, 64, 0.125)
GPT_OSS = AttentionSpec(64, 8, 64, 0.125)
SMOLLM2 = AttentionSpec(9, 3, 64, 0.125)
LOADS = (
    Load(MISTRAL, 128, 512, 768),
    Load(MISTRAL, 128, 512, 512),
    Load(MISTRAL, 128, 768, 768),
    Load(MISTRAL, 128, 640, 640),
    Load(MISTRAL, 32, 640, 640),
    Load(MISTRAL, 8, 640, 640),
    Load(MISTRAL, 128, 640, 640, "fp8"),
    Load(MISTRAL, 128, 640, 640, "int8"),
    Load(TINYLLAMA, 128, 640, 640),
    Load(MISTRAL, 128, 128, 128),
    Load(MISTRAL, 256, 640, 640),
    Load(MISTRAL, 32, 4096, 4096),
    Load(TINYLLAMA, 32, 640, 640),
    Load(MISTRAL, 8, 4096, 4096),
    Load(MISTRAL, 1, 100, 100),
    Load(MISTRAL, 1, 1000, 1000),
    Load(MISTRAL, 1, 4096, 4096),
    Load(MISTRAL, 1, 32000, 32000),
    Load(MISTRAL, 1, 4096, 4096, "fp8"),
    Load(MISTRAL, 1, 32000, 32000, "fp8"),
    Load(MISTRAL, 1, 32000, 32000, "int8"),
    Load(MISTRAL, 4, 1000, 1000),
    Load(MISTRAL, 16, 640, 640),
    Load(MISTRAL, 64, 640, 640),
    Load(MISTRAL, 32, 640, 640, "fp8"),
    Load(TINYLLAMA, 1, 1000, 1000),
    Load(TINYLLAMA, 1, 100, 100),
    Load(SMOLLM2, 1, 100, 100),
    Load(SMOLLM2, 64, 640, 640),
    Load(GPT_OSS, 1, 1000, 1000),
    Load(GPT_OSS, 32, 640, 640),
)


@contextmanager
def tried(variant: Variant) -> Iterator[list[Any]]:
    """The backend with this variant; what it compiles for launches meanwhile."""
    made: list[Any] = []

    def kept(kernel: Any) -> Any:
        return SimpleNamespace(run=lambda *given, **told: made.append(kernel.run(*given, **told)))

    given: list[tuple[Any, str, Any]] = [(attention, k.__name__, kept(k)) for k in (attend_one, attend_warps)]
    if not variant.shipped:
        given.append((attention, "warps_for", lambda *_: variant.form))
    if variant.split:
        given += [(where, "split_keys", lambda seqs: variant.split) for where in (attention, inputs)]
    with replaced(*given):
        yield made


@dataclass
class Bed:
    """A load's inputs and its caches, the same keys at `count` places."""

    load: Load
    count: int
    caches: list[Cache] = field(init=False)

    def __post_init__(self) -> None:
        load, draw = self.load, torch.Generator(DEVICE).manual_seed(1)
        spec, lengths = load.spec, load.lengths()
        width = cdiv(load.most, SIZE)
        blocks = load.seqs * width
        table = np.random.default_rng(2).permutation(blocks).reshape(load.seqs, width)
        last = lengths - 1
        ints = {
            "positions": last,
            "slots": table[np.arange(load.seqs), last // SIZE] * SIZE + last % SIZE,
            "query_start": np.arange(load.seqs + 1),
            "kv_len": lengths,
            "block_table": table.reshape(-1),
        }
        self.ints = {name: torch.tensor(a, dtype=torch.int32, device=DEVICE) for name, a in ints.items()}
        self.width = torch.tensor([width], dtype=torch.int32, device=DEVICE)
        widths = {"q": spec.width, "k": spec.n_kv * spec.head_dim, "v": spec.n_kv * spec.head_dim}
        self.rows = {name: torch.randn(load.seqs * n, device=DEVICE, generator=draw).half() for name, n in widths.items()}
        first = allocate(KVLayer(spec.n_kv, spec.head_dim), blocks, SIZE, torch.float16, DEVICE, load.kv)
        for tensor in first.tensors:
            if tensor.dtype == torch.uint8:  # every code but those that E4M3 has no number for
                codes = torch.randint(0, 127, tensor.shape, dtype=torch.uint8, device=DEVICE, generator=draw)
                sign = torch.randint(0, 2, tensor.shape, dtype=torch.uint8, device=DEVICE, generator=draw)
                tensor.copy_(codes | sign << 7)
            else:
                tensor.normal_(generator=draw)
        for scale in first.scales:
            scale.abs_()
        self.caches = [first] + [
            Cache(first.k.clone(), first.v.clone(), first.kind, tuple(s.clone() for s in first.scales))
            for _ in range(self.count - 1)
        ]

    def made(self, variant: Variant) -> list[Callable[[], torch.Tensor]]:
        """The step's launches over each cache, to be called where the variant is `tried`; they return the rows."""
        load, seqs = self.load, self.load.seqs
        kv_len = self.ints["kv_len"].cpu().numpy()
        starts = inputs.item_starts(np.arange(seqs + 1), kv_len)
        live = inputs.live_counts(np.arange(seqs + 1), kv_len, seqs, starts)
        items = live.items if variant.exact else max(live.items, inputs.item_bucket(live.items, seqs))
        live = Live(seqs, seqs, seqs, True, False, items)
        work = Work(Slot(torch.tensor(starts, device=DEVICE)), Slot(self.width))
        spec = load.spec
        rope = [RopeSpec("norm", n, spec.head_dim, spec.head_dim) for n in (spec.n_heads, spec.n_kv)]
        names = ("q", "k", "v", *self.ints)
        kinds: list[Any] = ["act"] * 3 + ["i32"] * len(self.ints)
        sizes = [spec.width, spec.n_kv * spec.head_dim, spec.n_kv * spec.head_dim]
        dims: list[Any] = [*(("T", n) for n in sizes), *(("T",) for _ in self.ints)]
        value = {n: Value(i, k, d, n) for i, (n, k, d) in enumerate(zip(names, kinds, dims, strict=True))}
        turned, y = Value(20, "act", ("T", spec.width), "q"), Value(21, "act", ("T", spec.width), "y")
        freq = ConstRef("freq", tuple(10000.0 ** (-2 * i / spec.head_dim) for i in range(spec.head_dim // 2)))
        behind = tuple(value[n] for n in ("query_start", "kv_len", "block_table"))
        nodes: tuple[Node, ...] = (Node(ATTENTION, spec, (value["q"], *behind, CacheRef(0)), (y,)),)
        if not scaled(load.kv):
            given = (value["q"], value["k"], value["v"], value["positions"], freq, value["slots"], CacheRef(0))
            nodes = (
                Node(ROPE_APPEND, RopeAppendSpec(*rope), given, (turned,)),
                Node(ATTENTION, spec, (turned, *behind, CacheRef(0)), (y,)),
            )
        slots = {value[n].id: Slot(t) for n, t in (self.rows | self.ints).items()}
        choices = lower(Program(nodes, {v.name: v for v in value.values()}, {}, ()), REGISTRY)
        rows = {"T": seqs, "S": seqs, "R": seqs, "items": items}

        def launches(cache: Cache) -> Callable[[], torch.Tensor]:
            plan = Plan(choices, slots, {y.id}, dict(rows), _Consts(), [cache], [], work, "float16", DEVICE)
            plan.fill(255)

            def go() -> torch.Tensor:
                for launch in plan.launches:
                    launch(live)
                return plan.slots[y.id].tensor

            return go

        return [launches(cache) for cache in self.caches]

    def new_rows(self) -> list[torch.Tensor]:
        """What the step has appended to the first cache."""
        slots = self.ints["slots"].long()
        return [t[slots // SIZE, :, slots % SIZE].clone() for t in (self.caches[0].k, self.caches[0].v)]

    def error(self, variant: Variant) -> float:
        """Of a variant's rows, and of what it appends, against those of `attend_one`, the largest."""
        found = []
        for each in (VARIANTS[1], variant):
            if not scaled(self.load.kv):
                slots = self.ints["slots"].long()
                for tensor in (self.caches[0].k, self.caches[0].v):
                    tensor[slots // SIZE, :, slots % SIZE] = 7.0
            with tried(each):
                go = self.made(each)[0]
                go()
                rows = go().clone()  # the second time with the counters that the first has left
            found.append((rows.float(), self.new_rows()))
        (want, cache), (got, other) = found
        pairs = [(want, got), *((a.float(), b.float()) for a, b in zip(cache, other, strict=True))]
        return max(float((b - a).norm() / a.norm()) for a, b in pairs)


class _Consts:
    """No weights: attention has a table of frequencies alone."""

    def const(self, ref: ConstRef) -> torch.Tensor:
        return torch.tensor(ref.data, device=DEVICE)


Job = tuple[Variant, Load]


def checked(job: Job) -> tuple[Job, dict[str, Any]]:
    """Fills Triton's cache in a worker and checks what it made."""
    variant, load = job
    row: dict[str, Any] = {"variant": variant.name, "load": load.name}
    try:
        return job, row | {"error": Bed(load, 1).error(variant)}
    except Exception:
        return job, row | {"raised": traceback.format_exc(limit=-4)[-1200:]}


def jobs_for(loads: Sequence[Load], variants: Sequence[Variant] = VARIANTS) -> list[Job]:
    """Loads of other kernels first, as those of the same kernels need nothing compiled afterwards."""
    firsts: dict[Any, Load] = {}
    for load in loads:
        firsts.setdefault((load.spec, load.kv, attention.split_keys(load.seqs)), load)
    order = [*firsts.values(), *(load for load in loads if load not in firsts.values())]
    return [(variant, load) for load in order for variant in variants if variant.takes(load)]


def timed(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Microseconds of a turn: a graph of a few rounds of all calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = max(1, 24 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    found = []
    for _ in range(ROUNDS):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        found.append(a.elapsed_time(b) * 1e3 / (rounds * len(calls)))
    return found


def times(bed: Bed, variant: Variant) -> dict[str, float]:
    """Of one launch with its kernels before it, each behind a small kernel that waits for the one ahead."""
    between = torch.zeros(1, device=DEVICE)

    def spaced(go: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> None:
            between.add_(1.0)
            go()

        return call

    alone = median(timed([lambda: between.add_(1.0)]))
    with tried(variant) as made:
        found = [us - alone for us in timed([spaced(go) for go in bed.made(variant)])]
    us, kernel = median(found), made[-1]
    size = {"registers": kernel.n_regs, "spills": kernel.n_spills, "shared": kernel.metadata.shared}
    rest = {"low": round(min(found), 1), "high": round(max(found), 1)}
    return {"us": round(us, 1), **rest, "tb_s": round(bed.load.bytes() / us * 1e-6, 2), **size}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("attend.jsonl"))
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--loads", default="", help="only loads whose names begin with one of these")
    parser.add_argument("--variants", default="", help="only these, separated by |")
    parser.add_argument("--list", action="store_true", help="print what would be done")
    args = parser.parse_args()
    loads = [load for load in LOADS if load.name.startswith(tuple(args.loads.split(",")))]
    variants = [v for v in VARIANTS if not args.variants or v.name in args.variants.split("|")]
    jobs = jobs_for(loads, variants)
    if not jobs:
        parser.error(f"no variant takes any load: --loads {args.loads or 'all'}, --variants {args.variants or 'all'}")
    if args.list:
        print(*(f"{load.name}: {variant}" for variant, load in jobs), sep="\n")
        return 0
    say = Notes(args.out, BEGAN).say
    good: set[Job] = set()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        waiting = pool.imap_unordered(checked, jobs)
        try:
            for _ in jobs:
                job, row = waiting.next(max(0.1, BEGAN + args.seconds * 0.7 - time.perf_counter()))
                say(**row)
                if row.get("error", float("inf")) <= LIMIT:
                    good.add(job)
        except multiprocessing.TimeoutError:
            say(fault="the time was over", right=len(good))
        pool.terminate()
    lines = []
    for load in loads:
        bed = None
        for variant in variants:
            if (variant, load) not in good or time.perf_counter() > BEGAN + args.seconds:
                continue
            try:
                bed = bed or Bed(load, max(2, min(24, cdiv(ROTATE, load.bytes()))))
                row = times(bed, variant)
            except Exception as failure:
                say(load=load.name, variant=variant.name, raised=f"{type(failure).__name__}: {failure}"[:300])
                continue
            say(load=load.name, variant=variant.name, **row)
            lines.append(f"{load.name:24s} {row['us']:8.1f} us {row['tb_s']:5.2f} TB/s  {variant.name}")
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
