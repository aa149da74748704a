"""End to end through the engine, without text: what a caller of `generate` gets, scheduling and sampling included."""

from __future__ import annotations

from quarrel.bench.measure import Samples
from quarrel.bench.workload import Test
from quarrel.errors import QuarrelError
from quarrel.llm import LLM, load
from quarrel.ops.step import Backend, ComputeChoice


def measure_engine(path: str, backend: Backend, compute: ComputeChoice, test: Test, rounds: int) -> Samples:
    """Seconds from the last first token to the end, scaled to all the tokens; prompts of `depth` tokens run before."""
    with load(path, backend=backend, compute=compute, n_ctx=test.length, max_seqs=test.batch, prefix_cache=False) as llm:
        seconds = [_once(llm, test) for _ in range(rounds + 1)]
    return Samples(tuple(seconds[1:]), seconds[0])


def _once(llm: LLM, test: Test) -> float:
    prompts = [[(7919 * (i + 131 * s) + 1) % llm.spec.n_vocab for i in range(test.depth)] for s in range(test.batch)]
    results = llm.generate(prompts, temperature=0, max_tokens=test.tokens, ignore_eos=True)
    for result in results:
        if result.error:
            raise QuarrelError(result.error)
    slowest = max(results, key=lambda r: r.timings.decode).timings
    return slowest.decode * test.tokens / max(1, slowest.decode_tokens)
