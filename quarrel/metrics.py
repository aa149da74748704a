"""The names that Prometheus knows the engines by. Nothing is counted here: a scrape reads what the engines have counted.

    metrics = Metrics()
    metrics.add("demo", llm)
    print(metrics.text().decode())

A server that has a registry of its own registers `EngineMetrics` there.
"""

from __future__ import annotations

import gc
import resource
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, UnknownMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from quarrel.engine import Activity, Histogram, Stats

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | UnknownMetricFamily


class Held(Protocol):
    """What is read of a model; `quarrel.LLM` is one."""

    def stats(self) -> Stats: ...

    def activity(self) -> Activity: ...


@runtime_checkable
class CountsExperts(Protocol):
    """A model that counts which experts its routers choose."""

    def expert_counts(self) -> Mapping[str, Sequence[int]]: ...


@runtime_checkable
class Told(Protocol):
    """A model that says how it was loaded: `quarrel.llm.Explanation`."""

    def explain(self) -> Any: ...


Series = tuple[str, tuple[str, ...]]
"""A metric and the values of its labels."""
Models = Callable[[], Iterable[tuple[str, Held]]]
"""Names and models, as they are when it is called. Another object under a name is a model loaded anew: it counts from 0."""

COUNTERS: tuple[tuple[str, str, Callable[[Stats, Activity], float]], ...] = (
    ("quarrel_engine_steps", "Steps that ran", lambda s, a: s.steps),
    ("quarrel_engine_prefill_seconds", "In steps that ran parts of prompts", lambda s, a: s.prefill_seconds),
    ("quarrel_engine_decode_seconds", "In steps that only decoded", lambda s, a: s.decode_seconds),
    ("quarrel_engine_preemptions", "Requests put back for want of blocks", lambda s, a: a.preempted),
    ("quarrel_engine_faults", "Steps that broke", lambda s, a: s.faults),
    ("quarrel_engine_restarts", "Steps made anew after a fault", lambda s, a: s.restarts),
    ("quarrel_kv_cache_hits", "Prompt tokens that were in the cache", lambda s, a: s.known_tokens),
    ("quarrel_kv_cache_misses", "Prompt tokens that had to run", lambda s, a: s.prompt_tokens),
    ("quarrel_kv_cache_evictions", "Kept blocks that made room", lambda s, a: a.evictions),
    ("quarrel_numerical_instability", "Requests whose numbers diverged (NaN)", lambda s, a: s.ends["Diverged"]),
    ("quarrel_ssm_divergence", "Of these, with NaN or infinity in a recurrent state", lambda s, a: s.diverged_states),
)
PLAIN = ("quarrel_ssm_divergence",)
"""Counters that older dashboards know without `_total`; they have both names, as the choices of experts do."""
GAUGES: tuple[tuple[str, str, Callable[[Stats, Activity], float]], ...] = (
    ("quarrel_engine_requests_running", "Requests that have blocks", lambda s, a: a.running),
    ("quarrel_engine_requests_waiting", "Requests in the queue", lambda s, a: a.waiting),
    ("quarrel_kv_cache_blocks_free", "Blocks that hold nothing", lambda s, a: a.free_blocks),
    ("quarrel_kv_cache_blocks_kept", "Blocks kept for prompts to come", lambda s, a: a.kept_blocks),
    ("quarrel_kv_cache_blocks", "Blocks there are", lambda s, a: a.n_blocks),
    ("quarrel_kv_cache_snapshots", "Kept copies of recurrent state", lambda s, a: a.snapshots),
    (
        "quarrel_kv_cache_hit_ratio",
        "Share of prompt tokens that were in the cache",
        lambda s, a: s.known_tokens / max(1, s.known_tokens + s.prompt_tokens),
    ),
)
HISTOGRAMS: tuple[tuple[str, str, Callable[[Stats], Histogram]], ...] = (
    ("quarrel_inference_ttft_seconds", "From the request to its first token", lambda s: s.first_token_seconds),
    ("quarrel_inference_tpot_seconds", "Between two tokens of a request", lambda s: s.token_seconds),
    ("quarrel_inference_duration_seconds", "From the request to its end", lambda s: s.request_seconds),
    ("quarrel_inference_queue_latency_seconds", "From the request to its first step", lambda s: s.queue_seconds),
    ("quarrel_engine_step_duration_seconds", "Steps, from launch to result", lambda s: s.step_seconds),
    ("quarrel_engine_batch_sequences", "Requests in a step", lambda s: s.batch_sequences),
    ("quarrel_engine_batch_tokens", "Tokens in a step", lambda s: s.batch_tokens),
    ("quarrel_moe_layer_latency_seconds", "A layer of experts in a timed step", lambda s: s.moe_layer_seconds),
    ("quarrel_moe_routing_latency_seconds", "Choosing its experts", lambda s: s.moe_routing_seconds),
    ("quarrel_ssm_scan_latency", "A recurrent layer's scan in a timed step, seconds", lambda s: s.ssm_scan_seconds),
    ("quarrel_ssm_conv_latency", "Its convolution, seconds", lambda s: s.ssm_conv_seconds),
)
TOKENS: tuple[tuple[str, Callable[[Stats], float]], ...] = (
    ("prompt", lambda s: s.prompt_tokens),
    ("cached", lambda s: s.known_tokens),
    ("generated", lambda s: s.drawn_tokens),
    ("guessed", lambda s: s.guessed_tokens),
    ("guessed_right", lambda s: s.right_tokens),
    ("drafted", lambda s: s.drafted_tokens),
    ("drafted_right", lambda s: s.drafted_right),
)


