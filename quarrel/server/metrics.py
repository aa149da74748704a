"""The server's own Prometheus metrics, by the names that dashboards use."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from quarrel.metrics import EngineMetrics
from quarrel.server.models import ModelManager

_BUCKETS = tuple(0.01 * 2**i for i in range(10))
_SIZES = tuple(4.0**i for i in range(3, 14))


TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One per application; its registry is its own."""

    def __init__(self, models: ModelManager) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.connections = Gauge("quarrel_webui_connections_active", "WebSocket connections now", registry=r)
        self.requests = Counter(
            "quarrel_webui_requests", "Requests by model and endpoint", ["model", "endpoint"], registry=r
        )
        self.http = Counter(
            "quarrel_webui_http_requests", "HTTP answers by route and status", ["method", "endpoint", "status"], registry=r
        )
        self.http_seconds = Histogram(
            "quarrel_webui_http_request_duration_seconds", "Time to the end of the answer", ["endpoint"], registry=r
        )
        self.seconds = Histogram(
            "quarrel_webui_inference_duration_seconds", "A generation from start to end", ["model"],
            buckets=_BUCKETS, registry=r,
        )  # fmt: skip
        self.tokens = Counter("quarrel_webui_tokens", "Tokens generated", registry=r)
        self.typed_tokens = Counter("quarrel_tokens", "Tokens by model and kind", ["model", "type"], registry=r)
        self.errors = Counter("quarrel_webui_errors", "Errors by code", ["type"], registry=r)
        self.messages = Counter("quarrel_webui_ws_messages", "WebSocket messages", ["direction"], registry=r)
        self.message_seconds = Histogram(
            "quarrel_webui_ws_message_duration_seconds", "Until a WebSocket message was sent", ["type"], registry=r
        )
        self.sockets = Counter("quarrel_webui_connections", "WebSocket connections asked for", ["status"], registry=r)
        self.broadcasts = Counter("quarrel_webui_broadcast_messages", "Messages that every connection gets", registry=r)
        self.request_bytes, self.response_bytes = (
            Histogram(f"quarrel_webui_http_{what}_size_bytes", help, ["endpoint"], buckets=_SIZES, registry=r)
            for what, help in (("request", "Bodies that came, by their header"), ("response", "Bodies that went"))
        )
        self.generations = Counter(
            "quarrel_webui_inference_requests", "Generations by how they ended", ["model", "status"], registry=r
        )
        self.full = Counter("quarrel_webui_inference_queue_full", "Refused for a full queue", ["model"], registry=r)
        self.limited = Counter("quarrel_webui_connections_rate_limited", "Requests refused by a rate limit", registry=r)
        r.register(_Models(models))
        r.register(EngineMetrics(lambda: [(e.name, e.loaded.llm) for e in models.entries() if e.loaded is not None]))

    def answered(self, method: str, route: str, status: int, seconds: float, received: int, sent: int) -> None:
        """One HTTP answer. route: a pattern, never the path, which the caller could invent. received, sent: bytes."""
        self.http.labels(method, route, str(status)).inc()
        self.http_seconds.labels(route).observe(seconds)
        self.request_bytes.labels(route).observe(received)
        self.response_bytes.labels(route).observe(sent)
        if status == 429:
            self.limited.inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Models(Collector):
    """Read from the engines at each scrape."""

    def __init__(self, models: ModelManager) -> None:
        self._models = models

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        loaded = GaugeMetricFamily("quarrel_webui_models_loaded", "Models in memory", labels=["model", "backend"])
        memory = GaugeMetricFamily("quarrel_webui_model_memory_bytes", "Weights and cache", labels=["model"])
        seconds = GaugeMetricFamily("quarrel_webui_model_load_duration_seconds", "Of the last load", labels=["model"])
        queue = GaugeMetricFamily("quarrel_webui_inference_queue_size", "Requests that wait", labels=["model"])
        speed = GaugeMetricFamily(
            "quarrel_webui_tokens_per_second", "Of steps that only decode, since it was loaded", labels=["model"]
        )
        active = GaugeMetricFamily("quarrel_webui_active_connections", "Requests that run", labels=["model"])
        restarts = CounterMetricFamily(
            "quarrel_engine_process_restarts", "Times that a model's process ended and was started again", labels=["model"]
        )
        for entry in self._models.entries():
            restarts.add_metric([entry.name], entry.restarts)
            if entry.loaded is None:
                continue
            e, activity = entry.loaded.llm.explain(), entry.loaded.llm.activity()
            loaded.add_metric([entry.name, e.backend], 1)
            memory.add_metric([entry.name], e.memory.weights + e.memory.cache + e.memory.activations)
            seconds.add_metric([entry.name], entry.load_seconds)
            queue.add_metric([entry.name], activity.waiting)
            active.add_metric([entry.name], activity.running)
            stats = entry.loaded.llm.stats()
            speed.add_metric([entry.name], stats.decode_tokens / stats.decode_seconds if stats.decode_seconds else 0.0)
        return [loaded, memory, seconds, queue, speed, active, restarts]
