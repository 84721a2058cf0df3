"""Order of the streams of one attempt, as a state machine without I/O.

Prefill samples the first token, and decode continues after it. With an immediate handoff both
streams are submitted together, and nothing orders what they send. So everything that arrives from
decode before the first token waits for it, a failure included: either the answer ends with the
first token, and the failure of decode was a consequence, or the answer continues with decode. With
a sequential handoff, decode is submitted when prefill has ended, with its token and the handle of
its KV.

A request can leave a healthy worker together with its KV: its stream is exported. It sends tokens
until its last delta, which says how many there were; then the next attempt starts with its KV.

Events are method calls. Each returns what to do, in order, as values: a delta is to be sent to the
client, and an `End` is the last. What follows a failure is decided elsewhere (router/retry.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from pdserve.errors import (
    InternalError,
    PdserveError,
    TransferFailed,
    Unavailable,
    WorkerFailed,
    from_info,
)
from pdserve.types import FinishReason, HandoffStyle, StreamDelta
from router.retry import RETRYABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import PhaseReport, Role


class Phase(StrEnum):
    """What a worker was asked to do; AGGREGATED is both phases."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


@dataclass(slots=True, eq=False)
class StreamState:
    """One stream on one worker. `cause` is why an attempt before it was not enough, or "".

    `open` until its last delta, its loss or its cancellation. `holds_kv` from the last delta of a
    prefill, or of an exported stream, until the consumer has the KV.
    """

    phase: Phase
    worker_id: str
    role: Role
    open: bool = True
    report: PhaseReport | None = None
    holds_kv: bool = False
    has_token: bool = False
    cause: str = ""


class SubmitDecode(Struct, frozen=True):
    """Submit decode now: prefill has ended and described its KV by `kv_handle`."""

    kv_handle: bytes


class Finished(Struct, frozen=True):
    """The answer is complete; `delta` has its last tokens."""

    delta: StreamDelta
    reason: FinishReason


class Failed(Struct, frozen=True):
    """The attempt failed on the worker of `stream`. With `was_moving` the request was leaving the
    worker, which is healthy."""

    stream: StreamState
    error: PdserveError
    was_moving: bool = False


class Exported(Struct, frozen=True):
    """The worker of `stream` keeps the KV of all tokens but the last for the next attempt."""

    stream: StreamState


End = Finished | Failed | Exported
Action = StreamDelta | SubmitDecode | End