class EngineMetrics(Collector):
    """Reads the engines when a scrape comes. Counters go on where a model is loaded again, whose engine counts from 0."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._lock = threading.Lock()
        self._read_of: dict[str, weakref.ref[Held]] = {}
        self._last: dict[str, dict[Series, float]] = {}
        """By model: what its counters were at the last scrape, and (below) before it was last loaded."""
        self._base: dict[str, dict[Series, float]] = {}

    def collect(self) -> Iterator[Family]:
        with self._lock:  # two scrapes at once must not see each other's older figures
            models = list(self._models())
            for name, model in models:
                before = self._read_of.get(name)
                if before is None or before() is not model:
                    self._base[name] = self._last.get(name, {}).copy()
                    self._read_of[name] = weakref.ref(model)
            families = list(self._collect(models))
            for family in families:
                if not isinstance(family, GaugeMetricFamily):
                    family.samples = [self._grown(sample) for sample in family.samples]
        yield from families

    def _grown(self, sample: Sample) -> Sample:
        name = sample.labels.get("model")
        if name is None:
            return sample
        series = sample.name, tuple(sample.labels.values())
        value = sample.value + self._base[name].get(series, 0.0)
        self._last.setdefault(name, {})[series] = value
        return sample._replace(value=value)

    def _collect(self, models: Sequence[tuple[str, Held]]) -> Iterator[Family]:
        read = [(name, model.stats(), model.activity()) for name, model in models]
        for metric, help, value in COUNTERS:
            counter = CounterMetricFamily(metric, help, labels=["model"])
            for name, stats, activity in read:
                counter.add_metric([name], value(stats, activity))
            yield counter
            if metric in PLAIN:
                yield _plain(counter)
        for metric, help, value in GAUGES:
            gauge = GaugeMetricFamily(metric, help, labels=["model"])
            for name, stats, activity in read:
                gauge.add_metric([name], value(stats, activity))
            yield gauge
        for metric, help, of in HISTOGRAMS:
            family = HistogramMetricFamily(metric, help, labels=["model"])
            for name, stats, _ in read:
                histogram = of(stats)
                family.add_metric([name], list(_cumulated(histogram)), histogram.sum)
            yield family
        tokens = CounterMetricFamily("quarrel_inference_tokens", "Tokens by kind", labels=["model", "type"])
        requests = CounterMetricFamily("quarrel_engine_requests", "Requests by how they ended", labels=["model", "outcome"])
        for name, stats, _ in read:
            for kind, count in TOKENS:
                tokens.add_metric([name, kind], count(stats))
            for outcome, ended in sorted(stats.ends.copy().items()):
                requests.add_metric([name, outcome], ended)
        yield tokens
        yield requests
        yield from _experts(models)
        yield from _loaded(models)
        collections = sum(generation["collections"] for generation in gc.get_stats())
        yield CounterMetricFamily("quarrel_process_gc_collections", "Runs of Python's collector", value=collections)
        yield GaugeMetricFamily("quarrel_memory_rss_bytes", "Memory of the process", value=_memory())
        yield GaugeMetricFamily("quarrel_process_threads", "Threads of Python", value=threading.active_count())


def _plain(counter: CounterMetricFamily) -> UnknownMetricFamily:
    """The same numbers by the counter's name alone, which this library does not give a counter."""
    same = UnknownMetricFamily(counter.name, counter.documentation)
    same.samples = [sample._replace(name=counter.name) for sample in counter.samples]
    return same


