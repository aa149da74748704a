"""On a GPU: whole prompts attended to by cuDNN or by our own kernels.

python -m bench.ops.prompt_attention --out RESULTS.jsonl [--part right|ops|prompts ...] [--layers N] [--seconds 70]

Models are drawn on the spot. Both sides of a figure run in turns, and the median of five counts.
"""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.shared import FOLDER, ROOT, Notes, command_line, graph_us, synthetic_command
from quarrel.bench.measure import run as run_steps
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test
from quarrel.gguf import GGUFFile
from quarrel.interop.call import COMPUTE, Prepared
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import rel_error
from quarrel.ops.registry import backend
from quarrel.triton_backend.attention import cudnn as attend_whole
from quarrel.triton_backend.runtime.arrays import Cache, Slot
from quarrel.triton_backend.runtime.site import Batch, Tables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, LEAST = 32, 256
Say = Callable[..., None]


class Attention:
    """One layer's attention to whole prompts whose blocks lie in any order."""

    def __init__(self, spec: AttentionSpec, lengths: Sequence[int], dtype: torch.dtype) -> None:
        draw = torch.Generator(DEVICE).manual_seed(1)
        self.spec, self.lengths, self.tokens = spec, list(lengths), sum(lengths)
        width = -(-max(lengths) // SIZE)
        blocks = width * len(lengths)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=DEVICE, generator=draw).to(dtype)

        self.q = drawn(self.tokens, spec.width)
        self.cache = Cache(*(drawn(blocks + 1, spec.n_kv, SIZE, spec.head_dim) for _ in range(2)))
        table = np.random.default_rng(1).permutation(blocks).reshape(len(lengths), width)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        self.ints = [torch.tensor(a, dtype=torch.int32, device=DEVICE) for a in (ends, lengths, table)]
        self.prompts = tuple((s, int(ends[s]), n) for s, n in enumerate(lengths))
        self.built = [
            Prepared(ATTENTION, spec, (None,) * 4 + (self.cache,), COMPUTE[dtype], DEVICE, cudnn_from=n) for n in (0, 1)
        ]
        self.width = torch.full((1,), width, dtype=torch.int32, device=DEVICE)

    def __call__(self, library: bool) -> torch.Tensor:
        batch = Batch(self.tokens, len(self.lengths), 1, False, True, 1, self.prompts if library else ())
        work = Tables(Slot(torch.zeros_like(self.ints[0])), Slot(self.width))
        return self.built[library]((self.q, *self.ints), batch, work)[0]

    def error(self, got: torch.Tensor) -> float:
        """Of one head in each group, against sums in float64."""
        spec, worst = self.spec, 0.0
        group, table = spec.n_heads // spec.n_kv, self.ints[2].long()
        found = got.view(self.tokens, spec.n_heads, spec.head_dim)
        queries = self.q.view(self.tokens, spec.n_heads, spec.head_dim)
        for s, begin, n in self.prompts:
            hidden = torch.ones(n, n, device=DEVICE, dtype=torch.bool).triu(1)
            for head in range(0, spec.n_heads, group):
                cache = (t[table[s], head // group].reshape(-1, spec.head_dim)[:n] for t in (self.cache.k, self.cache.v))
                k, v = (t.double() for t in cache)
                score = (queries[begin : begin + n, head].double() @ k.t() * spec.scale).masked_fill(hidden, -torch.inf)
                want = score.softmax(-1) @ v
                here = found[begin : begin + n, head].double()
                worst = max(worst, float((here - want).norm() / want.norm()))
        return worst


def right(say: Say) -> None:
    """Every head shape, lengths that are rounded up, several prompts, both 16-bit types."""
    shapes = [(32, 8, 128), (9, 3, 64), (8, 1, 128), (12, 12, 64), (16, 4, 96), (16, 16, 80), (8, 2, 32)]
    shapes = shapes if DEVICE.type == "cuda" else shapes[:2]
    dtypes = (torch.float16, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float16,)
    for heads, kv, dim in shapes:
        spec = AttentionSpec(heads, kv, dim, dim**-0.5)
        for lengths in ((2048,), (2049,), (700, 513)) if DEVICE.type == "cuda" else ((300,), (40, 57)):
            for dtype in dtypes:
                given = Attention(spec, lengths, dtype)
                own = given.error(given(False))
                with counted() as calls:
                    library = given.error(given(True))
                ok = library < (2e-3 if dtype == torch.float16 else 1.2e-2)
                row = {"spec": str(spec), "lengths": lengths, "dtype": str(dtype), "own": own, "cudnn": library}
                say(what="right", **row, calls=len(calls), ok=ok and len(calls) == len(lengths))


@contextmanager
def counted() -> Iterator[list[None]]:
    """The calls of PyTorch's attention meanwhile."""
    calls: list[None] = []
    given = attend_whole.F.scaled_dot_product_attention

    def count(*inputs: Any, **options: Any) -> torch.Tensor:
        calls.append(None)
        return given(*inputs, **options)

    attend_whole.F.scaled_dot_product_attention = count
    try:
        yield calls
    finally:
        attend_whole.F.scaled_dot_product_attention = given


def ops(say: Say) -> None:
    """A layer of Mistral-7B's: microseconds by length, and what a length costs that cuDNN has not met."""
    for tokens in (256, 512, 1024, 2048, 4096, 8192) if DEVICE.type == "cuda" else (256,):
        given = Attention(AttentionSpec(32, 8, 128, 128**-0.5), (tokens,), torch.float16)
        found: dict[str, float] = {}
        for name, which in (("own", False), ("cudnn", True)):
            found[f"{name}_us"] = microseconds(lambda a=given, w=which: a(w))  # type: ignore[misc]
        say(what="a layer of 32 heads over 8 of 128", tokens=tokens, **found)
    for tokens in (1280, 1536, 3072):
        given = Attention(AttentionSpec(32, 8, 128, 128**-0.5), (tokens,), torch.float16)
        began = _clock()
        given(True)
        first = _clock() - began
        began = _clock()
        given(True)
        again = _clock() - began
        say(what="a new length", tokens=tokens, first_ms=round(first * 1e3, 2), second_ms=round(again * 1e3, 2))


def microseconds(call: Callable[[], Any]) -> float:
    """Of a call within a graph; 0 where there is no GPU."""
    return graph_us(call) if DEVICE.type == "cuda" else 0.0


def _clock() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def against(
    say: Say, path: Path, tests: Sequence[Test], step_tokens: int, sides: Mapping[str, tuple[str, str]], what: str
) -> None:
    """`sides` are (attention, compute) by name."""
    with GGUFFile.open(path) as file:
        source = Source.of(file, max(t.length for t in tests))
        limits = limits_for(tests, step_tokens, False)
        made = {
            name: Subject(source, backend("triton"), replace(limits, attention=attention), compute)  # type: ignore[arg-type]
            for name, (attention, compute) in sides.items()
        }
        for test in tests:
            taken: dict[str, list[float]] = {name: [] for name in made}
            logits: list[np.ndarray] = []
            for name, subject in made.items():
                *before, last = subject.layout.prefill(0, test.tokens)
                run_steps(subject, before)
                logits.append(subject.step(last, "logits").logits)  # type: ignore[arg-type]
                if name != "own":
                    run_steps(subject, subject.layout.prefill(0, test.tokens))
            for _ in range(5):
                for name, subject in made.items():
                    began = time.perf_counter()
                    run_steps(subject, subject.layout.prefill(0, test.tokens))
                    taken[name].append(time.perf_counter() - began)
            speeds = {name: round(test.tokens / median(seconds), 1) for name, seconds in taken.items()}
            first, second = speeds.values()
            all = {name: [round(s * 1e3, 3) for s in seconds] for name, seconds in taken.items()}
            gain, apart = round(second / first, 4), rel_error(logits[1], logits[0])
            say(what=what, test=test.name, step_tokens=step_tokens, speeds=speeds, gain=gain, apart=apart, ms=all)
        for subject in made.values():
            subject.close()


def prompts(say: Say, path: Path) -> None:
    """Mistral-7B Q4_K_M. cuDNN takes what is shorter than usual too, to see from where it is faster."""
    attend_whole.LEAST = LEAST if DEVICE.type == "cuda" else 16
    sides = {"own": ("own", "float16"), "cudnn": ("cudnn", "float16")}
    lengths = ((2048, (512, 1024, 2048, 4096)), (8192, (2048, 4096, 8192))) if DEVICE.type == "cuda" else ((64, (40,)),)
    for step_tokens, counts in lengths:
        against(say, path, [Test("prefill", n) for n in counts], step_tokens, sides, "prompts of Mistral-7B Q4_K_M")


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="*", default=["right", "ops", "prompts"])
    parser.add_argument("--shape", default="mistral-7b", help="of tools/synthetic_shapes.toml")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    failed, say = 0, Notes(args.out).say
    path = args.folder / "attention-Q4_K_M.gguf"
    command = synthetic_command(f"{args.shape}:Q4_K_M", path, args.layers)
    making = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) if "prompts" in args.part else None
    for part in args.part:
        try:
            if part == "prompts" and making is not None:
                if making.wait():
                    raise RuntimeError("the model was not written")
                prompts(say, path)
            else:
                {"right": right, "ops": ops}[part](say)
        except Exception:
            failed += 1
            traceback.print_exc()
    return failed


if __name__ == "__main__":
    sys.exit(main())
