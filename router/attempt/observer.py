"""Updates the state of workers from the streams of attempts: health, breakers, pairs and load."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdserve.errors import EngineDied, TransferCorrupted, TransferFailed, WorkerFailed
from router.attempt.handoff import Side

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from pdserve.types import StreamDelta
    from router.attempt.placer import Reservation
    from router.attempt.streams import WorkerStream
    from router.fleet.health import Pair
    from router.fleet.registry import Fleet

logger = logging.getLogger(__name__)

_ENGINE_FAILURES = (WorkerFailed.code, EngineDied.code)


class StreamObserver:
    """Receives each event of all attempts at once, as a method call: the first delta admits the
    next prompt, and a dead engine stops placement. It is the only writer of what the fleet learns
    from attempts.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def computed(self, reservation: Reservation) -> None:
        """Record that the prompt of an attempt is computed or abandoned."""
        if reservation.prefilled():
            self._fleet.capacity_changed()

    def first_delta(self, stream: WorkerStream, delta: StreamDelta) -> None:
        if delta.error is None:
            stream.member.breaker.success()

    def ended(self, stream: WorkerStream, last: StreamDelta, encode: WorkerStream | None) -> None:
        """Record that a stream ended with its `last` delta. `encode`: the encode stream of its
        attempt."""
        member = stream.member
        stream.charge.release()
        stream.report = last.report
        if (report := last.report) is not None:
            member.placed.ended_s += report.prefill_busy_s + report.decode_busy_s
        if last.error is not None and last.error.code in _ENGINE_FAILURES:
            member.failed(self._fleet.now(), last.error.message)
            if last.error.code == EngineDied.code:
                stream.died = stream.engine_died = True
                self._fleet.engine_died(member)
        if stream.side is Side.PREFILL and encode is not None:
            self._judge_encoder(encode, stream, last)
        if stream.side is Side.DECODE and stream.pair is not None:
            self._judge_pair(stream.pair, last)

    def lost(self, stream: WorkerStream, error: PdserveError) -> None:
        """Record that a stream ended without a last delta."""
        stream.charge.release()
        # Without a stream id nothing was sent to the worker.
        was_sent, left = stream.stream_id is not None, stream.member.has_left
        stream.died |= was_sent and not left and isinstance(error, WorkerFailed)

    def closed(self, stream: WorkerStream, *, holds_kv: bool) -> None:
        """Record that the attempt ended. `holds_kv`: the worker holds KV that decode has not
        fetched."""
        stream.charge.release()
        # A prefill worker may die while it sends the KV, after its stream has ended.
        stream.died |= holds_kv and not (stream.member.attached or stream.member.has_left)

    def _judge_encoder(
        self, encode: WorkerStream, prefill: WorkerStream, last: StreamDelta
    ) -> None:
        """Report to outlier ejection whether embeddings reached the prefill worker. Skipped if it
        had the KV of the images cached and requested none."""
        if encode.report is None or last.error is not None or last.report is None:
            return
        if not last.report.wanted_images:
            return
        pair, outliers = (encode.worker_id, prefill.worker_id), self._fleet.outliers
        if last.report.fetched_images:
            outliers.succeeded(pair)
        elif outliers.failed(pair, self._fleet.now(), "no embedding arrived"):
            logger.warning("the pair of workers %s and %s is ejected: no embedding arrived", *pair)

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