@dataclass(slots=True, eq=False)
class Handoff:
    """State: the streams of the attempt, and `tokens`, those delivered over all attempts.

    `producer` holds KV for `decode`: an exported stream at once, `prefill` when it has ended.
    """

    max_tokens: int
    tokens: list[int]
    decode: StreamState
    prefill: StreamState | None = None
    producer: StreamState | None = None
    style: HandoffStyle = HandoffStyle.CONCURRENT
    ended: bool = False
    _waits_for_first: bool = field(init=False)
    _decode_is_pending: bool = field(init=False)
    _early: list[StreamDelta | PdserveError] = field(default_factory=list, init=False)
    _exporting: StreamState | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._waits_for_first = self.prefill is not None
        self._decode_is_pending = self.prefill is not None and self.style is HandoffStyle.SEQUENTIAL

    def accepts(self, stream: StreamState, token_id: int) -> bool:
        """Take a token that changes no state. Return False, and take nothing, if `on_delta` must
        decide."""
        if not stream.open or self._waits_for_first or self.producer is not None or self.ended:
            return False
        self.tokens.append(token_id)
        return True

    def on_delta(self, stream: StreamState, delta: StreamDelta) -> Sequence[Action]:
        """Deltas of a stream that is not open are ignored."""
        if not stream.open or self.ended:
            return ()
        if stream is self.decode and self._waits_for_first:
            return self._on_early(stream, delta, _error_of(stream, delta))
        if stream is self.decode and self.producer is not None and delta.error is None:
            self.producer.holds_kv = False
            self.producer = None
        if delta.finish_reason is not None:
            return self._on_last(stream, delta)
        return self._deliver(stream, delta)

    def on_lost(self, stream: StreamState, error: PdserveError) -> Sequence[Action]:
        """The stream broke."""
        if not stream.open or self.ended:
            return ()
        if stream is self.decode and self._waits_for_first:
            return self._on_early(stream, error, error)
        return self._failed(stream, error)

    def uses(self, worker_id: str) -> bool:
        """Return whether the attempt can leave a worker that it uses."""
        is_leaving = self._exporting is not None or (
            self.producer is not None and self.producer is not self.prefill
        )
        if self.ended or is_leaving or self._is_nearly_done:
            return False
        streams = (self.prefill, self.decode)
        return any(
            x is not None and x.worker_id == worker_id and (x.open or x is self.producer)
            for x in streams
        )

    @property
    def _is_nearly_done(self) -> bool:
        """At most one token is missing: a pair of workers does not help any more."""
        return len(self.tokens) + 1 >= self.max_tokens

    def exportable(self, worker_id: str) -> StreamState | None:
        """Return the stream that can be exported from a worker, if there is one."""
        is_settled = not self._waits_for_first and self.producer is None
        if self.ended or not is_settled or self._exporting is not None or self._is_nearly_done:
            return None
        stream = self.decode
        is_there = stream.open and stream.has_token and stream.worker_id == worker_id
        return stream if is_there else None

    def export(self, stream: StreamState) -> None:
        """The worker was asked to end the stream and to keep its KV."""
        self._exporting = stream

    def on_export_timeout(self) -> Sequence[Action]:
        """The worker has not ended the exported stream in time."""
        stream = self._exporting
        if stream is None or self.ended:
            return ()
        error = Unavailable(f"worker {stream.worker_id} did not export the request in time")
        return self._fail(stream, error, was_moving=True)

    def _on_early(
        self, stream: StreamState, event: StreamDelta | PdserveError, error: PdserveError | None
    ) -> Sequence[Action]:
        if error is not None and not isinstance(error, RETRYABLE):
            return self._failed(stream, error)
        self._early.append(event)
        return ()

    def _deliver(self, stream: StreamState, delta: StreamDelta) -> Sequence[Action]:
        self._take(stream, delta)
        if not self._waits_for_first or not delta.token_ids:
            return (delta,)
        self._waits_for_first = False
        actions: list[Action] = [delta]
        early, self._early = self._early, []
        for event in early:
            react = self.on_delta if isinstance(event, StreamDelta) else self.on_lost
            actions += react(self.decode, event)  # type: ignore[arg-type]
        return actions

    def _take(self, stream: StreamState, delta: StreamDelta) -> None:
        self.tokens += delta.token_ids
        stream.has_token = stream.has_token or bool(delta.token_ids)

    def _on_last(self, stream: StreamState, delta: StreamDelta) -> Sequence[Action]:
        stream.report = delta.report
        if stream is self._exporting and delta.exported_tokens:
            return self._exported(stream, delta.exported_tokens)
        error = _error_of(stream, delta)
        if error is not None:
            return self._failed(stream, error)
        stream.open = False
        reason = delta.finish_reason or FinishReason.STOP
        if stream is not self.prefill or reason is not FinishReason.LENGTH:
            self._take(stream, delta)
            return self._end(Finished(delta, reason))
        if self._waits_for_first and not delta.token_ids:
            error = InternalError(f"worker {stream.worker_id} ended prefill without a token")
            return self._end(Failed(stream, error))
        stream.holds_kv, self.producer = True, stream
        actions = self._deliver(stream, delta)
        if not self._decode_is_pending:
            return actions
        self._decode_is_pending = False
        if not delta.kv_handle:
            return *actions, *self._failed(self.decode, TransferFailed("prefill kept no KV"))
        return *actions, SubmitDecode(delta.kv_handle)

    def _exported(self, stream: StreamState, count: int) -> Sequence[Action]:
        stream.open, stream.holds_kv, self.producer = False, True, stream
        if count == len(self.tokens):
            return self._end(Exported(stream))
        message = f"worker {stream.worker_id} made {count} tokens, {len(self.tokens)} arrived"
        return self._fail(stream, Unavailable(message), was_moving=True)

    def _failed(self, stream: StreamState, error: PdserveError) -> Sequence[Action]:
        stream.open = False
        if stream is self.prefill and not self._waits_for_first and not self._decode_is_pending:
            # Decode has all that it needs, or will report that it has not.
            return ()
        # A worker that cannot keep the KV of an exported stream is not at fault.
        was_moving = stream is self._exporting and isinstance(error, Unavailable)
        return self._fail(stream, error, was_moving=was_moving)

    def _fail(
        self, stream: StreamState, error: PdserveError, *, was_moving: bool
    ) -> Sequence[Action]:
        if isinstance(error, RETRYABLE) and len(self.tokens) >= self.max_tokens:
            # All tokens came; only the finish reason is missing.
            return self._end(Finished(StreamDelta(0), FinishReason.LENGTH))
        return self._end(Failed(stream, error, was_moving))

    def _end(self, end: End) -> Sequence[Action]:
        self.ended = True
        return (end,)


def _error_of(stream: StreamState, delta: StreamDelta) -> PdserveError | None:
    """Return the error of a last delta that does not complete the answer."""
    if delta.error is not None:
        return from_info(delta.error)
    if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        return WorkerFailed(f"worker {stream.worker_id} aborted the request")
    return None
