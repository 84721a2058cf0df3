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

from pdserve import deadline as deadlines
from pdserve import wire
from pdserve.errors import (
    Cancelled,
    PdserveError,
    TransferCorrupted,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)
from pdserve.types import HandoffStyle, StreamDelta
from pdserve.v1 import worker_pb2 as w
from router.answer import AnswerDelta
from router.handoff import (
    Deliver,
    Exported,
    Failed,
    Finished,
    Handoff,
    Phase,
    StreamState,
    SubmitDecode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from pdserve.types import GenerateRequest
    from router.answer import Out
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.handoff import Action
    from router.placer import Charge, Reservation

logger = logging.getLogger(__name__)

# Seconds for a worker to export a request: one engine step, and the way there and back.
EXPORT_TIMEOUT_S = 5.0
# A deadline that has just passed must not be sent as 0, which means none.
MIN_DEADLINE_S = 0.001


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
    streams: list[StreamState] = field(default_factory=list)
    first_token_stream: StreamState | None = None
    first_token_at: float | None = None
    kv_worker: asyncio.Future[Member] | None = None

    @property
    def prefill_worker(self) -> str:
        """The worker that prefilled last for another, "" if none did."""
        prefills = (x for x in reversed(self.streams) if x.phase is Phase.PREFILL)
        return next((x.worker_id for x in prefills), "")


@dataclass(frozen=True, slots=True)
class Moved:
    """The request leaves a healthy worker and continues with `reservation`; with a `producer` it
    takes its KV along, under `transfer_id`."""

    reservation: Reservation
    producer: WorkerStream | None = None
    transfer_id: str = ""


AttemptEnd = Finished | Failed | Moved


class WorkerStream:
    """One stream on one worker: receives its deltas, and holds its charge until it has ended."""

    __slots__ = ("_attempt", "_charge", "_fleet", "_prefilling", "_stream_id", "member", "state")

    def __init__(
        self, attempt: Attempt, fleet: Fleet, phase: Phase, member: Member, charge: Charge
    ) -> None:
        self.state = StreamState(phase, member.worker_id, member.info.role)
        self.member = member
        self._attempt = attempt
        self._fleet = fleet
        self._charge = charge
        self._prefilling = True
        self._stream_id: int | None = None

    def submit(self, command: w.Command) -> None:
        """Send the request to the worker. A worker that does not take it has failed."""
        if not self.state.open or self._attempt.handoff.ended:
            return
        if self.member.lost:
            self.on_lost(Unavailable(f"worker {self.member.worker_id} is gone"))
            return
        try:
            self._stream_id = self._fleet.link(self.member).submit(command, self)
        except PdserveError as error:
            self.on_lost(error)
        else:
            self._fleet.placed(self.member)

    def on_token(self, token_id: int, text: str) -> None:
        if self._prefilling or not self._attempt.handoff.accepts(self.state, token_id):
            self.on_delta(StreamDelta(0, (token_id,), text))
        else:
            answer = self._attempt.answer
            self._attempt.write(AnswerDelta((token_id,), text, index=answer.index))

    def on_delta(self, delta: StreamDelta) -> None:
        if self._prefilling:
            self._on_first(delta)
        if delta.finish_reason is not None:
            self._charge.release()
            if delta.error is not None and delta.error.code == WorkerFailed.code:
                self._fleet.failed(self.member, delta.error.message)
            if self.state.phase is Phase.DECODE:
                self._attempt.judge_pair(delta)
        self._attempt.perform(self._attempt.handoff.on_delta(self.state, delta))

    def _on_first(self, delta: StreamDelta) -> None:
        self._prefilling = False
        if self._charge.prefilled():
            self._fleet.capacity_changed()
        if delta.error is None:
            self._fleet.succeeded(self.member)
        kv_worker = self._attempt.answer.kv_worker
        if kv_worker is None or kv_worker.done() or not delta.token_ids:
            return
        if self.state.phase is not Phase.PREFILL:
            kv_worker.set_result(self.member)

    def on_lost(self, error: PdserveError) -> None:
        self._charge.release()
        self._attempt.perform(self._attempt.handoff.on_lost(self.state, error))

    def export(self, transfer_id: str) -> None:
        """Ask the worker to end the stream and to keep its KV for `transfer_id`."""
        if self._stream_id is None or self.member.lost:
            return  # `on_lost` follows
        try:
            self._fleet.link(self.member).export(self._stream_id, transfer_id)
        except PdserveError as error:
            self.on_lost(error)

    def close(self) -> None:
        """End the stream, and free the KV that it holds."""
        self._charge.release()
        is_needed, self.state.open = self.state.open or self.state.holds_kv, False
        if is_needed and self._stream_id is not None and not self.member.lost:
            link = self._fleet.link(self.member)
            link.cancel(self._stream_id, ended=self.state.holds_kv)
        self.state.holds_kv = False


class Attempt:
    """The streams of one attempt. A context manager: leaving it ends what is still open.

    With `moved` it continues with the KV of a stream that another attempt exported.
    """

    def __init__(
        self,
        fleet: Fleet,
        commands: CommandBuilder,
        reservation: Reservation,
        answer: Answer,
        moved: Moved | None = None,
    ) -> None:
        self.answer = answer
        self.reservation = reservation
        self._fleet = fleet
        self._commands = commands
        self._moved = moved
        self._transfer_id = secrets.token_hex(16)
        self._end: asyncio.Future[AttemptEnd] = asyncio.get_running_loop().create_future()
        self._is_taken = False  # by whoever pumps
        self._leaving: Moved | None = None  # while a stream is exported
        self._export_timer: asyncio.TimerHandle | None = None
        prefill, decode = reservation.prefill, reservation.decode
        self._prefill: WorkerStream | None = None
        self._producer = None if moved is None else moved.producer
        style = HandoffStyle.CONCURRENT
        phase = Phase.AGGREGATED if reservation.pair is None else Phase.DECODE
        if prefill is not None and reservation.prefill_charge is not None:
            self._prefill = WorkerStream(
                self, fleet, Phase.PREFILL, prefill, reservation.prefill_charge
            )
            answer.streams.append(self._prefill.state)
            if prefill.info.kv is not None:
                style = prefill.info.kv.handoff
        self._decode = WorkerStream(self, fleet, phase, decode, reservation.decode_charge)
        answer.streams.append(self._decode.state)
        self.handoff = Handoff(
            answer.max_tokens,
            answer.tokens,
            self._decode.state,
            None if self._prefill is None else self._prefill.state,
            None if self._producer is None else self._producer.state,
            style,
        )

    def __enter__(self) -> Self:
        resume = tuple(self.answer.tokens)
        decode, prefill, producer = self._decode, self._prefill, self._producer
        if producer is not None and self._moved is not None:
            command = self._commands.decode(
                self._moved.transfer_id, producer.member, resume=resume, live=True
            )
            decode.submit(command)
        elif prefill is None:
            decode.submit(self._commands.aggregated(resume))
        else:
            if self.handoff.style is HandoffStyle.CONCURRENT:
                decode.submit(
                    self._commands.decode(self._transfer_id, prefill.member, resume=resume)
                )
            prefill.submit(self._commands.prefill(self._transfer_id, resume))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.handoff.ended = True
        if self._export_timer is not None:
            self._export_timer.cancel()
        end = self._end.result() if self._end.done() and not self._end.cancelled() else None
        kept = end if isinstance(end, Moved) and self._is_taken else None
        for moved in (end, self._leaving):
            if isinstance(moved, Moved) and moved is not kept:
                moved.reservation.release()
        for stream in (self._decode, self._prefill, self._producer):
            if stream is not None and (kept is None or stream is not kept.producer):
                stream.close()
        self.reservation.release()

    async def pump(self) -> AttemptEnd:
        """Write the answer until the attempt ends; return how. Raises Cancelled if the client does
        not read."""
        end = await self._end
        self._is_taken = True
        return end

    def write(self, delta: AnswerDelta) -> None:
        """Send a delta to the client; end the attempt if it does not read."""
        if not self.answer.out.write(delta):
            self.handoff.ended = True
            error = Cancelled("the client does not read its answer")
            self.perform((Failed(self._decode.state, error),))

    def perform(self, actions: Iterable[Action]) -> None:
        """Do what the handoff decided."""
        for action in actions:
            if self._end.done():
                return
            if type(action) is Deliver:
                self._deliver(action.delta)
            elif type(action) is SubmitDecode:
                self._submit_decode(action.kv_handle)
            elif type(action) is Exported:
                leaving, self._leaving = self._leaving, None
                assert leaving is not None, "a stream is exported when asked to"
                self._end.set_result(leaving)
            elif isinstance(action, Finished):
                self._note_first_token(action.delta)
                self._note_kv_worker()
                self._end.set_result(action)
            elif isinstance(action, Failed):
                self._end.set_result(action)

    def _deliver(self, delta: StreamDelta) -> None:
        self._note_first_token(delta)
        index = self.answer.index
        self.write(AnswerDelta(delta.token_ids, delta.text, delta.logprobs, index=index))

    def _note_first_token(self, delta: StreamDelta) -> None:
        answer = self.answer
        if answer.first_token_at is not None or not delta.token_ids:
            return
        answer.first_token_at = asyncio.get_running_loop().time()
        answer.first_token_stream = self.handoff.prefill or self.handoff.decode

    def _note_kv_worker(self) -> None:
        """An answer that ends with prefill's token leaves the KV there."""
        kv_worker = self.answer.kv_worker
        if kv_worker is not None and not kv_worker.done():
            kv_worker.set_result((self._prefill or self._decode).member)

    def _submit_decode(self, kv_handle: bytes) -> None:
        assert self._prefill is not None, "decode follows prefill"
        self._decode.submit(
            self._commands.decode(
                self._transfer_id,
                self._prefill.member,
                resume=self.answer.tokens,
                kv_handle=kv_handle,
            )
        )

    def judge_pair(self, last: StreamDelta) -> None:
        """Tell the outlier ejection whether KV arrived between the two workers."""
        pair = self.reservation.pair
        if pair is None:
            return
        outliers, now = self._fleet.outliers, self._fleet.now()
        error = last.error
        code = "" if error is None else error.code
        if error is not None and code == TransferCorrupted.code:
            outliers.corrupted(pair, now, error.message)
            logger.warning("KV from worker %s to %s: %s", *pair, error.message)
        elif error is not None and code == TransferFailed.code:
            if outliers.failed(pair, now, error.message):
                logger.warning("workers %s and %s are ejected: %s", *pair, error.message)
        elif last.report is not None and last.report.transfer:
            outliers.succeeded(pair, now, is_trial=self.reservation.is_trial)

    def export(self, worker_id: str, reserve: Callable[[], Reservation]) -> bool:
        """Start to move to what `reserve` returns, together with the KV on `worker_id`. Return
        False if there is none to take. Raises what `reserve` raises."""
        state = self.handoff.exportable(worker_id)
        if state is None:
            return False
        self._leaving = Moved(reserve(), self._decode, secrets.token_hex(16))
        loop = asyncio.get_running_loop()
        self._export_timer = loop.call_later(EXPORT_TIMEOUT_S, self._on_export_timeout)
        self.handoff.export(state)
        self._decode.export(self._leaving.transfer_id)
        return True

    def _on_export_timeout(self) -> None:
        self.perform(self.handoff.on_export_timeout())

    def leave(self, reservation: Reservation) -> None:
        """End the attempt; the next one uses `reservation`."""
        self.handoff.ended = True
        self._end.set_result(Moved(reservation))


class CommandBuilder:
    """Builds the commands of one request. State: the first command, whose prompt is copied."""

    __slots__ = ("_base", "_deadline", "_is_probe", "_request")

    def __init__(
        self, request: GenerateRequest, deadline: float | None, *, is_probe: bool = False
    ) -> None:
        self._deadline = deadline
        self._is_probe = is_probe
        self._request = request
        self._base: w.Submit | None = None

    def prefill(self, transfer_id: str, resume: Sequence[int] = ()) -> w.Command:
        """Compute the KV and the token after `resume`, and hold the blocks for `transfer_id`."""
        command = self._start(resume)
        command.submit.prefill.transfer_id = transfer_id
        return command

    def decode(
        self,
        transfer_id: str,
        producer: Member,
        *,
        resume: Sequence[int] = (),
        kv_handle: bytes = b"",
        live: bool = False,
    ) -> w.Command:
        """Fetch KV from `producer` and continue after `resume`.

        With a sequential handoff the last of `resume` is the token of prefill, and `kv_handle` its
        KV. A `live` producer has decoded all of `resume`.
        """
        assert producer.info.kv is not None, "workers without KV are not paired"
        command = self._start(resume)
        decode = command.submit.decode
        decode.transfer_id = transfer_id
        decode.producer_addresses.extend(producer.info.kv.addresses)
        decode.producer_instance_id = producer.info.instance_id
        decode.kv_handle = kv_handle
        decode.live = live
        return command

    def aggregated(self, resume: Sequence[int] = ()) -> w.Command:
        """Do both phases, and continue after `resume`."""
        command = self._start(resume)
        command.submit.aggregated.SetInParent()
        return command

    def _start(self, resume: Sequence[int]) -> w.Command:
        command = w.Command()
        submit = command.submit
        if self._base is None:
            request = self._request
            submit.request_id = request.request_id
            submit.prompt_token_ids.extend(request.prompt_token_ids)
            submit.traceparent = request.traceparent
            submit.probe = self._is_probe
            submit.sampling.CopyFrom(wire.sampling_to_pb(request.sampling))
            self._base = submit
        else:
            submit.CopyFrom(self._base)
            submit.ClearField("phase")
            submit.ClearField("resume_token_ids")
        submit.resume_token_ids.extend(resume)
        left_s = deadlines.remaining(self._deadline)
        if left_s is not None:
            submit.deadline_s = max(left_s, MIN_DEADLINE_S)
        return command
