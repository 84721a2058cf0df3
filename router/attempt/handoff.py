"""Order of the streams of one attempt, as a state machine without I/O.

Prefill samples the first token, and decode continues after it. Both streams are submitted
together, so KV moves while it is computed, and their deltas may arrive in any order. Deltas and
failures of decode that arrive before the first token are therefore held back until it arrives. The
answer may end with the first token; a failure of decode is then only a consequence.

A request can leave a healthy worker with its KV by exporting its stream. An exported stream sends
tokens until its last delta, which has the number of tokens generated. The next attempt starts with
its KV.

Events are method calls. Each returns a list of actions in order: deltas to send to the client, or
as the last one an `End`. router/attempt/recovery.py decides what follows a failure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from pdserve.errors import (
    InternalError,
    Overloaded,
    PdserveError,
    TransferFailed,
    Unavailable,
    WorkerFailed,
    from_info,
)
from pdserve.types import FinishReason, StreamDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

# Failures of one worker, or temporary ones. Other errors would occur on any worker.
RETRYABLE = (WorkerFailed, TransferFailed, Unavailable, Overloaded)
# In receipts: why a request left a healthy worker.
MOVED = "moved"


class Side(StrEnum):
    """A stream of an attempt. An aggregated attempt has only DECODE. PREVIOUS is the exported
    stream that the previous attempt left; it sends nothing. ENCODE computes embeddings for PREFILL;
    an attempt does not depend on it."""

    PREFILL = "prefill"
    DECODE = "decode"
    PREVIOUS = "previous"
    ENCODE = "encode"


class Finished(Struct, frozen=True):
    """The answer is complete; `delta` has its last tokens."""

    delta: StreamDelta
    reason: FinishReason


class Failed(Struct, frozen=True):
    """The attempt failed on the worker of `side`. `was_moving`: the request was leaving that
    worker, which is healthy."""

    side: Side
    error: PdserveError
    was_moving: bool = False


class Exported(Struct, frozen=True):
    """The worker of DECODE holds the KV of all tokens except the last for the next attempt."""


End = Finished | Failed | Exported
Action = StreamDelta | End


@dataclass(slots=True, eq=False)
class Handoff:
    """State of one attempt. `prefill` is None for an attempt on one worker.

    `tokens`: number delivered over all attempts. `kv_held_by`: the side whose stream has ended and
    whose worker holds KV until decode has it. It is PREVIOUS at the start of an attempt that
    continues with the KV of an exported stream.
    """

    max_tokens: int
    tokens: int
    decode: str  # worker id
    prefill: str | None = None
    kv_held_by: Side | None = None
    ended: bool = field(default=False, init=False)
    _open: set[Side] = field(init=False)
    _waits_for_first: bool = field(init=False)
    _decode_has_token: bool = field(default=False, init=False)
    _is_exporting: bool = field(default=False, init=False)
    _early: list[StreamDelta | PdserveError] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._open = {Side.DECODE} if self.prefill is None else {Side.PREFILL, Side.DECODE}
        self._waits_for_first = self.prefill is not None

    def is_open(self, side: Side) -> bool:
        """Return True until the last delta of a stream or its loss."""
        return side in self._open

    def accepts(self, side: Side) -> bool:
        """Count a token that changes no state. Return False without counting it if `on_delta` must
        handle it."""
        if (
            self._waits_for_first
            or self.kv_held_by is not None
            or self.ended
            or side not in self._open
        ):
            return False
        self.tokens += 1
        return True

    def on_delta(self, side: Side, delta: StreamDelta) -> Sequence[Action]:
        """Handle a delta. Deltas of a stream that is not open are ignored."""
        if self.ended or not self.is_open(side):
            return ()
        if side is Side.DECODE and self._waits_for_first:
            return self._on_early(side, delta, self._error_of(side, delta))
        if side is Side.DECODE and delta.error is None:
            # A delta of decode proves that it has the KV, so there is nothing left to free.
            self.kv_held_by = None
        if delta.finish_reason is not None:
            return self._on_last(side, delta)
        return self._deliver(side, delta)

    def on_lost(self, side: Side, error: PdserveError) -> Sequence[Action]:
        """Handle the loss of a stream: its connection closed, or its worker is lost."""
        if self.ended or not self.is_open(side):
            return ()
        if side is Side.DECODE and self._waits_for_first:
            return self._on_early(side, error, error)
        return self._failed(side, error)

    def stop(self) -> None:
        """End the attempt from outside. Later events are ignored."""
        self.ended = True

    def uses(self, worker_id: str) -> bool:
        """Return True if the attempt uses `worker_id` and can leave it."""
        is_leaving = self._is_exporting or self.kv_held_by is Side.PREVIOUS
        if self.ended or is_leaving or self._is_nearly_done:
            return False
        if worker_id == self.prefill:
            return Side.PREFILL in self._open or self.kv_held_by is Side.PREFILL
        return worker_id == self.decode and Side.DECODE in self._open

    @property
    def _is_nearly_done(self) -> bool:
        """True if at most one token is missing, so that another pair of workers saves nothing."""
        return self.tokens + 1 >= self.max_tokens

    def can_export(self, worker_id: str) -> bool:
        """Return True if `worker_id` decodes and can export the stream."""
        is_settled = not self._waits_for_first and self.kv_held_by is None
        if self.ended or not is_settled or self._is_exporting or self._is_nearly_done:
            return False
        is_there = worker_id == self.decode and self._decode_has_token
        return is_there and self.is_open(Side.DECODE)

    def export(self) -> None:
        """Record that the decode worker is asked to export its stream."""
        self._is_exporting = True

    def on_export_timeout(self) -> Sequence[Action]:
        """Fail the attempt if the worker has not ended the exported stream in time."""
        if self.ended or not self._is_exporting:
            return ()
        error = Unavailable(f"worker {self.decode} did not export the request in time")
        return self._fail(Side.DECODE, error, was_moving=True)

    def _on_early(
        self, side: Side, event: StreamDelta | PdserveError, error: PdserveError | None
    ) -> Sequence[Action]:
        # An error of the request itself would occur on any worker, so do not wait for the first
        # token.
        if error is not None and not isinstance(error, RETRYABLE):
            return self._failed(side, error)
        self._early.append(event)
        return ()

    def _deliver(self, side: Side, delta: StreamDelta) -> Sequence[Action]:
        self._count(side, delta)
        if not self._waits_for_first or not delta.token_ids:
            return (delta,)
        self._waits_for_first = False
        actions: list[Action] = [delta]
        early, self._early = self._early, []
        for event in early:
            react = self.on_delta if isinstance(event, StreamDelta) else self.on_lost
            actions += react(Side.DECODE, event)  # type: ignore[arg-type]
        return actions

    def _count(self, side: Side, delta: StreamDelta) -> None:
        self.tokens += len(delta.token_ids)
        self._decode_has_token |= side is Side.DECODE and bool(delta.token_ids)

    def _on_last(self, side: Side, delta: StreamDelta) -> Sequence[Action]:
        if side is Side.DECODE and self._is_exporting and delta.exported_tokens:
            return self._exported(delta.exported_tokens)
        error = self._error_of(side, delta)
        if error is not None:
            return self._failed(side, error)
        self._open.remove(side)
        reason = delta.finish_reason or FinishReason.STOP
        # Prefill is limited to one token, so LENGTH means that decode continues. Any other reason,
        # such as a stop string in the first token, ends the answer.
        if side is not Side.PREFILL or reason is not FinishReason.LENGTH:
            self._count(side, delta)
            return self._end(Finished(delta, reason))
        if self._waits_for_first and not delta.token_ids:
            error = InternalError(f"worker {self.prefill} ended prefill without a token")
            return self._end(Failed(side, error))
        self.kv_held_by = side
        return self._deliver(side, delta)

    def _exported(self, count: int) -> Sequence[Action]:
        self._open.remove(Side.DECODE)
        self.kv_held_by = Side.DECODE
        if count == self.tokens:
            return self._end(Exported())
        # A token was lost in transit. The KV does not match the tokens, so compute them again.
        message = f"worker {self.decode} made {count} tokens, {self.tokens} arrived"
        return self._fail(Side.DECODE, Unavailable(message), was_moving=True)

    def _failed(self, side: Side, error: PdserveError) -> Sequence[Action]:
        self._open.remove(side)
        if side is Side.PREFILL and not self._waits_for_first:
            # Decode has all KV, or it reports a failed transfer itself.
            return ()
        # Unavailable here means that the worker could not keep the KV, which is not its fault.
        was_moving = side is Side.DECODE and self._is_exporting and isinstance(error, Unavailable)
        return self._fail(side, error, was_moving=was_moving)

    def _fail(self, side: Side, error: PdserveError, *, was_moving: bool) -> Sequence[Action]:
        if isinstance(error, RETRYABLE) and self.tokens >= self.max_tokens:
            # All tokens arrived and only the finish reason is missing: nothing to compute again.
            return self._end(Finished(StreamDelta(0), FinishReason.LENGTH))
        return self._end(Failed(side, error, was_moving))

    def _error_of(self, side: Side, delta: StreamDelta) -> PdserveError | None:
        """Return the error of a last delta that does not complete the answer."""
        if delta.error is not None:
            return from_info(delta.error)
        if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            worker_id = self.prefill if side is Side.PREFILL else self.decode
            return WorkerFailed(f"worker {worker_id} aborted the request")
        return None

    def _end(self, end: End) -> Sequence[Action]:
        self.ended = True
        return (end,)
