"""What a loaded model takes, line by line in llama.cpp's wording: launchers read it to know what else fits."""

from __future__ import annotations

from collections.abc import Iterator

from quarrel.llm.explain import Explanation

MIB = 1 << 20
_NAMES = {"triton": "CUDA0", "mlx": "MTL0", "cpu": "CPU"}


def lines(explanation: Explanation, layers: int) -> Iterator[str]:
    """True figures of what was allocated. layers: of the model; its output counts as one more."""
    e, device = explanation, _NAMES.get(explanation.backend, explanation.backend.upper())
    on_gpu = device != "CPU"
    if on_gpu:
        free = f"{e.plan.free // MIB} MiB free"
        yield f"llama_prepare_model_devices: using device {device} ({e.device}) (unknown id) - {free}"
    weights = e.memory.weights + e.memory.decoded
    if on_gpu:
        resident = layers + 1 - e.plan.host_layers - (e.host_layers.layers if e.host_layers else 0)
        yield f"load_tensors: offloaded {resident}/{layers + 1} layers to GPU"
        yield _size("load_tensors", device, "model", weights)
        if e.plan.host:
            yield _size("load_tensors", "CPU", "model", e.plan.host)
        if e.host_layers:
            yield _size("load_tensors", "CPU", "model", e.host_layers.memory.weights)
    else:
        yield _size("load_tensors", "CPU_Mapped", "model", e.memory.weights_in_place)
        yield _size("load_tensors", "CPU", "model", weights - e.memory.weights_in_place)
    states = e.plan.states + e.plan.snapshots
    if e.host_layers:
        yield _size("llama_kv_cache", "CPU", "KV", e.host_layers.memory.cache)
    yield _size("llama_kv_cache", device, "KV", max(0, e.memory.cache - states))
    if states:
        yield _size("llama_memory_recurrent", device, "RS", states)
    yield _size("sched_reserve", device, "compute", e.memory.activations + (e.plan.graphs if on_gpu else 0))
    yield f"llama_context: n_ctx_seq = {e.n_ctx}, n_seq_max = {e.max_seqs}"


def _size(component: str, buffer: str, kind: str, count: int) -> str:
    return f"{component}: {buffer:>12} {kind} buffer size = {count / MIB:8.2f} MiB"
