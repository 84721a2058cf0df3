"""OpenTelemetry spans of one process, sent by OTLP over gRPC; nothing is imported until asked for.

A request is one tree of spans over the processes that worked on it. Its context travels as W3C
Trace Context says (www.w3.org/TR/trace-context): from the client in the header or the metadata
`traceparent`, to the workers in `Submit.traceparent`. One that cannot be read begins a new trace,
as that paper demands.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.trace import Span as OtelSpan

    from pdserve.errors import PdserveError
    from pdserve.types import ErrorInfo

    Attributes = Mapping[str, str | int | float | bool]

TRACEPARENT = "traceparent"
_NS = 1_000_000_000
# Spans that wait beyond this are thrown away: a collector that is down costs no memory.
_MAX_WAITING = 16_384
_EXPORT_S = 3.0


class Span:
    """One span that is open. State: whether an error was noted, and whether it has ended."""

    __slots__ = ("_span", "_start_ns", "_tracing", "_was_ended")

    def __init__(self, tracing: Tracing, span: OtelSpan, start_ns: int) -> None:
        self._tracing = tracing
        self._span = span
        self._start_ns = start_ns
        self._was_ended = False

    @property
    def traceparent(self) -> str:
        """What makes another process's span a child of this one."""
        return self._tracing.inject(self._span)

    def child(self, name: str, start_s: float, duration_s: float) -> None:
        """A phase that is over. `start_s` is in seconds from this span's start; what would reach
        out of this span, by the rounding of clocks, is cut."""
        end_ns = time.time_ns()
        start_ns = min(self._start_ns + max(0, int(start_s * _NS)), end_ns)
        end_ns = min(start_ns + max(0, int(duration_s * _NS)), end_ns)
        self._tracing.start(name, self._span, start_ns, {}).end(end_ns)

    def elapsed_s(self) -> float:
        """Since this span's start."""
        return (time.time_ns() - self._start_ns) / _NS

    def end(
        self, error: PdserveError | ErrorInfo | None = None, attributes: Attributes | None = None
    ) -> None:
        """Once; what comes later says nothing."""
        if self._was_ended:
            return
        self._was_ended = True
        if attributes:
            self._span.set_attributes(dict(attributes))
        if error is not None:
            self._tracing.mark_error(self._span, error)
        self._span.end(time.time_ns())


class Tracing:
    """Owns the exporter and its thread, both ended by `close`."""

    def __init__(self, endpoint: str, *, service: str, instance: str) -> None:
        """Raises ConfigError where the packages are missing."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"otlp_endpoint: needs `pip install pdserve[otlp]`: {error}", field="otlp_endpoint"
            ) from error
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_MAX_WAITING, schedule_delay_millis=1000)
        )
        self._tracer = self._provider.get_tracer("pdserve")

    def span(self, name: str, traceparent: str, attributes: Attributes) -> Span:
        """A span of this process that begins now, under the one of `traceparent`; without one, the
        first of a new trace."""
        context = self._propagator.extract({TRACEPARENT: traceparent}) if traceparent else None
        start_ns = time.time_ns()
        span = self._tracer.start_span(
            name,
            # Without a context it would be whatever this thread has open.
            context or self._trace.set_span_in_context(self._trace.INVALID_SPAN),
            kind=self._trace.SpanKind.SERVER,
            attributes=dict(attributes),
            start_time=start_ns,
        )
        return Span(self, span, start_ns)

    def start(self, name: str, parent: OtelSpan, start_ns: int, attributes: Attributes) -> OtelSpan:
        """A span under another of this process."""
        return self._tracer.start_span(
            name,
            self._trace.set_span_in_context(parent),
            attributes=dict(attributes),
            start_time=start_ns,
        )

    def inject(self, span: OtelSpan) -> str:
        """The span's context as a `traceparent`."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return carrier.get(TRACEPARENT, "")

    def mark_error(self, span: OtelSpan, error: PdserveError | ErrorInfo) -> None:
        """The span ended with `error`."""
        span.set_attribute("error.type", error.code)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, error.message))

    def close(self) -> None:
        """Send what waits, within a few seconds. Blocks; idempotent."""
        self._provider.shutdown()


def open_tracing(endpoint: str, *, service: str, instance: str) -> Tracing | None:
    """None where no endpoint is configured. Raises ConfigError as Tracing does."""
    return Tracing(endpoint, service=service, instance=instance) if endpoint else None
