"""One request in flight: carries out what its handoff decides, over the links of its workers.

All of it runs synchronously in the readers of the links, in a timer or in the request's own task,
so that nothing comes between a decision and its effect.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pdserve import deadline as deadlines
from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    PdserveError,
    Unavailable,
)
from pdserve.types import HandoffStyle, StreamDelta
from router.answer import AnswerDelta
from router.handoff import Handoff
from router.handoff_actions import (
    CancelLeg,
    Deliver,
    Fail,
    Finish,
    Resubmit,
    SubmitDecode,
    TakeOver,
)
from router.ladder import LIVE_KV, MOVED, RETRYABLE, Ladder
from router.leg import Leg, LegKind
from router.leg_stream import LegStream
from router.migration import Migration
from router.pair_verdict import judge
from router.receipts import build_receipt, build_usage
from router.submission import SubmissionBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.types import GenerateRequest
    from pdserve.v1 import worker_pb2 as w
    from router.answer import AnswerSink
    from router.booking import Booker, Booking
    from router.fleet import Fleet
    from router.flight_peers import Observer, Siblings
    from router.handoff_actions import Action
    from router.ladder import LadderLimits
    from router.member import Charge, Member
    from router.placement.values import Demand
    from router.retry_budget import RetryBudget

logger = logging.getLogger(__name__)


class Flight:
    """State: one handoff, the streams of its legs, a timer. `close` ends whatever is left."""

    def __init__(
        self,
        request: GenerateRequest,
        *,
        deadline: float | None,
        buffer: AnswerSink,
        fleet: Fleet,
        booker: Booker,
        metrics: Observer,
        budget: RetryBudget,
        limits: LadderLimits,
        siblings: Siblings | None = None,
    ) -> None:
        self.fleet = fleet
        self.handoff = Handoff(
            request.sampling.max_tokens, list(request.resume), ladder=Ladder(limits)
        )
        self._budget = budget
        self._request = request
        self._deadline = deadline
        self.buffer = buffer
        self._booker = booker
        self._metrics = metrics
        self._siblings = siblings
        self._submissions = SubmissionBuilder(request, deadline)
        self._streams: dict[Leg, LegStream] = {}
        self._release: Callable[[], None] | None = None
        self._booking: Booking | None = None
        self._decode_message: Callable[..., w.Command] | None = None  # until its turn comes
        self._migration = Migration(booker)
        self._timer: asyncio.TimerHandle | None = None
        self._arrived = time.monotonic()
        self._admission_s = 0.0
        self._ttft_s = 0.0
        self._over = False

    def start(self, booking: Booking, demand: Demand, release: Callable[[], None]) -> None:
        """Submit to the workers that were booked; `release` is called at the end."""
        self.wait(demand, release)
        self.lead(booking)

    def wait(self, demand: Demand, release: Callable[[], None]) -> None:
        """As `start`, and submit nothing: another answer leads."""
        self._admission_s = time.monotonic() - self._arrived
        self._release = release
        self._demand = demand
        left_s = deadlines.remaining(self._deadline)
        if left_s is not None:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._expire)

    def lead(self, booking: Booking) -> None:
        """Submit to the workers that were booked; replaces what was. All is said where the client
        has every token already."""
        self.perform(self.handoff.recall())
        self.perform(self.handoff.complete())
        if not self._over:
            self._submit_booking(booking, self._request.resume)

    def join(self, member: Member, charge: Charge) -> LegStream:
        """A new stream on `member`, of a fork that is yet to be submitted; replaces what was."""
        self.perform(self.handoff.recall())
        leg = Leg(LegKind.WHOLE, member.worker_id, member.info.role)
        self.handoff.open_whole(leg)
        return self._stream(leg, member, charge)

    @property
    def seed(self) -> int | None:
        return self._request.sampling.seed

    @property
    def is_over(self) -> bool:
        return self._over

    def forks_for(self, leg: Leg, member: Member) -> Sequence[LegStream]:
        """The forks of what is about to be submitted."""
        if self._siblings is None or leg.kind is LegKind.PREFILL:
            return ()
        return self._siblings.join(self, member)

    def spoke(self, leg: Leg) -> None:
        """The first token of a leg came."""
        if leg.source:
            self._metrics.continued(self._request.model, LIVE_KV)
        if self._siblings is not None and leg.kind is not LegKind.PREFILL:
            self._siblings.spoke(self)

    def _submit_booking(self, booking: Booking, resume: tuple[int, ...] = ()) -> None:
        self._booking = booking
        decode, prefill = booking.decode, booking.prefill
        if prefill is None or booking.prefill_charge is None:
            self._submit_whole(decode, booking.decode_charge, resume)
            return
        transfer_id = secrets.token_hex(16)
        prefill_leg = Leg(LegKind.PREFILL, prefill.worker_id, prefill.info.role)
        decode_leg = Leg(LegKind.DECODE, decode.worker_id, decode.info.role)
        style = HandoffStyle.CONCURRENT if prefill.info.kv is None else prefill.info.kv.handoff
        self.handoff.open_pair(prefill_leg, decode_leg, style)
        # Both streams are known before either is sent, so that a failure finds both to end.
        decode_stream = self._stream(decode_leg, decode, booking.decode_charge)
        prefill_stream = self._stream(prefill_leg, prefill, booking.prefill_charge)
        message = partial(self._submissions.decode, transfer_id, prefill, decode)
        if style is HandoffStyle.SEQUENTIAL:
            self._decode_message = message
        else:
            decode_stream.submit(message(resume=resume))
        prefill_stream.submit(self._submissions.prefill(transfer_id, resume))

    def _submit_decode(self, action: SubmitDecode) -> None:
        message, self._decode_message = self._decode_message, None
        assert message is not None, "a decode leg's turn comes once"
        command = message(resume=action.resume, kv_handle=action.kv_handle)
        self._streams[action.leg].submit(command)

    def _take_over(self, resume: tuple[int, ...]) -> None:
        transfer_id, booking = self._migration.take()
        decode, source = booking.decode, booking.source
        assert source is not None, "it was booked for what a source has"
        self._booking = booking
        leg = Leg(LegKind.DECODE, decode.worker_id, decode.info.role, source=source.worker_id)
        self.handoff.open_live(leg)
        self._metrics.fell_back(self._request.model, LIVE_KV, MOVED)
        logger.info(
            "request %s: goes on from worker %s to %s with its KV after %d tokens",
            self._request.request_id,
            source.worker_id,
            decode.worker_id,
            len(resume),
        )
        stream = self._stream(leg, decode, booking.decode_charge)
        stream.submit(
            self._submissions.decode(transfer_id, source, decode, resume=resume, live=True)
        )

    def _submit_whole(self, member: Member, charge: Charge, resume: tuple[int, ...]) -> None:
        leg = Leg(LegKind.WHOLE, member.worker_id, member.info.role)
        self.handoff.open_whole(leg)
        self._stream(leg, member, charge).submit(self._submissions.whole(resume))

    def stream_of(self, leg: Leg) -> LegStream:
        """That of a leg which is open."""
        return self._streams[leg]

    def _stream(self, leg: Leg, member: Member, charge: Charge) -> LegStream:
        stream = self._streams[leg] = LegStream(self, leg, member, charge)
        return stream

    def judge_pair(self, last: StreamDelta) -> None:
        """Decode's last delta tells whether KV came whole: before another pair is looked for."""
        if self._booking is not None and self._booking.pair is not None:
            is_trial = self._booking.is_trial
            judge(
                self.fleet.quarantine, self._booking.pair, last, self.fleet.now(), is_trial=is_trial
            )

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out what the handoff decided, in order, until the request is over."""
        for action in actions:
            if self._over:
                return
            if type(action) is Deliver:
                self._deliver(action.delta)
            else:
                self._perform_rare(action)

    def _perform_rare(self, action: Action) -> None:
        match action:
            case CancelLeg(leg):
                self._streams.pop(leg).cancel()
            case Finish():
                self._finish(action)
            case Fail(error):
                if isinstance(error, RETRYABLE):
                    self._metrics.fell_back(self._request.model, "error", error.code)
                self._fail(error)
            case Resubmit():
                self._resubmit(action)
            case SubmitDecode():
                self._submit_decode(action)
            case TakeOver(resume):
                self._take_over(resume)

    def _deliver(self, delta: StreamDelta) -> None:
        if not self._ttft_s:
            self._ttft_s = time.monotonic() - self._arrived
        if len(delta.token_ids) == 1 and not delta.logprobs:
            is_kept = self.buffer.push_token(delta.token_ids[0], delta.text)
        else:
            is_kept = self.buffer.push(AnswerDelta(delta.token_ids, delta.text, delta.logprobs))
        if not is_kept:
            self.cut_off()

    def cut_off(self) -> None:
        """The reader has fallen too far behind."""
        self.handoff.abandon()
        self._fail(Cancelled("the client does not read its answer"), drop=True)

    def _finish(self, action: Finish) -> None:
        elapsed_s = time.monotonic() - self._arrived
        delta = action.delta
        usage = build_usage(self.handoff, len(self._request.prompt_token_ids))
        prediction = None if self._booking is None else self._booking.prediction
        receipt = build_receipt(self.handoff, admission_s=self._admission_s, prediction=prediction)
        self.buffer.push(
            AnswerDelta(
                token_ids=delta.token_ids,
                text=delta.text,
                logprobs=delta.logprobs,
                finish_reason=action.reason,
                stop_reason=delta.stop_reason,
                usage=usage,
                receipt=receipt,
            )
        )
        self.buffer.end()
        model, ttft_s = self._request.model, self._ttft_s or elapsed_s
        self._metrics.tenants.answered(self._request.tenant, usage)
        made = usage
        if had := len(self._request.resume):
            made = replace(usage, completion_tokens=usage.completion_tokens - had)
        self._metrics.answered(model, made, receipt, ttft_s=ttft_s, e2e_s=elapsed_s)
        if self._booking is not None:
            self._metrics.prefix.judge(model, self._booking.decision.cached, receipt)
        if self._booking is not None and not (self.handoff.fallbacks or self._request.resume):
            waited_s = self._admission_s
            self._booker.answered(
                prediction,
                model,
                usage,
                receipt,
                ttft_s=ttft_s - waited_s,
                e2e_s=elapsed_s - waited_s,
            )
        self._ended(action.reason.value)

    def _fail(self, error: PdserveError, *, drop: bool = False) -> None:
        self.buffer.fail(error, drop=drop)
        self._ended(error.code)
        logger.info("request %s failed: %s", self._request.request_id, error.message)

    def _resubmit(self, action: Resubmit) -> None:
        self._migration.close()
        if self._siblings is None or not self._siblings.defers(self, action):
            self.resubmit(action)

    def resubmit(self, action: Resubmit) -> None:
        """Go on elsewhere."""
        demand = self.demand_after(action.resume)
        try:
            self._budget.take(demand.model, demand.prompt_tokens, self.fleet.now())
        except PdserveError as error:
            self.perform(self.handoff.give_up(error))
            return
        try:
            booking = self._booker.book_again(demand, action.rung, cause=action.cause.message)
        except PdserveError as error:
            self._budget.give_back(demand.model, demand.prompt_tokens)
            self.perform(self.handoff.unplaced(action, error))
            return
        self._go_on(booking, action)

    def move_off(self, worker_id: str, reason: str, *, live_only: bool = False) -> bool:
        """Go on elsewhere than on a worker that is well, after the tokens that were delivered: with
        their KV, or else, unless `live_only`, by computing it again. False, with nothing changed,
        where the request is not there, is as good as done, or has nowhere to go."""
        if not self._over and self._migration.begin(self, worker_id, reason):
            return True
        leaving = self.handoff.leaving(worker_id, Unavailable(reason))
        if self._over or live_only or leaving is None:
            return False
        demand = self.demand_after(leaving.resume)
        try:
            self._budget.take(demand.model, demand.prompt_tokens, self.fleet.now())
        except PdserveError:
            return False
        try:
            booking = self._booker.book_again(demand, leaving.rung, cause=reason)
        except PdserveError:
            self._budget.give_back(demand.model, demand.prompt_tokens)
            return False
        self.perform(self.handoff.leave(leaving))
        self._go_on(booking, leaving)
        return True

    def demand_after(self, resume: tuple[int, ...]) -> Demand:
        """What is asked for after the tokens of `resume`."""
        resume = resume[len(self._request.resume) :]  # those are in the demand
        return replace(
            self._demand,
            prompt_tokens=self._demand.prompt_tokens + len(resume),
            prefill_only=False,
            token_ids=self._demand.token_ids + resume,
        )

    def _go_on(self, booking: Booking, action: Resubmit) -> None:
        prefill = booking.prefill
        step = self.handoff.step_of(None if prefill is None else prefill.worker_id)
        self._metrics.fell_back(self._request.model, step, action.reason)
        if action.resume:
            self._metrics.continued(self._request.model, "prefill")
        workers = [m.worker_id for m in (prefill, booking.decode) if m is not None]
        logger.info(
            "request %s: %s on %s after %d tokens: %s",
            self._request.request_id,
            step,
            " and ".join(workers),
            len(action.resume),
            action.cause.message,
        )
        self._submit_booking(booking, action.resume)

    def _expire(self) -> None:
        self.handoff.abandon()
        count = len(self.handoff.tokens)
        self._fail(DeadlineExceeded(f"the deadline passed after {count} tokens"))

    def _ended(self, outcome: str) -> None:
        """Release everything, at once: a slow reader holds no worker and no seat."""
        self._over = True
        self._migration.close()
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams.values():
            stream.cancel()
        self._streams.clear()
        if self._release is not None:
            self._release()
            self._metrics.ended(self._request.model, outcome)

    def close(self) -> None:
        """The reader is gone: end what it did not wait for."""
        if not self._over:
            self.handoff.abandon()
            self._ended(Cancelled.code)
