"""Enters each request in the log of open and ended requests, and counts how it ended."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.errors import Cancelled, PdserveError, is_service_error
from router.walk import RECORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.types import GenerateRequest, ModelInfo
    from router.metrics import RouterMetrics
    from router.walk import Answered, Proceed, RequestRecord, Walk

logger = logging.getLogger(__name__)

RECORDS_KEPT = 10_000  # about 1 KiB each


@dataclass(slots=True)
class RequestLog:
    """`ended`: the last ended requests. `open`: the open requests in order of arrival. `begun`,
    `ended_count`: numbers of all requests and of all ended ones."""

    ended: deque[RequestRecord]
    open: dict[RequestRecord, None] = field(default_factory=dict)
    begun: int = 0
    ended_count: int = 0

    def begin(self, record: RequestRecord) -> None:
        self.begun += 1
        record.number = self.begun
        self.open[record] = None

    def end(self, record: RequestRecord, now: float) -> None:
        """Move a request to the ended ones."""
        del self.open[record]
        record.ended, record.answers = now, ()
        self.ended.append(record)
        self.ended_count += 1


def make_log(records_kept: int = RECORDS_KEPT) -> RequestLog:
    return RequestLog(deque(maxlen=records_kept))


class LogStep:
    """The outermost step: every request that reaches the router has a record.

    `models`: the served models by name. A name invented by a client must not become a metric label,
    because each label costs memory.
    """

    def __init__(
        self,
        log: RequestLog,
        metrics: RouterMetrics,
        models: Callable[[], Mapping[str, ModelInfo]],
        now: Callable[[], float],
    ) -> None:
        self._log, self._metrics, self._models, self._now = log, metrics, models, now

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        log, record, request = self._log, walk.record, walk.request
        log.begin(record)
        if (records := RECORDS.get()) is not None:
            records.append(record)
        try:
            done = await proceed(walk)
            record.outcome = done.answers[0].finish_reason
            return done
        except BaseException as error:
            self._failed(request, record, error)
            raise
        finally:
            self._count(request, record)
            log.end(record, self._now())

    def _failed(
        self, request: GenerateRequest, record: RequestRecord, error: BaseException
    ) -> None:
        """Record why a request was not answered. The error must not be kept, because its traceback
        would keep the frames of all steps until a garbage collection."""
        if not isinstance(error, PdserveError):
            # An answer that is stopped for another reason has it as the message.
            why = str(error) if isinstance(error, asyncio.CancelledError) else ""
            error = Cancelled(why or "the client went away")
        elif record.admitted:
            logger.info("request %s failed: %s", request.request_id, error.message)
        else:
            known = request.model if request.model in self._models() else ""
            self._metrics.refused(known, request.tenant, error.code, error.reason)
        record.outcome, record.reason, record.message = error.code, error.reason, error.message
        if error.code == Cancelled.code:
            waited_s = self._now() - record.arrived
            record.ttft_met = self._metrics.left(
                request.model, _revision(record), ttft_s=record.ttft_s or None, waited_s=waited_s
            )

    def _count(self, request: GenerateRequest, record: RequestRecord) -> None:
        if record.admitted or record.outcome == Cancelled.code:
            self._metrics.count("requests", request.model, record.outcome)
        if not record.admitted:
            return
        failed = ["failed"] if is_service_error(record.outcome) else []
        self._metrics.count_revision(request.model, _revision(record), "ended", *failed)


def _revision(record: RequestRecord) -> str | None:
    return record.answers[0].revision if record.answers else None


class CountInputsStep:
    """Counts outcomes of embeddings. They are inputs of a request, so they are not in the log."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        outcome = Cancelled.code
        try:
            done = await proceed(walk)
            outcome = "embedding"
            return done
        except PdserveError as error:
            outcome = error.code
            raise
        finally:
            self._metrics.count("requests", walk.request.model, outcome)
