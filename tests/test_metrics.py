"""A scrape tells what the engines have done, under names that stay."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import quarrel
from quarrel.engine import SamplingParams, Service
from quarrel.gguf import GGUFFile
from quarrel.llm import LoadOptions
from quarrel.llm.compile import CPU_STEPS, profile_steps
from quarrel.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics
from quarrel.models import Tensors, assemble, read_spec
from tests.engine.toys import Toy, limits
from tests.paths import need_cases
from tests.reference_backend import ReferenceBackend

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Held:
    def __init__(self, toy: Toy) -> None:
        self.stats = lambda: toy.engine.stats
        self.activity = lambda: toy.loop.run(toy.engine.activity)


def scrape(metrics: Metrics) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {(s.name, *(s.labels[k] for k in sorted(s.labels))): s.value for f in families for s in f.samples}


def test_counters_go_on_where_a_model_is_loaded_again() -> None:
    metrics, before = Metrics(), dict[tuple[str, ...], float]()
    for _ in range(3):
        with Toy(limits()) as toy:
            held = Held(toy)
            metrics.add("toy", held)
            for _ in range(2):
                toy.generate([1, 2, 3], GREEDY)
                found = scrape(metrics)
                counts = {n: v for n, v in found.items() if n[0].endswith(("_total", "_bucket", "_count", "_sum")) and v}
                assert all(found[name] >= before.get(name, 0) for name in counts)
                before = counts
            metrics.remove("toy")
            assert ("quarrel_engine_steps_total", "toy") not in scrape(metrics)
    assert found["quarrel_engine_requests_total", "toy", "length"] == 6
    assert (
        found["quarrel_inference_ttft_seconds_count", "toy"]
        == found["quarrel_inference_ttft_seconds_bucket", "+Inf", "toy"]
    )
    assert found["quarrel_inference_ttft_seconds_count", "toy"] == 6


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
            ("quarrel_kv_cache_blocks", "toy"): 60,
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
    "`python -m quarrel.bench` measures kernels": "cuda_kernel_duration_seconds metal_kernel_duration_seconds",
    "not counted: what runs is known beforehand, `quarrel explain` lists it": (
        "cuda_gemm_ops_total cuda_attention_ops_total cpu_gemm_ops_total cpu_attention_ops_total"
    ),
    "only the driver knows": (
        "cuda_memory_total_bytes cuda_stream_in_flight metal_command_queue_in_flight metal_buffer_bytes"
    ),
}
WANTED = """
webui_connections_active webui_requests_total webui_inference_duration_seconds webui_tokens_total webui_errors_total
moe_layer_latency_seconds moe_expert_selection_total moe_routing_latency_seconds moe_expert_utilization
moe_expert_selection ssm_scan_latency ssm_conv_latency ssm_state_size_bytes ssm_state_size
ssm_divergence_total ssm_divergence
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
        found = scrape(metrics)
        for name in ("quarrel_ssm_state_size_bytes", "quarrel_ssm_state_size"):
            assert found[name, "m"] == plan.states + plan.snapshots


HYBRID = ("nemotron_h_moe", "model-q4_0x.gguf")
TIMED = (
    "quarrel_moe_layer_latency_seconds",
    "quarrel_moe_routing_latency_seconds",
    "quarrel_ssm_scan_latency",
    "quarrel_ssm_conv_latency",
)


def timed(metrics: Metrics, what: str) -> list[float]:
    found = scrape(metrics)
    return [found[f"{name}_{what}", "m"] for name in TIMED]


@pytest.mark.parametrize(
    ("model", "layers", "every"),
    [
        ("granitehybrid", (3, 3, 2, 2), 1),
        ("granitehybrid", (3, 3, 2, 2), 2),
        ("granitehybrid", (3, 3, 2, 2), 0),
        ("nemotron_h_moe", (2, 2, 2, 2), 1),
        ("mamba", (0, 0, 2, 2), 1),
        ("mixtral", (2, 2, 0, 0), 1),
        ("llama32", (0, 0, 0, 0), 1),
    ],
)
def test_layers_are_timed_in_as_many_steps_as_asked_for(model: str, layers: tuple[int, ...], every: int) -> None:
    path = need_cases(model, "model-q4_0x.gguf")
    with quarrel.load(path, n_ctx=64, max_seqs=1, backend="cpu", profile_steps=every) as llm:
        metrics = Metrics()
        metrics.add("m", llm)
        began = time.perf_counter()
        for rounds in (1, 2):
            llm.generate([1, 2, 3], max_tokens=5, temperature=0, ignore_eos=True)
            assert llm.stats().steps == 5 * rounds
            steps = 5 * rounds // every if every else 0
            assert timed(metrics, "count") == [steps * n for n in layers]
        wall = time.perf_counter() - began
        moe, routing, scan, conv = timed(metrics, "sum")
        assert [moe > routing, routing > 0, scan > 0, conv > 0] == [every != 0 and n > 0 for n in layers]
        assert moe + scan + conv < wall


