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
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.errors import Cancelled, InternalError, PdserveError, Unavailable
from pdserve.types import StreamDelta
from router.attempt.answer import AnswerDelta, deadline_passed
from router.attempt.handoff import MOVED, Exported, Failed, Finished, Handoff, Side
from router.attempt.specs import SubmitInputs
from router.attempt.streams import Moved, WorkerStream
from router.placement.values import may_hold

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.types import GenerateRequest, ImageData, MediaItem, ModelWeights
    from router.attempt.handoff import Action
    from router.attempt.observer import StreamObserver
    from router.attempt.placer import Reservation
    from router.attempt.specs import StreamSpec
    from router.attempt.streams import Answer
    from router.fleet.member import Member
    from router.fleet.worker_link import Links

logger = logging.getLogger(__name__)

# Cancel reason for work that is still running when the answer is complete.
_UNNEEDED = "unneeded"
_PHASES = (Side.ENCODE, Side.PREFILL, Side.DECODE)


class Attempt:
    """The streams of one attempt. `run` it once.

    Connections call `on_token`, `on_delta` and `on_lost` with the stream, until it ends. Streams
    have no reference to their attempt, so all objects of a request are freed without a garbage
    collection, which stops the router for 0.4 s.
    """

    def __init__(
        self,
        links: Links,
        observer: StreamObserver,
        request: GenerateRequest,
        reservation: Reservation,
        answer: Answer,
        specs: Sequence[StreamSpec],
    ) -> None:
        """`specs`: the streams to open, in the order in which they are sent."""
        self._links, self._observer = links, observer
        self._request, self._reservation = request, reservation
        self._answer, self._specs = answer, specs
        self._media: Sequence[MediaItem] = ()  # with their data, until they are sent
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Finished | Failed | Moved] = loop.create_future()
        self._leaving: Moved | None = None  # set if the attempt leaves its worker
        self._timers: list[asyncio.TimerHandle] = []
        self._streams: dict[Side, WorkerStream] = {}
        previous: WorkerStream | None = None
        for spec in specs:
            side, charge, can_fail = spec.side, spec.charge, spec.is_optional
            stream = WorkerStream(side, charge.member, charge, spec.pair, answer.cause, can_fail)
            stream.from_token = len(answer.tokens)
            self._streams[side] = stream
            previous = spec.producer or previous
        answer.streams += [self._streams[x] for x in _PHASES if x in self._streams]
        prefill, decode = self._streams.get(Side.PREFILL), self._streams[Side.DECODE]
        self._first = prefill or decode  # computes the prompt, sends the first token
        self._handoff = Handoff(
            answer.max_tokens,
            len(answer.tokens),
            decode.member.worker_id,
            None if prefill is None else prefill.member.worker_id,
            None if previous is None else Side.PREVIOUS,
        )
        self._weights: ModelWeights | None = None
        if previous is not None:
            self._streams[Side.PREVIOUS], self._weights = previous, previous.newest

    async def run(self) -> Finished | Failed | Moved:
        """Send the request and wait until the attempt ends, at the latest at the request's
        deadline. Return its end. All streams are then closed, except the producer of a Moved."""
        end: Finished | Failed | Moved | None = None
        try:
            if self._request.pixels is not None and Side.PREVIOUS not in self._streams:
                await self._turn_of_images(self._request.pixels)
            if (deadline := self._request.deadline) is not None:
                # One timer for the attempt is cheaper than a timeout around each wait.
                self._timers.append(self._end.get_loop().call_at(deadline, self._expire))
            for spec in self._specs:
                self._submit(spec, self._streams[spec.side])
            self._media = ()
            end = await self._end
            return end
        finally:
            self._close(end)

    async def _turn_of_images(self, pixels: ImageData) -> None:
        """Wait until the connection can send the images of the prompt, and read them. Give up at
        the deadline."""
        link = self._links.get(self._first.member)
        try:
            async with asyncio.timeout_at(self._request.deadline):
                if link is not None:
                    await link.drained()
                self._media = await pixels.read()
        except TimeoutError:
            self._expire()
        except OSError as error:
            logger.error("the images of request %s: %s", self._request.request_id, error)
            self._stop(InternalError("the router's disk failed: the images are lost"))

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
        for side, stream in self._streams.items():
            if stream is not kept:
                self._close_stream(stream, side, reason)
        self._reservation.release()

    def _close_stream(self, stream: WorkerStream, side: Side, reason: str) -> None:
        """End a stream and free its KV. `reason` is the waste reason of the worker's usage."""
        # A prefill or exported stream that has ended still holds KV on its worker under a lease.
        holds_kv, member = self._handoff.kv_held_by is side, stream.member
        self._observer.closed(stream, holds_kv=holds_kv)
        if not (holds_kv or self._is_open(stream, side)) or member.lost:
            return
        if stream.stream_id is not None:
            self._links[member].cancel(stream.stream_id, reason, ended=holds_kv)

    def _is_open(self, stream: WorkerStream, side: Side) -> bool:
        # The handoff knows only the streams that the attempt depends on.
        return stream.is_prefilling if stream.is_optional else self._handoff.is_open(side)

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
        if stream.is_prefilling:
            stream.is_prefilling = False
            if stream is self._first:
                self._observer.computed(self._reservation)
            self._observer.first_delta(stream, delta)
            if delta.token_ids and stream.side is not Side.PREFILL:
                self._note_kv_worker(stream.member)
        if delta.finish_reason is not None:
            self._observer.ended(stream, delta, self._streams.get(Side.ENCODE))
        if not stream.is_optional:
            self._perform(self._handoff.on_delta(stream.side, delta))
        elif delta.error is not None:
            self._go_on_without(stream, delta.error.message)

    def on_lost(self, stream: WorkerStream, error: PdserveError) -> None:
        self._observer.lost(stream, error)
        if isinstance(error, InternalError):
            self._stop(error)  # raised here or in the client's writer: another worker cannot help
        elif stream.is_optional:
            stream.is_prefilling = False
            self._go_on_without(stream, error.message)
        else:
            self._perform(self._handoff.on_lost(stream.side, error))

    def _go_on_without(self, stream: WorkerStream, why: str) -> None:
        text = "request %s goes on without the %s stream of worker %s: %s"
        logger.info(text, self._request.request_id, stream.side, stream.worker_id, why)

    def _expire(self) -> None:
        self._stop(deadline_passed(len(self._answer.tokens)))

    def _on_export_timeout(self) -> None:
        self._perform(self._handoff.on_export_timeout())

    # -- Commands to workers

    def _submit(self, spec: StreamSpec, stream: WorkerStream) -> None:
        """Send the request to a worker. An error of the connection counts as its loss."""
        if not self._is_open(stream, spec.side) or self._handoff.ended:
            return
        if stream.member.lost:
            self.on_lost(stream, Unavailable(f"worker {stream.worker_id} is gone"))
            return
        sent = [side for side, x in self._streams.items() if x.stream_id is not None]
        command = spec.build(SubmitInputs(self._answer.tokens, self._media, sent))
        # One for all streams, so that no worker uses KV of another version: one whose weights have
        # changed since it was reserved refuses the request.
        self._weights = stream.weights = self._weights or stream.member.reported.weights
        submit = command.submit
        submit.weights_sequence, submit.weights_digest = stream.weights.identity
        storage, topology = self._request.storage, stream.member.info.topology
        submit.no_tiers = not may_hold(storage, topology)
        prompt = wire.set_prompt(submit, self._request.prompt_token_ids)
        try:
            stream.stream_id = self._links[stream.member].submit(command, self, stream, prompt)
        except PdserveError as error:
            # A copy, because the error's traceback refers to this attempt.
            self.on_lost(stream, copy(error))

    # -- Results

    def _write(self, delta: AnswerDelta) -> None:
        """Send a delta to the client. End the attempt if a step cuts the answer, or the client does
        not read."""
        if self._answer.out.write(delta):
            return
        if (cut := self._answer.cut) is not None:
            self._handoff.stop()
            self._perform((Finished(StreamDelta(0), cut),))
        else:
            self._stop(Cancelled("the client does not read its answer"))

    def _stop(self, error: PdserveError) -> None:
        """End the attempt with an error that no worker caused."""
        self._handoff.stop()
        self._perform((Failed(Side.DECODE, error),))

    def _perform(self, actions: Iterable[Action]) -> None:
        """Perform the actions that the handoff returned."""
        for action in actions:
            # A write among the actions may have ended the attempt, because the client does not
            # read.
            if self._end.done():
                return
            match action:
                case StreamDelta(weights_switch=switch) if switch is not None:
                    stream = self._streams[Side.DECODE]  # no other outlives a change of weights
                    stream.switches += ((len(self._answer.tokens), switch),)
                case StreamDelta():
                    self._note_first_token(action)
                    self._answer.tokens += action.token_ids
                    out = AnswerDelta(action.token_ids, action.text, action.logprobs)
                    out.index = self._answer.index
                    out.prompt_logprobs = action.prompt_logprobs
                    out.routed_experts = action.routed_experts
                    self._write(out)
                case Finished(delta):
                    self._note_first_token(delta)
                    # The caller writes it, because the last delta has the usage of all answers.
                    self._answer.tokens += delta.token_ids
                    # If the answer ends with prefill's token, the KV stays on the prefill worker.
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
            answer.first_token_at = self._end.get_loop().time()
            answer.first_token_stream = self._first

    def _note_kv_worker(self, member: Member) -> None:
        """Record that `member` has the prompt's KV in its cache."""
        kv_worker = self._answer.kv_worker
        if kv_worker is not None and not kv_worker.done():
            kv_worker.set_result(member)

    # -- Leaving a worker

    def uses(self, worker_id: str) -> bool:
        """Return True if the attempt uses `worker_id` and can leave it."""
        return self._handoff.uses(worker_id)

    def can_export(self, worker_id: str) -> bool:
        """Return True if `worker_id` decodes and can export the KV of the request."""
        return self._handoff.can_export(worker_id)

    def export(self, reservation: Reservation, timeout_s: float) -> None:
        """Start to move the request with its KV to `reservation`. `can_export` must be True. Give
        up after `timeout_s`."""
        decode, loop = self._streams[Side.DECODE], self._end.get_loop()
        self._leaving = Moved(reservation, decode, secrets.token_hex(16))
        self._timers.append(loop.call_later(timeout_s, self._on_export_timeout))
        self._handoff.export()
        stream_id, member = decode.stream_id, decode.member
        if stream_id is None or member.lost:
            return  # the connection calls `on_lost`
        try:
            self._links[member].export(stream_id, self._leaving.transfer_id)
        except PdserveError as error:
            # A copy, because the error's traceback refers to this attempt.
            self.on_lost(decode, copy(error))

    def leave(self, reservation: Reservation) -> None:
        """End the attempt without its KV. The next attempt uses `reservation`."""
        self._handoff.stop()
        self._leaving = Moved(reservation)
        self._end.set_result(self._leaving)