class Metrics:
    """Models by name, and a registry of its own."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self.registry = CollectorRegistry()
        self.registry.register(EngineMetrics(lambda: list(self._held.items())))

    def add(self, name: str, model: Held) -> None:
        self._held[name] = model

    def remove(self, name: str) -> None:
        self._held.pop(name, None)

    def text(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self.registry)


def _experts(models: Iterable[tuple[str, Held]]) -> Iterator[Family]:
    labels = ["model", "layer", "expert_id"]
    chosen = CounterMetricFamily("quarrel_moe_expert_selection", "Tokens that an expert took", labels=labels)
    share = GaugeMetricFamily("quarrel_moe_expert_utilization", "Share of its layer's choices", labels=labels)
    for name, model in models:
        counts = model.expert_counts() if isinstance(model, CountsExperts) else {}
        for path, layer in counts.items():
            total = max(1, sum(layer))
            for expert, count in enumerate(layer):
                chosen.add_metric([name, path, str(expert)], count)
                share.add_metric([name, path, str(expert)], count / total)
    yield chosen
    yield _plain(chosen)
    yield share


MEMORY = {
    "triton": "quarrel_cuda_memory_allocated_bytes",
    "mlx": "quarrel_metal_memory_used_bytes",
    "cpu": "quarrel_cpu_memory_bytes",
}


def _loaded(models: Iterable[tuple[str, Held]]) -> Iterator[Family]:
    """What follows from how models were loaded."""
    length = GaugeMetricFamily("quarrel_context_length_tokens", "Of one sequence", labels=["model"])
    cache = GaugeMetricFamily("quarrel_kv_cache_size_bytes", "Keys and values", labels=["model", "layer"])
    states = [
        GaugeMetricFamily(metric, "Recurrent states and their kept copies, bytes", labels=["model"])
        for metric in ("quarrel_ssm_state_size_bytes", "quarrel_ssm_state_size")
    ]
    memory = {
        backend: GaugeMetricFamily(metric, "Weights, cache and scratch", labels=["model", "device"])
        for backend, metric in MEMORY.items()
    }
    for name, model in models:
        if not isinstance(model, Told):
            continue
        facts = model.explain()
        length.add_metric([name], facts.n_ctx)
        for gauge in states:
            gauge.add_metric([name], sum(plan.states + plan.snapshots for plan in facts.plans))
        taken: Counter[tuple[str, str]] = Counter()
        for backend, device, plan in facts.parts:
            taken[backend, device] += plan.weights + plan.cache + plan.activations
        for (backend, device), size in taken.items():
            if backend in memory:
                memory[backend].add_metric([name, device], size)
        layers = [call.path for call in facts.choices if call.op == "attention"]
        for path in layers:
            cache.add_metric([name, path], sum(plan.cache for _, _, plan in facts.parts) / len(layers))
    yield length
    yield cache
    yield from states
    yield from memory.values()


def _cumulated(histogram: Histogram) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, count in zip((*histogram.bounds, float("inf")), tuple(histogram.counts)):
        total += count
        yield "+Inf" if bound == float("inf") else repr(float(bound)), total


def _memory() -> int:
    """What is resident now where the system reports it, the most so far elsewhere."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
