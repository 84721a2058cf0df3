"""One request's way from prefill to decode, as a state machine without I/O.

A leg is one stream on one worker. Events come in as method calls, actions come out as values:

    open_pair ─► waiting for the first token ─► decoding ─► done
                        │                           │
    open_whole ─────────┴──── fall back ◄───────────┤
                                                    │ export
                     open_live ◄── exported ── exporting

Prefill samples the first token and decode goes on after it. Where the handoff is at once, both are
submitted together, over two streams that no clock orders. So whatever comes from decode before the
first token, its failure included, waits for the first token: then either the answer ends with it,
and decode's failure was its consequence, or the answer goes on from it. Where it is in turn, decode
is placed with prefill and submitted when prefill has ended, with prefill's token and with what it
says of its KV.

An answer leaves a worker that is well with its KV: its leg is exported, and goes on giving tokens
until its last delta says that no more come and how many there were. Then it is taken over by a new
decode leg, whose KV comes from the old one. Whatever else that last delta says, it is an end or a
failure as ever; so is one that does not come in time.

A failure becomes a fallback: the request is placed anew, to go on after the tokens that were
delivered, which are never repeated or changed. `router/ladder.py` says how, and when to give up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.errors import (
    InternalError,
    PdserveError,
    TransferCorrupted,
    TransferFailed,
    Unavailable,
    WorkerFailed,
    from_info,
)
from pdserve.types import FinishReason, HandoffStyle, StreamDelta
from router.handoff_actions import (
    CancelLeg,
    Deliver,
    Fail,
    Finish,
    Resubmit,
    SubmitDecode,
    TakeOver,
)
from router.ladder import MOVED, RETRYABLE, Failure, Ladder, Rung, Step
from router.leg import LegKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.handoff_actions import Action
    from router.leg import Leg


_NOTHING: tuple[Action, ...] = ()


@dataclass(slots=True, eq=False)
class Handoff:
    """State: the legs of one request, the tokens delivered, with those that the client had from
    elsewhere, and the fallbacks used."""

    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    ladder: Ladder = field(default_factory=Ladder)
    first_token_leg: Leg | None = None
    done: bool = False
    # The pair's prefill has not given its token yet.
    _joining: bool = False
    # Decode's deltas, or its failure, that came before the first token.
    _early: list[StreamDelta | PdserveError] = field(default_factory=list)
    _holder: Leg | None = None
    _unsubmitted: Leg | None = None  # a decode leg whose turn has not come
    _falling: Resubmit | None = None  # until it is placed
    _exporting: Leg | None = None

    @property
    def fallbacks(self) -> Sequence[str]:
        """What was done, as step:reason."""
        return self.ladder.done

    @property
    def prefill(self) -> str:
        """The worker that prefilled last, "" where none did for another."""
        legs = reversed(self.legs)
        return next((leg.worker_id for leg in legs if leg.kind is LegKind.PREFILL), "")

    def open_pair(
        self, prefill: Leg, decode: Leg, style: HandoffStyle = HandoffStyle.CONCURRENT
    ) -> None:
        """Both phases were placed, each on its worker; prefill was submitted, and decode too unless
        the handoff is in turn."""
        self._took(self.step_of(prefill.worker_id))
        self.legs += (prefill, decode)
        self._joining = True
        self._unsubmitted = decode if style is HandoffStyle.SEQUENTIAL else None

    def open_whole(self, leg: Leg) -> None:
        """Both phases were submitted to one worker."""
        self._took(self.step_of(None))
        self.legs.append(leg)

    def open_live(self, leg: Leg) -> None:
        """What was exported was submitted, to go on with its KV."""
        self.ladder.carried(len(self.tokens))
        self.legs.append(leg)

    def step_of(self, prefill: str | None) -> Step:
        """What it is called to go on with this prefill worker, or with one worker."""
        if prefill is None:
            return Step.ONE_WORKER
        return Step.SAME_PREFILL if prefill == self.prefill else Step.OTHER_PREFILL

    def _took(self, step: Step) -> None:
        falling, self._falling = self._falling, None
        if falling is not None:
            self.ladder.took(step, falling.reason, len(self.tokens))

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

    def complete(self) -> Sequence[Action]:
        """The end, where all tokens are there before anything was submitted; else nothing."""
        if len(self.tokens) < self.max_tokens:
            return _NOTHING
        return self._finish(StreamDelta(0), FinishReason.LENGTH)

    def unplaced(self, resubmit: Resubmit, error: PdserveError) -> Sequence[Action]:
        """The rung of a resubmission leads nowhere: the next one, or the end."""
        return self._climb(resubmit.reason, resubmit.cause) or self._fail(error)

    def give_up(self, error: PdserveError) -> Sequence[Action]:
        """A resubmission is not to be: the answer ends with `error`."""
        return self._fail(error)

    def recall(self) -> Sequence[CancelLeg]:
        """What was submitted is taken back, to be submitted elsewhere: no token came of it, and
        what failed its leader costs a fork no rung."""
        self._falling = None
        self.ladder.restart()
        return self._close_legs()

    def leaving(self, worker_id: str, cause: PdserveError) -> Resubmit | None:
        """How the answer would leave a worker; None where it is not there, or as good as done. For
        `leave`, once it has been placed; until then nothing has changed."""
        is_there = any(
            x.worker_id == worker_id and (x.open or x is self._holder) for x in self.legs
        )
        if self.done or not is_there or self._is_leaving or len(self.tokens) + 1 >= self.max_tokens:
            return None
        rung = Rung(Step.OTHER_PREFILL, without=frozenset({worker_id}))
        return Resubmit(rung, tuple(self.tokens), MOVED, cause)

    def exportable(self, worker_id: str) -> Leg | None:
        """The leg with which the answer could leave a worker and take its KV along."""
        if self.done or self._joining or self._holder is not None or self._exporting is not None:
            return None
        if len(self.tokens) + 1 >= self.max_tokens:
            return None
        here = (x for x in self.legs if x.open and x.spoke and x.worker_id == worker_id)
        return next(here, None)

    @property
    def _is_leaving(self) -> bool:
        """Whether its KV is on the way from one decode worker to another."""
        return self._exporting is not None or bool(self._holder and self.legs[-1].source)

    def export(self, leg: Leg) -> None:
        """The leg's worker is asked to end it and to keep its KV."""
        self._exporting = leg

    def export_late(self) -> Sequence[Action]:
        """It has not done so in time."""
        leg = self._exporting
        if leg is None:
            return _NOTHING
        leg.open = False
        error = Unavailable(f"worker {leg.worker_id} did not let go of the answer in time")
        return [CancelLeg(leg), *self._fall_back(leg, error, MOVED)]

    def leave(self, resubmit: Resubmit) -> Sequence[CancelLeg]:
        """Lets go of all legs; `open_pair` or `open_whole` follows."""
        self._early.clear()
        self._joining = False
        self._falling = resubmit
        return self._close_legs()

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
        if self.first_token_leg is None and delta.token_ids:
            self.first_token_leg = leg
        self.tokens += delta.token_ids
        leg.spoke = leg.spoke or bool(delta.token_ids)
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
        if leg is self._exporting and delta.exported_tokens:
            return self._exported(leg, delta.exported_tokens)
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
        if self.first_token_leg is None and delta.token_ids:
            self.first_token_leg = leg
        self.tokens += delta.token_ids
        return self._finish(delta, reason)

    def _exported(self, leg: Leg, tokens: int) -> Sequence[Action]:
        leg.open, leg.holds, self._holder, self._exporting = False, True, leg, None
        if tokens == len(self.tokens):
            return (TakeOver(tuple(self.tokens)),)
        told = f"worker {leg.worker_id} has made {tokens} tokens, of which {len(self.tokens)} came"
        return self._fall_back(leg, Unavailable(told), MOVED)

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
        # Who was asked to let go of it and cannot keep its KV is no worker that failed.
        is_refusal = leg is self._exporting and isinstance(error, Unavailable)
        return self._fall_back(leg, error, MOVED if is_refusal else error.code)

    def _fall_back(self, leg: Leg, error: PdserveError, reason: str) -> Sequence[Action]:
        self._early.clear()
        self._joining = False
        if len(self.tokens) >= self.max_tokens:
            # All tokens came; only the word that they were the last is missing.
            return self._finish(StreamDelta(0), FinishReason.LENGTH)
        prefill = self.prefill
        # Either of the two may have damaged KV; the prefill worker is the likelier to be replaced.
        is_corrupted = isinstance(error, TransferCorrupted) and leg.kind is LegKind.DECODE
        failed = (leg.source or prefill) if is_corrupted else leg.worker_id
        self.ladder.failed(Failure(failed, prefill, error), len(self.tokens))
        resubmits = self._climb(reason, error)
        if resubmits:
            return [*self._close_legs(), *resubmits]
        done = self.fallbacks
        after = f" (after {' and '.join(done)})" if done else ""
        return self._fail(type(error)(f"{error.message}{after}"))

    def _climb(self, reason: str, cause: PdserveError) -> Sequence[Resubmit]:
        pair_helps = len(self.tokens) + 1 < self.max_tokens
        rung = self.ladder.climb(self.prefill, pair_helps=pair_helps)
        if rung is None:
            return ()
        self._falling = Resubmit(rung, tuple(self.tokens), reason, cause)
        return (self._falling,)

    def _finish(self, delta: StreamDelta, reason: FinishReason) -> Sequence[Action]:
        self.done = True
        return [Finish(delta, reason), *self._close_legs()]

    def _fail(self, error: PdserveError) -> Sequence[Action]:
        self.done = True
        return [Fail(error), *self._close_legs()]

    def _close_legs(self) -> list[CancelLeg]:
        ending = [leg for leg in self.legs if leg.open or leg is self._holder]
        self._holder = self._unsubmitted = self._exporting = None
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
