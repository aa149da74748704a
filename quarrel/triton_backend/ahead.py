"""What a step will compile, found by a plan without storage, and compiled before the step is launched."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quarrel.ops.attention import ATTENTION
from quarrel.ops.registry import Choice
from quarrel.ops.step import Limits
from quarrel.triton_backend.attention import ring
from quarrel.triton_backend.attention.splits import MOST_SPLITS
from quarrel.triton_backend.inputs import PROMPTS, item_bucket
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime.compile import Compilers, Job, uncompiled
from quarrel.triton_backend.runtime.site import Batch

log = logging.getLogger(__name__)
Masks = Mapping[str, Sequence[bool]]
"""Which nodes a step runs, by what is wanted of it."""
FIRST = 5
"""Steps that are foreseen, of which one is likely the first: short prompts, and a token."""


@dataclass
class Ahead:
    """The kernels of a plan's steps. `twin` is the plan over tensors without storage, its launches `launch_nothing`."""

    twin: Plan
    masks: Masks
    compilers: list[Compilers] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._launches = list(_some_of_each(self.twin.choices))
        self._lock = threading.Lock()

    def begin(self, limits: Limits) -> None:
        """Starts with all that can be foreseen, first steps first, unless the first one's kernels are on disk already."""
        want = "tokens" if "tokens" in self.masks else next(iter(self.masks))
        attends = [c.node for c in self.twin.choices if c.node.op is ATTENTION]
        steps = list(foreseen(limits, ring.deep_sequences(self.twin, attends)))
        if not self._missing(steps[0], want):
            return
        known: set[str] = set()
        # Those of the first steps compile while the others are listed.
        for some in (steps[:FIRST], steps[FIRST:]):
            jobs: dict[str, Job] = {}
            for batch in some:
                jobs |= {key: job for key, job in self._missing(batch, want).items() if key not in known}
            known |= jobs.keys()
            if jobs:
                self.compilers.append(Compilers(jobs, nice=5 * len(self.compilers) + 5))

    def need(self, batch: Batch, want: str) -> None:
        """Returns when nothing, or one kernel, is left to compile for this step."""
        with self._lock:  # a plan without storage is run by one thread at a time
            jobs = self._missing(batch, want)
            unknown = {key: job for key, job in jobs.items() if not any(key in c for c in self.compilers)}
            if len(unknown) > 1:
                self.compilers.append(Compilers(unknown))
        for compilers in self.compilers:
            compilers.wait(jobs)

    def close(self) -> None:
        """Ends what still compiles."""
        for compilers in self.compilers:
            compilers.close()
        self.twin.drop()

    def _missing(self, batch: Batch, want: str) -> dict[str, Job]:
        def run() -> None:
            for i in self._launches:
                if self.masks[want][i]:
                    self.twin.launches[i](batch)

        try:
            return uncompiled(run)
        except Exception:
            log.info("the kernels of a step could not be listed: they are compiled where they are launched", exc_info=True)
            return {}


def foreseen(limits: Limits, deep: range = range(0)) -> Iterator[Batch]:
    """Steps that a model will be given, in the order in which they matter: a short prompt, a token, other prompts,
    batches, a token behind many, both together, and those of so many sequences that may be `deep`."""
    most = min(limits.max_seqs, limits.max_tokens)
    lengths = (64, 32, 16, 128, 512, limits.max_tokens, 256)
    prompts = list(dict.fromkeys(PROMPTS.tokens(n, limits.max_tokens) for n in lengths))
    seqs = [n for n in (1, 8, 128, 2, 4, 16, 32, 64) if n <= most]

    def decode(n: int) -> Batch:
        return Batch(n, n, n, True, False, item_bucket(n, n))

    yield Batch(prompts[0], min(2, most), 1, False, True, 0)
    yield decode(1)
    for tokens in prompts[1:]:
        yield Batch(tokens, min(2, most), 1, False, True, 0)
    for n in seqs[1:]:
        yield decode(n)
    yield Batch(1, 1, 1, True, False, item_bucket(MOST_SPLITS, 1))
    if most > 1:
        yield Batch(prompts[-1], most, most, True, True, item_bucket(most, most))
    if limits.max_blocks_per_seq * limits.block_size >= ring.DEEP:
        for n in (n for n in seqs if n in deep):
            yield replace(decode(n), items=item_bucket(n * MOST_SPLITS, n), deep=True)


def _some_of_each(choices: Iterable[Choice]) -> Iterator[int]:
    """Of nodes that differ in their weights alone the first two, which what is before may set apart, and the last."""
    like: dict[object, list[int]] = defaultdict(list)
    for i, choice in enumerate(choices):
        node = choice.node
        kinds = tuple(v.kind for v in node.outputs)
        like[choice.implementation.name, node.op.name, node.spec, kinds].append(i)
    yield from sorted({i for same in like.values() for i in (*same[:2], same[-1])})
