"""One request's way from prefill to decode, as a state machine without I/O.

A leg is one stream on one worker. Events come in as method calls, actions come out as values:

    open_pair ─► waiting for the first token ─► decoding ─► done
                        │                           │
    open_whole ─────────┴──── fall back ◄───────────┘

Prefill samples the first token and decode goes on after it. Where the handoff is at once, both are
submitted together, over two streams that no clock orders. So whatever comes from decode before the
first token, its failure included, waits for the first token: then either the answer ends with it,
and decode's failure was its consequence, or the answer goes on from it. Where it is in turn, decode
is placed with prefill and submitted when prefill has ended, with prefill's token and with what it
says of its KV.

Failures become bounded fallbacks. Prefill that fails before its token is tried once more, both
sides anew, and so is one whose KV came damaged: by another pair, after the delivered tokens.
Everything else is recomputed elsewhere from prompt and delivered tokens. Tokens that were delivered
are never repeated or changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pdserve.errors import (
    InternalError,
    Overloaded,
    PdserveError,
    TransferCorrupted,
    TransferFailed,
    Unavailable,
    WorkerFailed,
    from_info,
)
from pdserve.types import FinishReason, HandoffStyle, PhaseReport, Role, StreamDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_FALLBACKS = 2
# Failures of a worker or of a moment; others would meet the request again elsewhere.
RETRYABLE = (WorkerFailed, TransferFailed, Unavailable, Overloaded)


class LegKind(StrEnum):
    """What a leg's worker was asked to do; WHOLE is both phases."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"


class Step(StrEnum):
    """Rungs of the fallback ladder, as receipts and metrics name them."""

    PREFILL_RETRY = "prefill_retry"
    RECOMPUTE = "recompute"


