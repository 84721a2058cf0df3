"""Spans as OTLP messages, and how they are sent. The packages of `pdserve[otlp]` are needed here,
and nowhere else.

The messages are made without OpenTelemetry's SDK, whose span objects cost several times as much;
what reads the environment, connects and tries again is its exporter's.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.sdk.resources import Resource as Described
from opentelemetry.sdk.trace.export import SpanExportResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.tracing import Span

_TIMEOUT_S = 3.0
_NS = 1_000_000_000
_SERVER = SpanMessage.SPAN_KIND_SERVER
_INTERNAL = SpanMessage.SPAN_KIND_INTERNAL
# SpanFlags of trace.proto: sampled, and that it is said whether the parent is of another process.
_LOCAL_PARENT, _REMOTE_PARENT = 0x101, 0x301
# After so many spans whoever serves requests may have the interpreter.
_AT_ONCE = 32
# Its own, as in pdserve/tracing.py.
_bits = random.Random().getrandbits


class _Exporter(OTLPSpanExporter):
    """Takes a list of one message that is encoded already."""

    def _translate_data(self, data: Sequence[Any]) -> ExportTraceServiceRequest:
        message: ExportTraceServiceRequest = data[0]
        return message


class SpanSender:
    """One connection to a collector, ended by `close`."""

    def __init__(self, endpoint: str, *, service: str, instance: str) -> None:
        said = Described.create({"service.name": service, "service.instance.id": instance})
        self._resource = Resource()
        for name, value in said.attributes.items():
            self._resource.attributes.add(key=name).value.string_value = str(value)
        self._exporter = _Exporter(endpoint=endpoint, timeout=_TIMEOUT_S)

    def send(self, spans: Sequence[Span]) -> bool:
        """False where the collector did not take them in time."""
        message = ExportTraceServiceRequest(resource_spans=[encode(self._resource, spans)])
        return self._exporter.export([message]) is SpanExportResult.SUCCESS  # type: ignore[list-item]

    def close(self) -> None:
        self._exporter.shutdown()


def encode(resource: Resource, spans: Iterable[Span]) -> ResourceSpans:
    """The spans, and their phases as spans under them."""
    group = ResourceSpans(resource=resource)
    scope = group.scope_spans.add()
    scope.scope.name = "pdserve"
    for i, span in enumerate(spans, start=1):
        _add(scope.spans, span)
        if i % _AT_ONCE == 0:
            time.sleep(0)
    return group


def _add(messages: Any, span: Span) -> None:
    trace_id, span_id = span.trace_id.to_bytes(16), span.span_id.to_bytes(8)
    message = messages.add(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=span.parent_id.to_bytes(8) if span.parent_id else b"",
        flags=_REMOTE_PARENT if span.parent_id else _LOCAL_PARENT,
        name=span.name,
        kind=_SERVER,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
    )
    attributes = message.attributes
    for name, value in span.attributes.items():
        if isinstance(value, int):
            attributes.add(key=name).value.int_value = value
        else:
            attributes.add(key=name).value.string_value = value
    if span.error is not None:
        code, text = span.error
        attributes.add(key="error.type").value.string_value = code
        message.status.code = Status.STATUS_CODE_ERROR
        message.status.message = text
    for name, start_s, duration_s in span.phases:
        start_ns = min(span.start_ns + max(0, int(start_s * _NS)), span.end_ns)
        messages.add(
            trace_id=trace_id,
            span_id=(1 + _bits(63)).to_bytes(8),
            parent_span_id=span_id,
            flags=_LOCAL_PARENT,
            name=name,
            kind=_INTERNAL,
            start_time_unix_nano=start_ns,
            end_time_unix_nano=min(start_ns + max(0, int(duration_s * _NS)), span.end_ns),
        )
