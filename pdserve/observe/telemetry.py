"""Tracing with OpenTelemetry. The SDK is imported only if tracing is enabled.

A request is one trace across all its processes. The context is propagated as W3C Trace Context:
from the client in the header or metadata `traceparent`, to workers in `Submit.traceparent`.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry import trace

    from pdserve.errors import PdserveError
    from pdserve.types import ErrorInfo

    Attributes = Mapping[str, str | int]

TRACEPARENT = "traceparent"
_EXPORT_TIMEOUT_S = 3.0
_NS = 1_000_000_000


class Span:
    """A span of this process. Phases are its child spans."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, start_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._start_ns = start_ns
        ids = span.get_span_context()
        self.traceparent = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-01"

    @property
    def is_open(self) -> bool:
        """True until the span ends."""
        return self._span.is_recording()

    def phase(self, name: str, start_s: float, duration_s: float) -> None:
        """Add a finished child span that began `start_s` after this span."""
        from opentelemetry.trace import set_span_in_context

        now = time.time_ns()
        start_ns = min(self._start_ns + max(0, int(start_s * _NS)), now)
        child = self._tracer.start_span(name, set_span_in_context(self._span), start_time=start_ns)
        child.end(min(start_ns + max(0, int(duration_s * _NS)), now))

    def elapsed_s(self) -> float:
        return (time.time_ns() - self._start_ns) / _NS

    def end(self, error: PdserveError | ErrorInfo | None = None) -> None:
        """End the span, with the status of `error`. Further calls have no effect."""
        if self.is_open and error is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", error.code)
            self._span.set_status(StatusCode.ERROR, error.message)
        if self.is_open:
            self._span.end()


def trace_id(traceparent: str) -> str:
    """Return the trace id in a W3C `traceparent`, or "" if that is empty."""
    return traceparent[3:35]


class Tracing:
    """Starts spans. A thread of the SDK exports them over OTLP.

    OpenTelemetry's environment variables configure resource, headers, sampler and batching.
    """

    def __init__(self, endpoint: str, *, service: str, instance: str) -> None:
        """Raises ConfigError if OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
            from opentelemetry.trace.propagation import tracecontext
        except ImportError as error:
            raise ConfigError(
                f"otlp_endpoint: needs `pip install pdserve[otlp]`: {error}", field="otlp_endpoint"
            ) from error

        class Ids(RandomIdGenerator):
            """Ids from a separate random generator. OpenTelemetry uses the global one, which all
            engines seed with the same value, so different workers would produce equal ids."""

            _bits = random.Random().getrandbits

            def generate_span_id(self) -> int:
                return 1 + self._bits(63)

            def generate_trace_id(self) -> int:
                return 1 + self._bits(127)

        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, id_generator=Ids())
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pdserve")
        self._extract = tracecontext.TraceContextTextMapPropagator().extract

    def begin(self, name: str, traceparent: str, attributes: Attributes) -> Span | None:
        """Start a span below `traceparent`, or a new trace if that is empty. Return None if the
        span is not sampled."""
        from opentelemetry.trace import SpanKind

        now = time.time_ns()
        span = self._tracer.start_span(
            name,
            self._extract({TRACEPARENT: traceparent}),
            SpanKind.SERVER,
            attributes,
            start_time=now,
        )
        return Span(self._tracer, span, now) if span.is_recording() else None

    def close(self) -> None:
        """Export the pending spans. Blocks, for a few seconds at most."""
        self._provider.shutdown()


def open_tracing(endpoint: str, *, service: str, instance: str) -> Tracing | None:
    """Return the exporter to `endpoint`, or None if that is empty. Raises ConfigError if
    OpenTelemetry is not installed."""
    return Tracing(endpoint, service=service, instance=instance) if endpoint else None
