"""Traces by OpenTelemetry (extra `otel`): an HTTP request, its generation, and in that the queue, the prompt, the tokens.

Where the package is absent, or nothing says where traces go, none of this costs more than a look. The standard variables
(`OTEL_EXPORTER_OTLP_ENDPOINT`) say where; a caller's own trace (`traceparent`) is gone on with.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quarrel.engine import Result
from quarrel.errors import installing

log = logging.getLogger("quarrel.server")


class Traces:
    """One per application. `provider`: in place of what the environment says, for tests."""

    def __init__(self, provider: Any = None) -> None:
        self._tracer: Any = None
        try:
            from opentelemetry import trace
        except ImportError:
            return
        if provider is None:
            _configure()
        self._tracer = trace.get_tracer("quarrel.server", tracer_provider=provider)

    @contextmanager
    def request(self, method: str, path: str, headers: Mapping[str, str]) -> Iterator[Any]:
        """A span round an HTTP request; what it yields is for `answered`."""
        if self._tracer is None:
            yield None
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        before = TraceContextTextMapPropagator().extract(dict(headers))
        with self._tracer.start_as_current_span(method, context=before, kind=SpanKind.SERVER) as span:
            span.set_attribute("http.request.method", method)
            span.set_attribute("url.path", path[:200])
            yield span

    def answered(self, span: Any, method: str, route: str, status: int, request_id: str) -> None:
        if span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        # A route's pattern, never the path: paths are the caller's to invent.
        span.update_name(f"{method} {route}")
        span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("quarrel.request_id", request_id)
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))

    @contextmanager
    def message(self, kind: str, request_id: str | None = None) -> Iterator[None]:
        """A span round what a WebSocket's message brings about, in that of its connection. kind: a known one."""
        if self._tracer is None:
            yield
            return
        with self._tracer.start_as_current_span(f"WS {kind}") as span:
            if request_id is not None:
                span.set_attribute("quarrel.request_id", request_id)
            yield

    def generated(self, model: str, began: float, results: Sequence[Result]) -> None:
        """Spans of what has ended, by the engine's own clock. began: by `time.perf_counter`."""
        if self._tracer is None:
            return
        # Spans want wall time; the request's own times are monotonic.
        start = time.time_ns() - int((time.perf_counter() - began) * 1e9)
        for result in results:
            t = result.timings
            whole = self._tracer.start_span("generate", start_time=start)
            whole.set_attribute("gen_ai.request.model", model)
            whole.set_attribute("gen_ai.usage.input_tokens", result.usage.prompt_tokens)
            whole.set_attribute("gen_ai.usage.output_tokens", result.usage.completion_tokens)
            whole.set_attribute("gen_ai.response.finish_reasons", [result.finish_reason])
            at = start
            for name, seconds, tokens in (
                ("queue", t.queued, 0),
                ("prefill", t.prefill, t.prefill_tokens),
                ("decode", t.decode, t.decode_tokens),
            ):
                part = self._tracer.start_span(name, context=_inside(whole), start_time=at)
                part.set_attribute("quarrel.tokens", tokens)
                at += int(seconds * 1e9)
                part.end(at)
            whole.end(at)


def _inside(span: Any) -> Any:
    from opentelemetry import trace

    return trace.set_span_in_context(span)


def _configure() -> None:
    """The SDK, where the environment names a collector and nobody has set one up."""
    named = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not any(os.environ.get(n) for n in named):
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("traces want %s: %s", error.name, installing("otel"))
        return
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return
    provider = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "quarrel")}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
