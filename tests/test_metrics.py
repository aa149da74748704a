"""A scrape tells what the engines have done, under names that stay."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quarrel.engine import SamplingParams, Service
from quarrel.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics
from tests.engine.toys import Toy, limits

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Held:
    def __init__(self, toy: Toy) -> None:
        self.stats = lambda: toy.engine.stats
        self.activity = lambda: toy.loop.run(toy.engine.activity)


def scrape(metrics: Metrics) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {(s.name, *(s.labels[k] for k in sorted(s.labels))): s.value for f in families for s in f.samples}


def test_a_scrape_tells_what_happened() -> None:
    with Toy(limits(n_blocks=60)) as toy:
        metrics = Metrics()
        metrics.add("toy", Held(toy))
        toy.generate([1, 2, 3, 4, 5], GREEDY)
        toy.generate([1, 2, 3, 4, 5], GREEDY)
        toy.step.bad_tokens = {40}
        toy.generate([40], GREEDY)
        toy.generate([1], GREEDY, Service(total_seconds=1e-6))
        found = scrape(metrics)
        wanted: dict[tuple[str, ...], Any] = {
            ("quarrel_inference_tokens_total", "toy", "generated"): 24,
            ("quarrel_inference_tokens_total", "toy", "prompt"): 5 + 1 + 1,
            ("quarrel_inference_tokens_total", "toy", "cached"): 4,
            ("quarrel_kv_cache_hits_total", "toy"): 4,
            ("quarrel_kv_cache_hit_ratio", "toy"): pytest.approx(4 / 11),
            ("quarrel_engine_requests_total", "toy", "length"): 2,
            ("quarrel_engine_requests_total", "toy", "Diverged"): 1,
            ("quarrel_engine_requests_total", "toy", "DeadlineExceeded"): 1,
            ("quarrel_numerical_instability_total", "toy"): 1,
            ("quarrel_inference_ttft_seconds_count", "toy"): 2,
            ("quarrel_inference_tpot_seconds_count", "toy"): 22,
            ("quarrel_inference_duration_seconds_count", "toy"): 4,
            ("quarrel_engine_steps_total", "toy"): 25,
            ("quarrel_engine_batch_sequences_bucket", "1.0", "toy"): 25,
            ("quarrel_engine_requests_running", "toy"): 0,
            ("quarrel_kv_cache_blocks_total", "toy"): 60,
        }
        assert {key: found.get(key) for key in wanted} == wanted
        assert found["quarrel_inference_ttft_seconds_sum", "toy"] > 0
        metrics.remove("toy")
        assert not any("toy" in key for key in scrape(metrics))


def test_the_names_stay() -> None:
    names = [name for name, *_ in (*COUNTERS, *GAUGES, *HISTOGRAMS)]
    assert len(set(names)) == len(names)
    assert all(name.startswith("quarrel_") for name in names)
    assert {"quarrel_inference_ttft_seconds", "quarrel_inference_tpot_seconds", "quarrel_kv_cache_hits"} <= set(names)
