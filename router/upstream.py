"""One attempt to answer a request: its streams on one or two workers, and what goes to the client.

Everything here runs synchronously, in the reader of a worker's connection or in the request's own
task: a token costs one look-up in the connection and one call that ends in `out.write`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from msgspec import Struct

from pdserve import wire
from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    PdserveError,
    TransferCorrupted,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)
from pdserve.types import HandoffStyle, Role, StreamDelta
from pdserve.v1 import worker_pb2 as w
from router.answer import AnswerDelta
from router.handoff import Exported, Failed, Finished, Handoff, Phase, StreamState, SubmitDecode
from router.retry import MOVED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.types import GenerateRequest
    from router.answer import Out
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.handoff import Action
    from router.placer import Charge, Reservation

logger = logging.getLogger(__name__)

# Seconds for a worker to export a request: one engine step, and the way there and back.
EXPORT_TIMEOUT_S = 5.0
# The reason of what is still under way when the answer ends.
_UNNEEDED = "unneeded"


@dataclass(slots=True, eq=False)
class Answer:
    """What was delivered of one answer, over all attempts.

    `tokens` starts with those that the client had before. `streams` are all that were opened, in
    order. `kv_worker` is for parallel sampling: it gets the worker that has the prompt's KV cached.
    """

    out: Out
    max_tokens: int
    tokens: list[int]
    index: int = 0
    streams: list[WorkerStream] = field(default_factory=list)
    first_token_stream: StreamState | None = None
    first_token_at: float | None = None
    kv_worker: asyncio.Future[Member] | None = None
    cause: str = ""  # why the last attempt was not enough

    @property
    def prefill_worker(self) -> str:
        """The worker that prefilled last for another, "" if none did."""
        prefills = (x for x in reversed(self.streams) if x.phase is Phase.PREFILL)
        return next((x.worker_id for x in prefills), "")

    @property
    def cached_tokens(self) -> int:
        first = self.first_token_stream
        return 0 if first is None or first.report is None else first.report.cached_tokens


def deadline_passed(answer: Answer) -> DeadlineExceeded:
    return DeadlineExceeded(f"the deadline passed after {len(answer.tokens)} tokens")


class Moved(Struct, frozen=True, eq=False):
    """The request leaves a healthy worker and continues with `reservation`; with a `producer` it
    takes its KV along, under `transfer_id`."""

    reservation: Reservation
    producer: WorkerStream | None = None
    transfer_id: str = ""


class WorkerStream(StreamState):
    """One stream on one worker: receives its deltas, and holds its charge until it has ended.

    It forgets its attempt when it is closed. As a cycle the two would keep all objects of each
    request until a garbage collection, which then stops the router for 0.4 s.
    """

    __slots__ = ("_attempt", "_charge", "_fleet", "_prefilling", "_stream_id", "member")

    def __init__(self, attempt: Attempt, phase: Phase, charge: Charge) -> None:
        super().__init__(phase, charge.member.worker_id, charge.member.info.role)
        self.member = charge.member
        self.cause = attempt.answer.cause
        self._attempt: Attempt | None = attempt
        self._fleet = attempt.fleet
        self._charge = charge
        self._prefilling = True
        self._stream_id: int | None = None

    def submit(self, command: w.Command) -> None:
        """Send the request to the worker. A worker that does not take it has failed."""
        if not self.open or self._attempt is None or self._attempt.handoff.ended:
            return
        if self.member.lost:
            self.on_lost(Unavailable(f"worker {self.worker_id} is gone"))
            return
        try:
            self._stream_id = self._fleet.link(self.member).submit(command, self)
        except PdserveError as error:
            self.on_lost(error)

    def on_token(self, token_id: int, text: str) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        if self._prefilling or not attempt.handoff.accepts(self, token_id):
            self.on_delta(StreamDelta(0, (token_id,), text))
        else:
            attempt.write(AnswerDelta((token_id,), text, index=attempt.answer.index))

    def on_delta(self, delta: StreamDelta) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        if self._prefilling:
            self._prefilling = False
            if self._charge.prefilled():
                self._fleet.capacity_changed()
            if delta.error is None:
                self._fleet.succeeded(self.member)
            if delta.token_ids and self.phase is not Phase.PREFILL:
                attempt.note_kv_worker(self.member)
        if delta.finish_reason is not None:
            self._charge.release()
            if (report := delta.report) is not None:
                self.member.settled(report.prefill_busy_s + report.decode_busy_s)
            if delta.error is not None and delta.error.code == WorkerFailed.code:
                self._fleet.failed(self.member, delta.error.message)
            if self.phase is Phase.DECODE:
                attempt.judge_pair(delta)
        attempt.perform(attempt.handoff.on_delta(self, delta))

    def on_lost(self, error: PdserveError) -> None:
        self._charge.release()
        if self._attempt is not None:
            self._attempt.perform(self._attempt.handoff.on_lost(self, error))

    def export(self, transfer_id: str) -> None:
        """Ask the worker to end the stream and to keep its KV for `transfer_id`."""
        if self._stream_id is None or self.member.lost:
            return  # `on_lost` follows
        try:
            self._fleet.link(self.member).export(self._stream_id, transfer_id)
        except PdserveError as error:
            self.on_lost(error)

    def close(self, reason: str) -> None:
        """End the stream, and free the KV that it holds. `reason` says why no answer needs its
        work."""
        self._charge.release()
        if (self.open or self.holds_kv) and self._stream_id is not None and not self.member.lost:
            link = self._fleet.link(self.member)
            link.cancel(self._stream_id, reason, ended=self.holds_kv)
        self.open = self.holds_kv = False
        self._attempt = None


class Attempt:
    """The streams of one attempt. A context manager: leaving it ends what is still open.

    With `moved` it continues with the KV of a stream that another attempt exported.
    """

    def __init__(
        self,
        fleet: Fleet,
        request: GenerateRequest,
        reservation: Reservation,
        answer: Answer,
        moved: Moved | None = None,
        *,
        is_probe: bool = False,
    ) -> None:
        self.fleet, self.answer, self.reservation = fleet, answer, reservation
        self._request, self._is_probe = request, is_probe
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Finished | Failed | Moved] = self._loop.create_future()
        self._kept: Finished | Failed | Moved | None = None  # the end, once it was returned
        self._leaving: Moved | None = None  # while a stream is exported
        self._timers: list[asyncio.TimerHandle] = []
        self._transfer_id = "" if moved is None else moved.transfer_id
        self._producer = None if moved is None else moved.producer
        self._prefill: WorkerStream | None = None
        style = HandoffStyle.CONCURRENT
        if reservation.prefill_charge is not None:
            self._transfer_id = secrets.token_hex(16)
            self._prefill = WorkerStream(self, Phase.PREFILL, reservation.prefill_charge)
            answer.streams.append(self._prefill)
            if (kv := self._prefill.member.info.kv) is not None:
                style = kv.handoff
        phase = Phase.AGGREGATED if reservation.pair is None else Phase.DECODE
        self._decode = WorkerStream(self, phase, reservation.decode_charge)
        answer.streams.append(self._decode)
        self.handoff = Handoff(
            answer.max_tokens, answer.tokens, self._decode, self._prefill, self._producer, style
        )

    def __enter__(self) -> Self:
        resume = tuple(self.answer.tokens)
        if (deadline := self._request.deadline) is not None:
            self._timers.append(self._loop.call_at(deadline, self._expire))
        if self._producer is not None:
            self._submit_decode(self._producer, resume, live=True)
        elif self._prefill is None:
            command = self._command(resume)
            if self._decode.role is Role.POOLING:
                pooling = w.PoolingPhase(second_text_at=self._request.second_text_at)
                command.submit.pooling.CopyFrom(pooling)
            else:
                command.submit.aggregated.SetInParent()
            self._decode.submit(command)
        else:
            if self.handoff.style is HandoffStyle.CONCURRENT:
                self._submit_decode(self._prefill, resume)
            command = self._command(resume)
            command.submit.prefill.transfer_id = self._transfer_id
            self._prefill.submit(command)
        return self

    def __exit__(self, *_: object) -> None:
        self.handoff.ended = True
        for timer in self._timers:
            timer.cancel()
        end = self._end.result() if self._end.done() and not self._end.cancelled() else None
        kept = self._kept.producer if isinstance(self._kept, Moved) else None
        for moved in (end, self._leaving):
            if isinstance(moved, Moved) and moved is not self._kept:
                moved.reservation.release()
        reason = Cancelled.code
        if end is not None:
            reason = MOVED if isinstance(end, Moved) else _UNNEEDED
            reason = end.error.code if isinstance(end, Failed) else reason
        for stream in (self._decode, self._prefill, self._producer):
            if stream is not None and stream is not kept:
                stream.close(reason)
        self.reservation.release()

    def _command(self, resume: Sequence[int]) -> w.Command:
        """Return a command to continue after `resume`, without its phase."""
        command, request = w.Command(), self._request
        submit = command.submit
        submit.request_id = request.request_id
        submit.prompt_token_ids.extend(request.prompt_token_ids)
        submit.resume_token_ids.extend(resume)
        submit.traceparent = request.traceparent
        submit.adapter = request.adapter_key
        submit.cache_salt = request.cache_salt
        submit.probe = self._is_probe
        if (gate := request.reasoning_gate) is not None:
            submit.reasoning_gate.parser = gate.parser
            submit.reasoning_gate.kwargs_json = gate.kwargs_json
        submit.sampling.CopyFrom(wire.sampling_to_pb(request.sampling))
        return command

    def _submit_decode(
        self,
        producer: WorkerStream,
        resume: Sequence[int],
        *,
        kv_handle: bytes = b"",
        live: bool = False,
    ) -> None:
        """Submit decode, which fetches KV from `producer` and continues after `resume`.

        With a sequential handoff the last of `resume` is the token of prefill, and `kv_handle` its
        KV. A `live` producer has decoded all of `resume`.
        """
        info = producer.member.info
        assert info.kv is not None, "workers without KV are not paired"
        command = self._command(resume)
        decode = command.submit.decode
        decode.transfer_id = self._transfer_id
        decode.producer_addresses.extend(info.kv.addresses)
        decode.producer_instance_id = info.instance_id
        decode.kv_handle = kv_handle
        decode.live = live
        self._decode.submit(command)

    async def pump(self) -> Finished | Failed | Moved:
        """Write the answer until the attempt ends, at the deadline at the latest; return how."""
        self._kept = await self._end
        return self._kept

    def _expire(self) -> None:
        self._fail(deadline_passed(self.answer))

    def write(self, delta: AnswerDelta) -> None:
        """Send a delta to the client; end the attempt if it does not read."""
        if not self.answer.out.write(delta):
            self._fail(Cancelled("the client does not read its answer"))

    def _fail(self, error: PdserveError) -> None:
        """End the attempt for a reason that no worker has."""
        self.handoff.ended = True
        self.perform((Failed(self._decode, error),))

    def perform(self, actions: Iterable[Action]) -> None:
        """Do what the handoff decided."""
        for action in actions:
            if self._end.done():
                return
            match action:
                case StreamDelta():
                    self._note_first_token(action)
                    out = AnswerDelta(action.token_ids, action.text, action.logprobs)
                    out.index = self.answer.index
                    out.prompt_logprobs = action.prompt_logprobs
                    self.write(out)
                case SubmitDecode(kv_handle):
                    assert self._prefill is not None, "decode follows prefill"
                    self._submit_decode(self._prefill, self.answer.tokens, kv_handle=kv_handle)
                case Finished(delta):
                    self._note_first_token(delta)
                    # An answer that ends with prefill's token leaves the KV there.
                    self.note_kv_worker((self._prefill or self._decode).member)
                    self._end.set_result(action)
                case Exported():
                    leaving, self._leaving = self._leaving, None
                    assert leaving is not None, "a stream is exported when asked to"
                    self._end.set_result(leaving)
                case Failed():
                    self._end.set_result(action)

    def _note_first_token(self, delta: StreamDelta) -> None:
        answer = self.answer
        if answer.first_token_at is None and delta.token_ids:
            answer.first_token_at = self._loop.time()
            answer.first_token_stream = self.handoff.prefill or self.handoff.decode

    def note_kv_worker(self, member: Member) -> None:
        """A worker has the KV of the prompt in its cache now."""
        kv_worker = self.answer.kv_worker
        if kv_worker is not None and not kv_worker.done():
            kv_worker.set_result(member)

    def judge_pair(self, last: StreamDelta) -> None:
        """Tell the outlier ejection whether KV arrived between the two workers."""
        pair, error = self.reservation.pair, last.error
        if pair is None:
            return
        outliers, now = self.fleet.outliers, self.fleet.now()
        if error is not None and error.code == TransferCorrupted.code:
            outliers.corrupted(pair, now, error.message)
            logger.warning("KV from worker %s to %s: %s", *pair, error.message)
        elif error is not None and error.code == TransferFailed.code:
            if outliers.failed(pair, now, error.message):
                logger.warning("workers %s and %s are ejected: %s", *pair, error.message)
        elif last.report is not None and last.report.transfer:
            outliers.succeeded(pair)

    def export(self, stream: StreamState, reservation: Reservation) -> None:
        """Start to move `stream`, which can be exported, to `reservation` together with its KV."""
        self._leaving = Moved(reservation, self._decode, secrets.token_hex(16))
        give_up = lambda: self.perform(self.handoff.on_export_timeout())  # noqa: E731
        self._timers.append(self._loop.call_later(EXPORT_TIMEOUT_S, give_up))
        self.handoff.export(stream)
        self._decode.export(self._leaving.transfer_id)

    def leave(self, reservation: Reservation) -> None:
        """End the attempt; the next one uses `reservation`."""
        self.handoff.ended = True
        self._end.set_result(Moved(reservation))
