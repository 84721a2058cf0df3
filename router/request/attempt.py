"""One attempt to answer a request: streams on one or two workers, and the tokens to the client.

Everything here runs synchronously, in the reader of a worker's connection or in the request's own
task. A token costs one look-up in the connection and one call that ends in `out.write`; a queue
between them would cost a task switch for each token.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from pdserve import wire
from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDied,
    InternalError,
    PdserveError,
    TransferCorrupted,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)
from pdserve.types import HandoffStyle, Role, StreamDelta
from pdserve.v1 import worker_pb2 as w
from router.request.answer import AnswerDelta
from router.request.handoff import (
    Exported,
    Failed,
    Finished,
    Handoff,
    Side,
    SubmitDecode,
)
from router.request.retry import MOVED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.types import GenerateRequest, PhaseReport
    from router.fleet.connection import Links
    from router.fleet.health import Pair
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.request.answer import Out
    from router.request.handoff import Action
    from router.request.placer import Charge, Reservation

logger = logging.getLogger(__name__)

# Cancel reason for work that is still running when the answer is complete.
_UNNEEDED = "unneeded"
_ENGINE_FAILURES = (WorkerFailed.code, EngineDied.code)


@dataclass(slots=True, eq=False)
class WorkerStream:
    """One stream on one worker, and what came of it.

    `pair`: the ids of the workers that exchange KV for it. `cause`: why the previous attempt ended,
    "" in the first attempt. `stream_id`: its id on the connection, None if nothing was sent.
    `died`: the worker or its engine died with the request in flight; `engine_died`: the worker
    reported that its engine did.
    """

    side: Side
    charge: Charge
    pair: Pair | None
    cause: str
    stream_id: int | None = None
    is_prefilling: bool = True
    report: PhaseReport | None = None
    died: bool = False
    engine_died: bool = False

    @property
    def member(self) -> Member:
        return self.charge.member

    @property
    def worker_id(self) -> str:
        return self.member.worker_id

    @property
    def role(self) -> Role:
        return self.member.info.role


@dataclass(slots=True, eq=False)
class Fetched:
    """Cached KV that was copied from the worker `holder` before the prompt was computed: `tokens`
    in `blocks`, none if the copy failed."""

    holder: str
    streams: list[WorkerStream]
    seconds: float
    tokens: int = 0
    blocks: int = 0


@dataclass(slots=True, eq=False)
class Answer:
    """Tokens and streams of one answer, over all attempts.

    `tokens` starts with the tokens that the client resumes from; only attempts add to it. `streams`
    has every stream opened, in order. `kv_worker` is set only for parallel sampling; its result is
    the worker that has the prompt's KV cached. `fetched`: by the last attempt that copied KV.
    """

    out: Out
    max_tokens: int
    tokens: list[int]
    index: int = 0
    kv_worker: asyncio.Future[Member] | None = None
    streams: list[WorkerStream] = field(default_factory=list)
    first_token_stream: WorkerStream | None = None
    first_token_at: float | None = None
    cause: str = ""  # why the last attempt ended without the complete answer
    fetched: Fetched | None = None

    @property
    def cached_tokens(self) -> int:
        first = self.first_token_stream
        return 0 if first is None or first.report is None else first.report.cached_tokens


def deadline_passed(answer: Answer) -> DeadlineExceeded:
    return DeadlineExceeded(f"the deadline passed after {len(answer.tokens)} tokens")


class Moved(Struct, frozen=True, eq=False):
    """End of an attempt that leaves a healthy worker. The request continues with `reservation`. If
    `producer` is set, its KV moves too, under `transfer_id`."""

    reservation: Reservation
    producer: WorkerStream | None = None
    transfer_id: str = ""


class Attempt:
    """The streams of one attempt. `run` it once.

    Connections call `on_token`, `on_delta` and `on_lost` with the stream, until it ends. Streams do
    not know their attempt, so all objects of a request are freed without a garbage collection,
    which stops the router for 0.4 s.

    With `moved`, decode continues with the KV of a stream that the previous attempt exported.
    """

    def __init__(
        self,
        fleet: Fleet,
        links: Links,
        request: GenerateRequest,
        reservation: Reservation,
        answer: Answer,
        moved: Moved | None = None,
        *,
        is_probe: bool = False,
        min_cached_tokens: int = 0,
    ) -> None:
        """`min_cached_tokens`: fail if prefill has fewer tokens of the prompt cached."""
        self._min_cached_tokens = min_cached_tokens
        self._fleet, self._links = fleet, links
        self._answer, self._reservation = answer, reservation
        self._request, self._is_probe = request, is_probe
        self._media = request.media  # until it is sent
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Finished | Failed | Moved] = self._loop.create_future()
        self._leaving: Moved | None = None  # the end of an attempt that leaves its worker
        self._timers: list[asyncio.TimerHandle] = []
        self._previous = None if moved is None else moved.producer
        self._transfer_id = "" if moved is None else moved.transfer_id
        pair, cause, style = reservation.pair, answer.cause, HandoffStyle.CONCURRENT
        self._prefill: WorkerStream | None = None
        self._encode: WorkerStream | None = None
        if reservation.encode_charge is not None:
            self._encode = WorkerStream(Side.ENCODE, reservation.encode_charge, None, cause)
            answer.streams.append(self._encode)
        if reservation.prefill_charge is not None:
            self._transfer_id = secrets.token_hex(16)
            self._prefill = WorkerStream(Side.PREFILL, reservation.prefill_charge, pair, cause)
            answer.streams.append(self._prefill)
            if (kv := self._prefill.member.info.kv) is not None:
                style = kv.handoff
        self._decode = WorkerStream(Side.DECODE, reservation.decode_charge, pair, cause)
        answer.streams.append(self._decode)
        self._first = self._prefill or self._decode  # computes the prompt, sends the first token
        self._handoff = Handoff(
            answer.max_tokens,
            len(answer.tokens),
            self._decode.worker_id,
            None if self._prefill is None else self._prefill.worker_id,
            style,
            None if self._previous is None else Side.PREVIOUS,
        )

    async def run(self) -> Finished | Failed | Moved:
        """Send the request and wait until the attempt ends, at the latest at the request's
        deadline. Return its end. All streams are then closed, except the producer of a Moved."""
        end: Finished | Failed | Moved | None = None
        try:
            if self._request.media and self._previous is None:
                await self._turn_of_images()
            self._send()
            self._media = ()
            end = await self._end
            return end
        finally:
            self._close(end)

    async def _turn_of_images(self) -> None:
        """Wait until the connection can take the images of the prompt, and read them if memory had
        no room. Give up at the deadline."""
        link, read = self._links.get(self._first.member), self._request.read_media
        try:
            async with asyncio.timeout_at(self._request.deadline):
                if link is not None:
                    await link.drained()
                if read is not None:
                    self._media = await read()
        except TimeoutError:
            self._expire()
        except OSError as error:
            logger.error("the images of request %s: %s", self._request.request_id, error)
            self._stop(InternalError("the router's disk failed: the images are lost"))

    def _send(self) -> None:
        resume = tuple(self._answer.tokens)
        if (deadline := self._request.deadline) is not None:
            # One timer for the attempt is cheaper than a timeout around each wait.
            self._timers.append(self._loop.call_at(deadline, self._expire))
        if self._previous is not None:
            self._submit_decode(self._previous, resume, live=True)
        elif self._prefill is None:
            command = self._command(resume)
            if self._decode.role is Role.POOLING:
                pooling = w.PoolingPhase(second_text_at=self._request.second_text_at)
                command.submit.pooling.CopyFrom(pooling)
            elif self._decode.role is Role.ENCODE:
                command.submit.encode.transfer_id = secrets.token_hex(16)  # a health check
            else:
                command.submit.aggregated.SetInParent()
                self._set_next_turn(command.submit)
            self._submit(self._decode, command)
        else:
            if self._handoff.style is HandoffStyle.CONCURRENT:
                self._submit_decode(self._prefill, resume)
            command = self._command(resume)
            command.submit.prefill.transfer_id = self._transfer_id
            command.submit.prefill.min_cached_tokens = self._min_cached_tokens
            if self._encode is not None and (source := self._submit_encode(self._encode)):
                command.submit.prefill.embeddings.CopyFrom(source)
            self._submit(self._prefill, command)

    def _close(self, end: Finished | Failed | Moved | None) -> None:
        """End all streams and free their KV. `end` is None if the caller was cancelled."""
        self._handoff.stop()
        for timer in self._timers:
            timer.cancel()
        if self._leaving is not None and end is not self._leaving:
            self._leaving.reservation.release()
        reason, kept = _UNNEEDED, None
        match end:
            case None:
                reason = Cancelled.code
            case Failed():
                reason = end.error.code
            case Moved():
                reason, kept = MOVED, end.producer
        for stream in (self._decode, self._prefill):
            if stream is not None and stream is not kept:
                self._close_stream(stream, stream.side, reason)
        if self._previous is not None:
            self._close_stream(self._previous, Side.PREVIOUS, reason)
        if (encode := self._encode) is not None and encode.is_prefilling:
            encode.charge.release()
            if encode.stream_id is not None and not encode.member.lost:
                self._links[encode.member].cancel(encode.stream_id, reason)
        self._reservation.release()

    def _close_stream(self, stream: WorkerStream, side: Side, reason: str) -> None:
        """End a stream and free its KV. `reason` is the waste reason of the worker's usage."""
        stream.charge.release()
        # A prefill or exported stream that has ended still holds KV on its worker under a lease.
        holds_kv, member = self._handoff.kv_held_by is side, stream.member
        # A prefill worker may die while it sends the KV, after its stream has ended.
        stream.died |= holds_kv and not (member.attached or member.has_left)
        if not (holds_kv or self._handoff.is_open(side)) or member.lost:
            return
        if stream.stream_id is not None:
            self._links[member].cancel(stream.stream_id, reason, ended=holds_kv)

    # -- Events

    def on_token(self, stream: WorkerStream, token_id: int, text: str) -> None:
        # Fast path: most tokens change no state, so they need no StreamDelta and no action.
        if stream.is_prefilling or not self._handoff.accepts(stream.side):
            self.on_delta(stream, StreamDelta(0, (token_id,), text))
        else:
            answer = self._answer
            answer.tokens.append(token_id)
            self._write(AnswerDelta((token_id,), text, index=answer.index))

    def on_delta(self, stream: WorkerStream, delta: StreamDelta) -> None:
        if stream.side is Side.ENCODE:
            stream.is_prefilling = False
            self._on_last(stream, delta)
            if delta.error is not None:
                name, message = stream.worker_id, delta.error.message
                logger.info("worker %s did not encode, prefill does: %s", name, message)
            return
        if stream.is_prefilling:
            # The first delta means that the prompt is computed, or that it never will be.
            stream.is_prefilling = False
            if stream is self._first and self._reservation.prefilled():
                self._fleet.capacity_changed()
            if delta.error is None:
                stream.member.breaker.success()
            if delta.token_ids and stream.side is not Side.PREFILL:
                self._note_kv_worker(stream.member)
        if delta.finish_reason is not None:
            self._on_last(stream, delta)
        self._perform(self._handoff.on_delta(stream.side, delta))

    def _on_last(self, stream: WorkerStream, delta: StreamDelta) -> None:
        """Release the capacity of a stream that has ended, and report its worker's health."""
        stream.charge.release()
        stream.report = delta.report
        if (report := delta.report) is not None:
            stream.member.placed.ended_s += report.prefill_busy_s + report.decode_busy_s
        if delta.error is not None and delta.error.code in _ENGINE_FAILURES:
            stream.member.failed(self._fleet.now(), delta.error.message)
            if delta.error.code == EngineDied.code:
                stream.died = stream.engine_died = True
                self._fleet.engine_died(stream.member)
        if stream.side is Side.PREFILL and self._encode is not None:
            self._judge_encoder(self._encode, stream, delta)
        if stream.side is Side.DECODE and stream.pair is not None:
            self._judge_pair(stream.pair, delta)

    def on_lost(self, stream: WorkerStream, error: PdserveError) -> None:
        stream.charge.release()
        # Without a stream id the worker was not sent anything.
        was_sent, left = stream.stream_id is not None, stream.member.has_left
        stream.died = was_sent and not left and isinstance(error, WorkerFailed)
        if stream.side is Side.ENCODE:
            stream.is_prefilling = False
            return
        self._perform(self._handoff.on_lost(stream.side, error))

    def _expire(self) -> None:
        self._stop(deadline_passed(self._answer))

    def _on_export_timeout(self) -> None:
        self._perform(self._handoff.on_export_timeout())

    # -- Commands to workers

    def _submit(self, stream: WorkerStream, command: w.Command) -> None:
        """Send the request to a worker. An error of the connection counts as its loss."""
        if self._handoff.ended or not self._handoff.is_open(stream.side):
            return
        if stream.member.lost:
            self.on_lost(stream, Unavailable(f"worker {stream.worker_id} is gone"))
            return
        try:
            self._send_to(stream, command)
        except PdserveError as error:
            # A copy, because the error's traceback refers to this attempt.
            self.on_lost(stream, copy(error))

    def _send_to(self, stream: WorkerStream, command: w.Command) -> None:
        """Send a submit command with the prompt. Raises PdserveError if the worker cannot be
        reached."""
        prompt = wire.prompt_command(self._request.prompt_token_ids)
        stream.stream_id = self._links[stream.member].submit(command, self, stream, prompt)

    def _submit_encode(self, stream: WorkerStream) -> w.EmbeddingSource | None:
        """Send the images to the encode worker. Return where prefill finds their embeddings; None
        if the worker cannot be reached: prefill then encodes."""
        info, kv = stream.member.info, stream.member.info.kv
        if stream.member.lost or kv is None:
            return None
        request, command = self._request, w.Command()
        submit, transfer_id = command.submit, secrets.token_hex(16)
        submit.request_id, submit.traceparent = request.request_id, request.traceparent
        submit.sampling.max_tokens = 1
        submit.media.extend(map(wire.media_to_pb, self._media))
        submit.encode.transfer_id = transfer_id
        try:
            self._send_to(stream, command)
        except PdserveError as error:
            logger.info("prefill encodes for request %s: %s", request.request_id, error.message)
            return None
        return w.EmbeddingSource(
            transfer_id=transfer_id,
            address=kv.addresses[0],
            instance_id=info.instance_id,
            row_bytes=kv.embedding_bytes,
        )

    def _judge_encoder(
        self, encode: WorkerStream, prefill: WorkerStream, last: StreamDelta
    ) -> None:
        """Report to outlier ejection whether embeddings reached the prefill worker."""
        if encode.report is None or last.error is not None or last.report is None:
            return
        pair, outliers = (encode.worker_id, prefill.worker_id), self._fleet.outliers
        if last.report.fetched_images:
            outliers.succeeded(pair)
        elif outliers.failed(pair, self._fleet.now(), "no embedding arrived"):
            logger.warning("the pair of workers %s and %s is ejected: no embedding arrived", *pair)

    def _command(self, resume: Sequence[int], *, computes: bool = True) -> w.Command:
        """Return a submit command, without its prompt, that continues after `resume`. The caller
        sets its phase. Only a worker that `computes` the prompt gets the data of its images: decode
        takes the KV."""
        command, request = w.Command(), self._request
        submit = command.submit
        submit.request_id = request.request_id
        submit.resume_token_ids.extend(resume)
        submit.traceparent = request.traceparent
        submit.adapter = request.adapter_key
        submit.cache_salt = request.cache_salt
        submit.probe = self._is_probe
        if (gate := request.reasoning_gate) is not None:
            submit.reasoning_gate.parser = gate.parser
            submit.reasoning_gate.kwargs_json = gate.kwargs_json
        submit.sampling.CopyFrom(wire.sampling_to_pb(request.sampling))
        media = self._media if computes else [x.without_data() for x in request.media]
        submit.media.extend(map(wire.media_to_pb, media))
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

        In a sequential handoff the last token of `resume` is the first token, sampled by prefill,
        and `kv_handle` describes the KV of prefill. A `live` producer has decoded all of `resume`.
        """
        info = producer.member.info
        assert info.kv is not None, "workers without KV are not paired"
        command = self._command(resume, computes=False)
        decode = command.submit.decode
        decode.transfer_id = self._transfer_id
        decode.producer_addresses.extend(info.kv.addresses)
        decode.producer_stage_layers.extend(wire.stages_to_pb(info.kv.stage_layers))
        decode.producer_instance_id = info.instance_id
        decode.kv_handle = kv_handle
        decode.live = live
        self._set_next_turn(command.submit)
        self._submit(self._decode, command)

    def _set_next_turn(self, submit: w.Submit) -> None:
        if self._request.session:
            submit.next_turn_s = self._request.next_turn_s

    # -- Results

    def _write(self, delta: AnswerDelta) -> None:
        """Send a delta to the client. Cancel the attempt if the client does not read."""
        if not self._answer.out.write(delta):
            self._stop(Cancelled("the client does not read its answer"))

    def _stop(self, error: PdserveError) -> None:
        """End the attempt with an error that no worker caused."""
        self._handoff.stop()
        self._perform((Failed(Side.DECODE, error),))

    def _perform(self, actions: Iterable[Action]) -> None:
        """Perform the actions that the handoff returned."""
        for action in actions:
            # A write among the actions may have ended the attempt: the client does not read.
            if self._end.done():
                return
            match action:
                case StreamDelta():
                    self._note_first_token(action)
                    self._answer.tokens += action.token_ids
                    out = AnswerDelta(action.token_ids, action.text, action.logprobs)
                    out.index = self._answer.index
                    out.prompt_logprobs = action.prompt_logprobs
                    self._write(out)
                case SubmitDecode(kv_handle):
                    assert self._prefill is not None, "decode follows prefill"
                    self._submit_decode(self._prefill, self._answer.tokens, kv_handle=kv_handle)
                case Finished(delta):
                    self._note_first_token(delta)
                    # The caller writes it, because the last answer has the usage of all.
                    self._answer.tokens += delta.token_ids
                    # An answer that ends with prefill's token leaves the KV there.
                    self._note_kv_worker(self._first.member)
                    self._end.set_result(action)
                case Exported():
                    assert self._leaving is not None, "a stream is exported when asked to"
                    self._end.set_result(self._leaving)
                case Failed():
                    self._end.set_result(action)

    def _note_first_token(self, delta: StreamDelta) -> None:
        answer = self._answer
        if answer.first_token_at is None and delta.token_ids:
            answer.first_token_at = self._loop.time()
            answer.first_token_stream = self._first

    def _note_kv_worker(self, member: Member) -> None:
        """Record that `member` has the prompt's KV in its cache."""
        kv_worker = self._answer.kv_worker
        if kv_worker is not None and not kv_worker.done():
            kv_worker.set_result(member)

    def _judge_pair(self, pair: Pair, last: StreamDelta) -> None:
        """Report to outlier ejection whether the KV transfer of the pair succeeded."""
        error, outliers, now = last.error, self._fleet.outliers, self._fleet.now()
        if error is not None and error.code == TransferCorrupted.code:
            outliers.corrupted(pair, now, error.message)
            logger.warning("KV from worker %s to %s: %s", *pair, error.message)
        elif error is not None and error.code == TransferFailed.code:
            if outliers.failed(pair, now, error.message):
                logger.warning("the pair of workers %s and %s is ejected: %s", *pair, error.message)
        elif last.report is not None and last.report.transfer:
            outliers.succeeded(pair)

    # -- Leaving a worker

    def uses(self, worker_id: str) -> bool:
        """Return True if the attempt uses `worker_id` and can leave it."""
        return self._handoff.uses(worker_id)

    def can_export(self, worker_id: str) -> bool:
        """Return True if `worker_id` decodes and can export the KV of the request."""
        return self._handoff.can_export(worker_id)

    def export(self, reservation: Reservation, timeout_s: float) -> None:
        """Start to move the request with its KV to `reservation`. `can_export` must be True. Give
        up if the worker has not exported it in `timeout_s`."""
        self._leaving = Moved(reservation, self._decode, secrets.token_hex(16))
        self._timers.append(self._loop.call_later(timeout_s, self._on_export_timeout))
        self._handoff.export()
        stream_id, member = self._decode.stream_id, self._decode.member
        if stream_id is None or member.lost:
            return  # the connection calls `on_lost`
        try:
            self._links[member].export(stream_id, self._leaving.transfer_id)
        except PdserveError as error:
            # A copy, because the error's traceback refers to this attempt.
            self.on_lost(self._decode, copy(error))

    def leave(self, reservation: Reservation) -> None:
        """End the attempt without its KV. The next attempt uses `reservation`."""
        self._handoff.stop()
        self._leaving = Moved(reservation)
        self._end.set_result(self._leaving)
