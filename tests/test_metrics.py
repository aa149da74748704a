"""A scrape tells what the engines have done, under names that stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import quarrel
from quarrel.engine import SamplingParams, Service
from quarrel.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics
from tests.engine.toys import Toy, limits
from tests.paths import need_cases

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


LEFT_OUT = {
    "a captured step has no times of its parts: `bench/steps/gpu_profile.py` and `python -m quarrel.bench` measure them": (
        "moe_layer_latency_seconds moe_routing_latency_seconds cuda_kernel_duration_seconds metal_kernel_duration_seconds"
        " ssm_scan_latency_seconds ssm_conv_latency_seconds"
    ),
    "not counted: what runs is known beforehand, `quarrel explain` lists it": (
        "cuda_gemm_ops_total cuda_attention_ops_total cpu_gemm_ops_total cpu_attention_ops_total"
    ),
    "a state that diverges ends its request, which `quarrel_numerical_instability_total` counts": "ssm_divergence_total",
    "only the driver knows": (
        "cuda_memory_total_bytes cuda_stream_in_flight metal_command_queue_in_flight metal_buffer_bytes"
    ),
}
WANTED = """
webui_connections_active webui_requests_total webui_inference_duration_seconds webui_tokens_total webui_errors_total
moe_layer_latency_seconds moe_expert_selection_total moe_routing_latency_seconds moe_expert_utilization
ssm_scan_latency_seconds ssm_conv_latency_seconds ssm_state_size_bytes ssm_divergence_total
webui_http_requests_total webui_http_request_duration_seconds webui_http_request_size_bytes webui_http_response_size_bytes
webui_connections_total webui_ws_messages_total webui_ws_message_duration_seconds webui_inference_requests_total
webui_tokens_per_second webui_inference_queue_size webui_inference_queue_full_total webui_models_loaded
webui_model_memory_bytes webui_model_load_duration_seconds webui_active_connections webui_connections_rate_limited_total
webui_broadcast_messages_total cuda_memory_allocated_bytes cuda_memory_total_bytes cuda_stream_in_flight
cuda_kernel_duration_seconds cuda_gemm_ops_total cuda_attention_ops_total metal_memory_used_bytes
metal_command_queue_in_flight metal_kernel_duration_seconds metal_buffer_bytes cpu_gemm_ops_total cpu_attention_ops_total
cpu_memory_bytes inference_ttft_seconds inference_tpot_seconds inference_duration_seconds inference_queue_latency_seconds
tokens_total kv_cache_size_bytes kv_cache_hits_total kv_cache_misses_total kv_cache_evictions_total kv_cache_hit_ratio
memory_rss_bytes numerical_instability_total context_length_tokens
"""
"""What dashboards of the project's first version ask for, all behind `quarrel_`."""


def test_every_name_that_dashboards_use_exists_or_is_left_out_with_a_reason() -> None:
    from quarrel.server.metrics import Metrics as ServerMetrics

    class Empty:
        def entries(self) -> list[Any]:
            return []

    text = ServerMetrics(Empty()).text().decode()  # type: ignore[arg-type]
    exported = {line.split()[2].removeprefix("quarrel_") for line in text.splitlines() if line.startswith("# TYPE")}
    left_out = {name for names in LEFT_OUT.values() for name in names.split()}
    assert not exported & left_out
    wanted = set(WANTED.split())
    assert wanted <= exported | left_out, sorted(wanted - exported - left_out)
    docs = (Path(__file__).resolve().parents[1] / "docs" / "engine.md").read_text("utf-8")
    assert not [reason for reason in LEFT_OUT if reason not in " ".join(docs.split())]


def test_the_states_of_a_recurrent_model_are_reported_in_bytes() -> None:
    with quarrel.load(need_cases("mamba2", "model-q4_0x.gguf"), n_ctx=64, max_seqs=2, backend="cpu") as llm:
        metrics = Metrics()
        metrics.add("m", llm)
        plan = llm.explain().plan
        assert plan.states > 0
        assert scrape(metrics)["quarrel_ssm_state_size_bytes", "m"] == plan.states + plan.snapshots


def test_experts_memory_and_the_cache_of_a_loaded_model() -> None:
    with quarrel.load(need_cases("mixtral", "model-q4_k_m.gguf"), n_ctx=64, max_seqs=1, backend="cpu") as llm:
        llm.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
        metrics = Metrics()
        metrics.add("m", llm)
        found = scrape(metrics)
        chosen = {key: n for key, n in found.items() if key[0] == "quarrel_moe_expert_selection_total"}
        layers = {key[2] for key in chosen}
        used = llm.spec.layers[0].moe.used if hasattr(llm.spec.layers[0], "moe") else 2
        assert sum(chosen.values()) == len(layers) * used * llm.stats().prompt_tokens + len(layers) * used * 3
        shares = [n for key, n in found.items() if key[0] == "quarrel_moe_expert_utilization"]
        assert sum(shares) == pytest.approx(len(layers))
        cache = [n for key, n in found.items() if key[0] == "quarrel_kv_cache_size_bytes"]
        assert sum(cache) == pytest.approx(llm.explain().memory.cache)
        assert any(key[0] == "quarrel_cpu_memory_bytes" and n > 1000 for key, n in found.items())
