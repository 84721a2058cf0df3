"""Spans of one process, sent by OTLP over gRPC; nothing of OpenTelemetry is imported until asked
for.

A request is one tree of spans over the processes that worked on it. Its context travels as W3C
Trace Context says (www.w3.org/TR/trace-context): from the client in the header or the metadata
`traceparent`, to the workers in `Submit.traceparent`. One that cannot be read begins a new trace,
as that paper demands; one that says that it is not sampled is not traced here either.

Where a span begins and ends, on the way of a request, ids and times are noted and no more. A thread
makes messages of what has ended, once a second, for all requests at once.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.errors import PdserveError
    from pdserve.types import ErrorInfo

    Attributes = Mapping[str, str | int]

logger = logging.getLogger(__name__)

TRACEPARENT = "traceparent"
# What tells a worker that its router traces, and not this request: of no trace, and not sampled.
UNTRACED = f"00-{'f' * 32}-{'f' * 16}-00"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_LOW = (1 << 64) - 1
_NS = 1_000_000_000
_PERIOD_S = 1.0
# Spans that wait beyond this are thrown away: a collector that is down costs no memory.
_MAX_WAITING = 16_384
# A message of so many stays below what collectors take.
_BATCH = 1024
# Beside what one message may take to be sent (pdserve/otlp.py).
_CLOSE_S = 5.0


class Span:
    """One span of this process under a remote one, or under none where `parent_id` is 0, and the
    `phases` inside it that are over: name, seconds from its start, seconds. State: its end."""

    __slots__ = (
        *("_ended", "attributes", "end_ns", "error", "name"),
        *("parent_id", "phases", "span_id", "start_ns", "trace_id"),
    )

    def __init__(
        self, ended: _Ended, name: str, ids: tuple[int, int, int], attributes: Attributes
    ) -> None:
        self._ended: _Ended | None = ended
        self.name = name
        self.trace_id, self.parent_id, self.span_id = ids
        self.attributes = attributes
        self.phases: tuple[tuple[str, float, float], ...] = ()
        self.error: tuple[str, str] | None = None
        self.end_ns = 0
        self.start_ns = time.time_ns()

    @property
    def traceparent(self) -> str:
        """What makes another process's span a child of this one."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    def phase(self, name: str, start_s: float, duration_s: float) -> None:
        """A child that is over. What would reach out of this span, by the rounding of clocks, is
        cut."""
        self.phases += ((name, start_s, duration_s),)

    def elapsed_s(self) -> float:
        """Since this span's start."""
        return (time.time_ns() - self.start_ns) / _NS

    def end(self, error: PdserveError | ErrorInfo | None = None) -> None:
        """Once; what comes later says nothing."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        # The clock may have been set back.
        self.end_ns = max(self.start_ns, time.time_ns())
        if error is not None:
            self.error = (error.code, error.message)
        ended.add(self)


class _Ended:
    """The spans that ended and were not sent. State: those, and how many found no room."""

    def __init__(self) -> None:
        # Appended to by the threads of requests, taken from by the one that sends.
        self.waiting: deque[Span] = deque()
        self.lost = 0

    def add(self, span: Span) -> None:
        if len(self.waiting) < _MAX_WAITING:
            self.waiting.append(span)
        else:
            self.lost += 1

    def take(self) -> list[Span]:
        """As many as one message has, the oldest first."""
        return [self.waiting.popleft() for _ in range(min(_BATCH, len(self.waiting)))]


class Tracing:
    """Owns the sender and its thread, both ended by `close`. Of the requests that bring no trace a
    `share` is traced."""

    def __init__(self, endpoint: str, *, service: str, instance: str, share: float = 1.0) -> None:
        """Raises ConfigError where the packages are missing."""
        try:
            from pdserve.otlp import SpanSender
        except ImportError as error:
            raise ConfigError(
                f"otlp_endpoint: needs `pip install pdserve[otlp]`: {error}", field="otlp_endpoint"
            ) from error
        self._sender = SpanSender(endpoint, service=service, instance=instance)
        self._ended = _Ended()
        # As OpenTelemetry's TraceIdRatioBased has it, so that all who see a trace decide alike.
        self._bound = round(share * (1 << 64))
        # One's own: engines seed the one that all share, and ids would be another worker's.
        self._bits = random.Random().getrandbits
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def begin(self, name: str, traceparent: str, attributes: Attributes) -> Span | None:
        """A span that begins now, under the one of `traceparent`; without one, the first of a new
        trace. None where the request is not traced."""
        parent = read_traceparent(traceparent) if traceparent else None
        if parent is None:
            trace_id, parent_id = 1 + self._bits(127), 0
            is_traced = trace_id & _LOW < self._bound
        else:
            trace_id, parent_id, flags = parent
            is_traced = bool(flags & _SAMPLED)
        if not is_traced:
            return None
        return Span(self._ended, name, (trace_id, parent_id, 1 + self._bits(63)), attributes)

    def close(self) -> None:
        """Send what waits, within a few seconds. Blocks; idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(_CLOSE_S)
        self._sender.close()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._closing.wait(_PERIOD_S)
            try:
                self._send()
            except Exception:
                logger.exception("spans are lost")

    def _send(self) -> None:
        ended = self._ended
        while spans := ended.take():
            if not self._sender.send(spans):
                ended.lost += len(spans)
                break
        if self._closing.is_set():
            ended.lost += len(ended.waiting)
        lost, ended.lost = ended.lost, 0
        if lost:
            logger.warning("%d spans are lost: the collector did not take them", lost)


def read_traceparent(text: str) -> tuple[int, int, int] | None:
    """Trace, span and flags; None for what is no `traceparent` of a version that can be read."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    version, trace, span, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest):
        return None
    trace_id, span_id = int(trace, 16), int(span, 16)
    return (trace_id, span_id, int(flags, 16)) if trace_id and span_id else None


def open_tracing(
    endpoint: str, *, service: str, instance: str, share: float = 1.0
) -> Tracing | None:
    """None where no endpoint is configured. Raises ConfigError as Tracing does."""
    return Tracing(endpoint, service=service, instance=instance, share=share) if endpoint else None
