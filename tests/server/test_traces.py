"""Spans of a request, where OpenTelemetry's SDK is installed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from quarrel.server import Rates, Settings
from quarrel.server.traces import Traces
from tests.server.conftest import running

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_from_http_through_the_queue_to_the_tokens(tmp_path: Path) -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def finished(count: int) -> tuple[Any, ...]:
        """The outermost span ends a moment after its answer."""
        end = time.monotonic() + 60
        while len(exporter.get_finished_spans()) < count and time.monotonic() < end:
            time.sleep(0.01)
        return exporter.get_finished_spans()

    with running(Settings(data_dir=tmp_path, rates=Rates(requests=0)), traces=Traces(provider)) as made:
        for stream in (True, False):
            exporter.clear()
            body = {"prompt": "Once", "max_tokens": 5, "ignore_eos": True, "stream": stream}
            answer = made.client.post("/v1/completions", json=body, headers={"traceparent": PARENT})
            spans = {s.name: s for s in finished(5)}
            assert set(spans) == {"POST /v1/completions", "generate", "queue", "prefill", "decode"}
            whole, generate = spans["POST /v1/completions"], spans["generate"]
            assert whole.parent.span_id == 0xB7AD6B7169203331
            assert generate.parent.span_id == whole.context.span_id
            assert all(spans[n].parent.span_id == generate.context.span_id for n in ("queue", "prefill", "decode"))
            assert len({s.context.trace_id for s in spans.values()}) == 1
            assert spans["decode"].attributes["quarrel.tokens"] == 4
            assert whole.attributes["quarrel.request_id"] == answer.headers["x-request-id"]
            assert "Once" not in str([dict(s.attributes) for s in spans.values()])
        exporter.clear()
        made.client.post("/v1/completions", json={"prompt": "a", "n": 99})
        (span,) = finished(1)
        assert span.attributes["http.response.status_code"] == 400


def test_each_message_of_a_websocket_has_a_span(tmp_path: Path) -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with running(Settings(data_dir=tmp_path, rates=Rates(requests=0)), traces=Traces(provider)) as made:
        with connect(f"ws://127.0.0.1:{made.port}/ws") as page:
            for message in ({"type": "ping"}, {"type": "Once"}, {"type": "stop"}):
                page.send(json.dumps(message))
            page.send(json.dumps({"type": "inference", "payload": {"prompt": "Once", "max_tokens": 2, "request_id": "r"}}))
            while '"complete": true' not in str(page.recv(30)):
                pass
        end = time.monotonic() + 60
        while "WS /ws" not in (found := {s.name: s for s in exporter.get_finished_spans()}) and time.monotonic() < end:
            time.sleep(0.01)
    assert {"WS ping", "WS unknown", "WS stop", "WS inference", "generate", "WS /ws"} <= set(found)
    whole = found["WS /ws"].context
    for name in ("WS ping", "WS unknown", "WS stop", "WS inference"):
        assert found[name].parent.span_id == whole.span_id
    assert found["WS inference"].attributes["quarrel.request_id"] == "r"
    assert found["generate"].parent.span_id == found["WS inference"].context.span_id
    assert "Once" not in str([(s.name, dict(s.attributes)) for s in found.values()])