def test_a_step_that_cannot_be_timed_is_said_where_that_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for every, said in ((None, 0), (3, 1)):
        own = ReferenceBackend()
        with quarrel.load(need_cases(*HYBRID), n_ctx=64, backend=own, compute="float32", profile_steps=every) as llm:
            assert len(llm.generate([1, 2], max_tokens=3, temperature=0, ignore_eos=True).token_ids) == 3
        assert sum("cannot be timed" in record.message for record in caplog.records) == said


def test_a_few_steps_of_a_cpu_are_timed_and_those_of_a_gpu_where_that_was_asked_for() -> None:
    with GGUFFile.open(need_cases(*HYBRID)) as file:
        program = assemble(read_spec(file), Tensors(file))
    for backend, wanted, steps in (("triton", None, 0), ("triton", 16, 16), ("cpu", None, CPU_STEPS), ("cpu", 0, 0)):
        opened: Any = SimpleNamespace(backend=SimpleNamespace(name=backend), options=LoadOptions(profile_steps=wanted))
        assert profile_steps(opened, program) == steps


def with_no_numbers(path: Path, name: str, row: int | None) -> Path:
    """A copy of the hybrid in which a row of a tensor, or all of it, is NaN."""
    source = need_cases(*HYBRID)
    data = bytearray(source.read_bytes())
    with GGUFFile.open(source) as file:
        raw = file.raw(name) if row is None else file.raw(name)[row]
        at = data.find(raw.tobytes())
        data[at : at + raw.nbytes] = b"\xff" * raw.nbytes  # NaN in float32, and in the scales of Q4_0
    path.write_bytes(data)
    return path


def test_a_state_that_diverges_is_counted_and_only_that(tmp_path: Path) -> None:
    bad = with_no_numbers(tmp_path / "token.gguf", "token_embd.weight", 9)
    with quarrel.load(bad, n_ctx=64, max_seqs=3, backend="cpu") as llm:
        metrics = Metrics()
        metrics.add("m", llm)
        ends = [r.error is None for r in llm.generate([[1, 2, 3], [4, 9, 5], [6, 7]], max_tokens=4, ignore_eos=True)]
        assert ends == [True, False, True]
        found = scrape(metrics)
        assert found["quarrel_ssm_divergence", "m"] == found["quarrel_ssm_divergence_total", "m"] == 1
        assert found["quarrel_numerical_instability_total", "m"] == 1
    # Behind the last layer no state has seen it.
    with quarrel.load(with_no_numbers(tmp_path / "norm.gguf", "output_norm.weight", None), n_ctx=64, backend="cpu") as llm:
        metrics = Metrics()
        metrics.add("m", llm)
        assert llm.generate([[1, 2, 3]], max_tokens=4)[0].error is not None
        found = scrape(metrics)
        assert (found["quarrel_numerical_instability_total", "m"], found["quarrel_ssm_divergence", "m"]) == (1, 0)


def test_experts_memory_and_the_cache_of_a_loaded_model() -> None:
    with quarrel.load(need_cases("mixtral", "model-q4_k_m.gguf"), n_ctx=64, max_seqs=1, backend="cpu") as llm:
        llm.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
        metrics = Metrics()
        metrics.add("m", llm)
        found = scrape(metrics)
        chosen = {key: n for key, n in found.items() if key[0] == "quarrel_moe_expert_selection_total"}
        layers = {key[2] for key in chosen}
        plain = {key[1:]: n for key, n in found.items() if key[0] == "quarrel_moe_expert_selection"}
        assert plain == {key[1:]: n for key, n in chosen.items()}
        used = llm.spec.layers[0].moe.used if hasattr(llm.spec.layers[0], "moe") else 2
        assert sum(chosen.values()) == len(layers) * used * llm.stats().prompt_tokens + len(layers) * used * 3
        shares = [n for key, n in found.items() if key[0] == "quarrel_moe_expert_utilization"]
        assert sum(shares) == pytest.approx(len(layers))
        cache = [n for key, n in found.items() if key[0] == "quarrel_kv_cache_size_bytes"]
        assert sum(cache) == pytest.approx(llm.explain().memory.cache)
        assert any(key[0] == "quarrel_cpu_memory_bytes" and n > 1000 for key, n in found.items())
