"""Spans: which requests have them, and what is exported of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdserve.errors import WorkerFailed
from pdserve.observe.telemetry import Tracing

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def tracing() -> Iterator[Tracing]:
    opened = Tracing(NOWHERE, service="s", instance="i")
    yield opened
    opened.close()


def test_a_request_continues_its_trace_or_begins_one(tracing: Tracing) -> None:
    below = tracing.begin("request", f"00-{TRACE}-{CALLER}-01", {})
    assert below is not None
    assert below.traceparent.split("-")[:2] == ["00", TRACE]
    for unreadable in ("", "00-nonsense", f"ff-{TRACE}-{CALLER}-01"):
        first = tracing.begin("request", unreadable, {})
        assert first is not None
        assert first.traceparent.split("-")[1] not in (TRACE, "0" * 32)


def test_an_unsampled_request_has_no_span(tracing: Tracing) -> None:
    assert tracing.begin("request", f"00-{TRACE}-{CALLER}-00", {}) is None


def test_engines_that_seed_alike_make_different_ids(tracing: Tracing) -> None:
    made = set()
    for _ in range(2):
        random.seed(0)
        span = tracing.begin("request", "", {})
        assert span is not None
        made.add(span.traceparent)
    assert len(made) == 2


def test_a_span_has_its_phases_under_it_and_its_error(tracing: Tracing) -> None:
    memory = InMemorySpanExporter()
    tracing._provider.add_span_processor(SimpleSpanProcessor(memory))
    span = tracing.begin("request", f"00-{TRACE}-{CALLER}-01", {"model": "m"})
    assert span is not None
    span.phase("prefill", -1.0, 3600.0)
    span.end(WorkerFailed("it broke"))
    span.end()
    prefill, top = memory.get_finished_spans()
    assert top.parent is not None
    assert prefill.parent is not None
    assert (top.name, f"{top.parent.span_id:016x}") == ("request", CALLER)
    assert prefill.parent.span_id == top.context.span_id
    assert dict(top.attributes or {}) == {"model": "m", "error.type": "worker_failed"}
    assert (top.status.is_ok, top.status.description) == (False, "it broke")
    assert prefill.start_time == top.start_time
    assert (prefill.end_time or 0) <= (top.end_time or 0)
