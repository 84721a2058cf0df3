"""Spans: which requests have them, what a message says of them, and that none waits for ever."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from pdserve import tracing
from pdserve.errors import WorkerFailed
from pdserve.otlp import SpanSender, encode
from pdserve.tracing import UNTRACED, Tracing, read_traceparent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.tracing import Span

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NOWHERE = "http://127.0.0.1:1"


class Sent:
    """In the place of the one that sends: keeps what it is given, or takes nothing."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.takes = True
        self.is_closed = False

    def send(self, spans: Sequence[Span]) -> bool:
        if self.takes:
            self.spans += spans
        return self.takes

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    found = Sent()
    monkeypatch.setattr("pdserve.otlp.SpanSender", lambda *_args, **_named: found)
    return found


@pytest.fixture
def traced(sent: Sent) -> Iterator[Tracing]:
    opened = Tracing(NOWHERE, service="s", instance="i")
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"00-{TRACE}-{CALLER}-01", (int(TRACE, 16), int(CALLER, 16), 1)),
        (f"00-{TRACE}-{CALLER}-00", (int(TRACE, 16), int(CALLER, 16), 0)),
        (f"cc-{TRACE}-{CALLER}-03-more", (int(TRACE, 16), int(CALLER, 16), 3)),
        (f"00-{TRACE}-{CALLER}-01-more", None),
        (f"ff-{TRACE}-{CALLER}-01", None),
        (f"00-{TRACE.upper()}-{CALLER}-01", None),
        (f"00-{'0' * 32}-{CALLER}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE}-{CALLER}", None),
        (f" 00-{TRACE}-{CALLER}-01", None),
        ("", None),
    ],
)
def test_a_traceparent_is_read_as_trace_context_says(
    text: str, found: tuple[int, int, int] | None
) -> None:
    assert read_traceparent(text) == found


def test_a_request_goes_on_with_its_trace_or_begins_one(traced: Tracing) -> None:
    below = traced.begin("request", f"00-{TRACE}-{CALLER}-01", {})
    assert below is not None
    assert below.traceparent.split("-")[:2] == ["00", TRACE]
    assert read_traceparent(below.traceparent) == (int(TRACE, 16), below.span_id, 1)
    for unreadable in ("", "00-nonsense"):
        first = traced.begin("request", unreadable, {})
        assert first is not None
        assert first.parent_id == 0
        assert first.trace_id not in (0, int(TRACE, 16))


def test_what_is_not_sampled_has_no_span(traced: Tracing) -> None:
    assert traced.begin("request", f"00-{TRACE}-{CALLER}-00", {}) is None
    assert traced.begin("request", UNTRACED, {}) is None


@pytest.mark.usefixtures("sent")
def test_a_share_of_the_requests_without_a_trace_has_one() -> None:
    for share, low, high in ((0.0, 0, 0), (0.25, 400, 600), (1.0, 2000, 2000)):
        opened = Tracing(NOWHERE, service="s", instance="i", share=share)
        try:
            begun = sum(opened.begin("request", "", {}) is not None for _ in range(2000))
            assert low <= begun <= high
            assert opened.begin("request", f"00-{TRACE}-{CALLER}-01", {}) is not None
        finally:
            opened.close()


def test_all_that_ended_is_sent_at_the_close_and_once(sent: Sent, traced: Tracing) -> None:
    spans = [traced.begin(str(i), "", {}) for i in range(3000)]
    for span in spans:
        assert span is not None
        span.end()
        span.end(WorkerFailed("too late"))
    traced.close()
    assert [span.name for span in sent.spans] == [str(i) for i in range(3000)]
    assert all(span.error is None for span in sent.spans)
    assert sent.is_closed


def test_a_collector_that_takes_nothing_costs_no_memory(
    sent: Sent,
    traced: Tracing,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tracing, "_MAX_WAITING", 10)
    sent.takes = False
    for _ in range(30):
        span = traced.begin("request", "", {})
        assert span is not None
        span.end()
        assert len(traced._ended.waiting) <= 10
    traced.close()
    lost = re.findall(r"(\d+) spans are lost", caplog.text)
    assert sum(map(int, lost)) == 30


def test_a_collector_that_is_not_there_is_given_up_in_time() -> None:
    opened = Tracing(NOWHERE, service="s", instance="i")
    span = opened.begin("request", "", {})
    assert span is not None
    span.end()
    opened.close()
    assert not opened._thread.is_alive()


def test_a_message_has_the_span_and_its_phases_under_it(traced: Tracing) -> None:
    span = traced.begin("leg", f"00-{TRACE}-{CALLER}-01", {"model": "m", "tokens": 7})
    assert span is not None
    span.phase("queue", 0.0, 0.0)
    span.phase("prefill", -1.0, 3600.0)
    span.end(WorkerFailed("it broke"))
    top, queue, prefill = _spans(span)
    assert (top.trace_id.hex(), top.parent_span_id.hex(), top.name) == (TRACE, CALLER, "leg")
    assert top.flags == 0x301, "sampled, of a remote parent"
    said = {x.key: x.value.string_value or x.value.int_value for x in top.attributes}
    assert said == {"model": "m", "tokens": 7, "error.type": "worker_failed"}
    assert (top.status.code, top.status.message) == (top.status.STATUS_CODE_ERROR, "it broke")
    assert [queue.name, prefill.name] == ["queue", "prefill"]
    for phase in (queue, prefill):
        assert (phase.trace_id, phase.parent_span_id) == (top.trace_id, top.span_id)
        assert phase.flags == 0x101
        assert phase.status.code == phase.status.STATUS_CODE_UNSET
    times = (prefill.start_time_unix_nano, prefill.end_time_unix_nano)
    assert times == (top.start_time_unix_nano, top.end_time_unix_nano), "no phase reaches out"
    assert len({x.span_id for x in (top, queue, prefill)}) == 3


def _spans(*spans: Span) -> list[Any]:
    group = encode(Resource(), spans)
    (scope,) = group.scope_spans
    return list(scope.spans)


def test_the_process_is_said_once_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
    sender = SpanSender(NOWHERE, service="pdserve-router", instance="r1")
    sender.close()
    said = {x.key: x.value.string_value for x in sender._resource.attributes}
    assert (said["service.name"], said["service.instance.id"]) == ("pdserve-router", "r1")
    assert said["deployment.environment"] == "lab"