@dataclass(slots=True, eq=False)
class Leg:
    """One stream on one worker; `open` until its last delta, its loss, or its cancellation. `holds`
    from a prefill's last delta until decode's first: its blocks wait to be taken."""

    kind: LegKind
    worker_id: str
    role: Role
    open: bool = True
    report: PhaseReport | None = None
    holds: bool = False


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tokens for the client; what the delta says of finishing is not for the client."""

    delta: StreamDelta


@dataclass(frozen=True, slots=True)
class Finish:
    """The last tokens, and why there are no more."""

    delta: StreamDelta
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """The answer ends with an error."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class SubmitDecode:
    """Prefill has ended: submit the decode leg, to go on after `resume` with the KV that
    `kv_handle` tells of."""

    leg: Leg
    kv_handle: bytes
    resume: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelLeg:
    """Tell the leg's worker to stop."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Resubmit:
    """Place and submit the request anew, after the tokens of `resume`; then call `open_pair` or
    `open_whole`, or `unplaced` where there is no worker. `avoid` is the worker that failed."""

    step: Step
    resume: tuple[int, ...]
    avoid: str
    cause: PdserveError


Action = Deliver | SubmitDecode | Finish | Fail | CancelLeg | Resubmit
_NOTHING: tuple[Action, ...] = ()


@dataclass(slots=True, eq=False)
class Handoff:
    """State: the legs of one request, the tokens delivered and the fallbacks used."""

    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    first_token_leg: Leg | None = None
    done: bool = False
    # The pair's prefill has not given its token yet.
    _joining: bool = False
    # Decode's deltas, or its failure, that came before the first token.
    _early: list[StreamDelta | PdserveError] = field(default_factory=list)
    _holder: Leg | None = None
    _unsubmitted: Leg | None = None  # a decode leg whose turn has not come

    def open_pair(
        self, prefill: Leg, decode: Leg, style: HandoffStyle = HandoffStyle.AT_ONCE
    ) -> None:
        """Both phases were placed, each on its worker; prefill was submitted, and decode too unless
        the handoff is in turn."""
        self.legs += (prefill, decode)
        self._joining = True
        self._unsubmitted = decode if style is HandoffStyle.IN_TURN else None

    def open_whole(self, leg: Leg) -> None:
        """Both phases were submitted to one worker."""
        self.legs.append(leg)

    def on_delta(self, leg: Leg, delta: StreamDelta) -> Sequence[Action]:
        """A delta of a leg; those of closed legs are stale and dropped."""
        if not leg.open:
            return _NOTHING
        if leg.kind is LegKind.DECODE and self._joining:
            return self._early_event(leg, delta, _failure(leg, delta))
        if leg.kind is LegKind.DECODE and self._holder is not None and delta.error is None:
            self._holder.holds = False
            self._holder = None
        if delta.finish_reason is not None:
            return self._on_last(leg, delta)
        return self._deliver(leg, delta)

    def goes_on(self, leg: Leg, token_id: int) -> bool:
        """Takes a token that changes nothing but the text; False, having taken nothing, where
        `on_delta` has to be asked."""
        if not leg.open or not self.tokens or self._joining or self._holder is not None:
            return False
        self.tokens.append(token_id)
        return True

    def on_lost(self, leg: Leg, error: PdserveError) -> Sequence[Action]:
        """A leg's stream broke."""
        if not leg.open:
            return _NOTHING
        if leg.kind is LegKind.DECODE and self._joining:
            return self._early_event(leg, error, error)
        return self._failed(leg, error)

    def unplaced(self, resubmit: Resubmit, error: PdserveError) -> Sequence[Action]:
        """No worker took a resubmission: the next rung, or the end."""
        if resubmit.step is not Step.PREFILL_RETRY:
            return self._fail(error)
        self.fallbacks[-1] = f"{Step.RECOMPUTE}:{resubmit.cause.code}"
        return [Resubmit(Step.RECOMPUTE, tuple(self.tokens), resubmit.avoid, resubmit.cause)]

    def abandon(self) -> Sequence[CancelLeg]:
        """End without an answer: the client left, or the deadline passed."""
        self.done = True
        return self._close_legs()

    def _early_event(
        self, leg: Leg, event: StreamDelta | PdserveError, error: PdserveError | None
    ) -> Sequence[Action]:
        if error is not None and not isinstance(error, RETRYABLE):
            return self._failed(leg, error)
        self._early.append(event)
        return _NOTHING

    def _deliver(self, leg: Leg, delta: StreamDelta) -> Sequence[Action]:
        if not self.tokens and delta.token_ids:
            self.first_token_leg = leg
        self.tokens += delta.token_ids
        if not self._joining or not delta.token_ids:
            return (Deliver(delta),)
        self._joining = False
        actions: list[Action] = [Deliver(delta)]
        early, self._early = self._early, []
        decode = next((x for x in self.legs if x.open and x.kind is LegKind.DECODE), None)
        if decode is not None:
            for event in early:
                if isinstance(event, StreamDelta):
                    actions += self.on_delta(decode, event)
                else:
                    actions += self.on_lost(decode, event)
        return actions

    def _on_last(self, leg: Leg, delta: StreamDelta) -> Sequence[Action]:
        leg.report = delta.report
        error = _failure(leg, delta)
        if error is not None:
            return self._failed(leg, error)
        leg.open = False
        reason = delta.finish_reason or FinishReason.STOP
        if leg.kind is LegKind.PREFILL and reason is FinishReason.LENGTH:
            if self._joining and not delta.token_ids:
                error = InternalError(f"worker {leg.worker_id} ended prefill without a token")
                return self._fail(error)
            leg.holds, self._holder = True, leg
            return [*self._deliver(leg, delta), *self._take_turn(delta.kv_handle)]
        if not self.tokens and delta.token_ids:
            self.first_token_leg = leg
        self.tokens += delta.token_ids
        return self._finish(delta, reason)

    def _take_turn(self, kv_handle: bytes) -> Sequence[Action]:
        decode, self._unsubmitted = self._unsubmitted, None
        if decode is None:
            return _NOTHING
        if not kv_handle:
            return self._failed(decode, TransferFailed("prefill kept no KV"))
        return (SubmitDecode(decode, kv_handle, tuple(self.tokens)),)

    def _failed(self, leg: Leg, error: PdserveError) -> Sequence[Action]:
        leg.open = False
        if leg.kind is LegKind.PREFILL and not self._joining and self._unsubmitted is None:
            # Decode has all that it needs, or will say that it has not.
            return _NOTHING
        if not isinstance(error, RETRYABLE):
            return self._fail(error)
        if leg.kind is LegKind.PREFILL and self._joining:
            return self._fall_back(Step.PREFILL_RETRY, leg, error)
        if isinstance(error, TransferCorrupted) and leg.kind is LegKind.DECODE:
            return self._on_corrupted(leg, error)
        return self._fall_back(Step.RECOMPUTE, leg, error)

    def _on_corrupted(self, leg: Leg, error: PdserveError) -> Sequence[Action]:
        # Another pair's prefill would give one token, and its decode at least one more.
        if self._has_retried or len(self.tokens) + 1 >= self.max_tokens:
            return self._fall_back(Step.RECOMPUTE, leg, error)
        source = next(x for x in reversed(self.legs) if x.kind is LegKind.PREFILL)
        return self._fall_back(Step.PREFILL_RETRY, source, error)

    @property
    def _has_retried(self) -> bool:
        return any(name.startswith(Step.PREFILL_RETRY) for name in self.fallbacks)

    def _fall_back(self, step: Step, leg: Leg, error: PdserveError) -> Sequence[Action]:
        self._early.clear()
        self._joining = False
        if len(self.tokens) >= self.max_tokens:
            # All tokens came; only the word that they were the last is missing.
            return self._finish(StreamDelta(0), FinishReason.LENGTH)
        if len(self.fallbacks) == MAX_FALLBACKS:
            return self._fail(
                type(error)(f"{error.message} (after {' and '.join(self.fallbacks)})")
            )
        if self._has_retried:
            step = Step.RECOMPUTE
        self.fallbacks.append(f"{step}:{error.code}")
        resubmit = Resubmit(step, tuple(self.tokens), leg.worker_id, error)
        return [*self._close_legs(), resubmit]

    def _finish(self, delta: StreamDelta, reason: FinishReason) -> Sequence[Action]:
        self.done = True
        return [Finish(delta, reason), *self._close_legs()]

    def _fail(self, error: PdserveError) -> Sequence[Action]:
        self.done = True
        return [Fail(error), *self._close_legs()]

    def _close_legs(self) -> list[CancelLeg]:
        ending = [leg for leg in self.legs if leg.open or leg is self._holder]
        self._holder = self._unsubmitted = None
        for leg in ending:
            leg.open = False
        return [CancelLeg(leg) for leg in ending]


def _failure(leg: Leg, delta: StreamDelta) -> PdserveError | None:
    """What went wrong where the last delta is not an answer's end."""
    if delta.error is not None:
        return from_info(delta.error)
    if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        return WorkerFailed(f"worker {leg.worker_id} broke off the request")
    return None
