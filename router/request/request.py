"""One request from admission to its last token. Read this file first.

    admission ─► reserve workers ─► attempt: prefill and decode ─► tokens to the client
                        ▲                  │
                        └───── retry ◄─────┘  a worker failed, drains, or changes its role

Retry, drain and role change all continue a request by another attempt in one loop
(`Generation.run`). An attempt continues after the tokens that were delivered, which are never
repeated or changed. It uses the KV of the old worker if that worker is alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.errors import Cancelled, PdserveError, Unavailable, is_service_error
from pdserve.observe.telemetry import trace_id
from pdserve.types import FinishReason, StreamDelta, Usage
from router.fleet.accounting import StreamUsage
from router.placement.filters import check_servable
from router.request.answer import AnswerDelta
from router.request.attempt import Answer, Attempt, Moved
from router.request.failover import Failover
from router.request.handoff import Failed, Finished, Side
from router.request.pooling import pick
from router.request.record import (
    RECORDS_KEPT,
    RequestLog,
    RequestRecord,
    combined_receipt,
    receipt_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.observe.telemetry import Span, Tracing
    from pdserve.types import Adapter, GenerateRequest, ModelInfo, Receipt
    from router.admission import Slot
    from router.fleet.accounting import UsageCharge
    from router.fleet.member import Member
    from router.placement.values import Demand
    from router.request.answer import Out
    from router.request.attempt import Fetched, WorkerStream
    from router.request.parsing import AnswerParser
    from router.request.placer import Reservation
    from router.request.services import Services
    from router.request.suspects import Suspicion

logger = logging.getLogger(__name__)


class RequestServer:
    """Serves requests. State: the answers that are being generated, and the log, which it alone
    writes.

    Queued requests are admitted only while `admit_queued` runs.
    """

    def __init__(
        self,
        services: Services,
        tracing: Tracing | None = None,
        parser: AnswerParser | None = None,
        *,
        records_kept: int = RECORDS_KEPT,
    ) -> None:
        self.admission = services.admission
        self._services = services
        self._tracing = tracing
        self._parser = parser
        self._generations: set[Generation] = set()
        self.log = RequestLog(deque(maxlen=records_kept))
        self.open_adapters = Counter[str]()  # open requests by the key of their LoRA adapter

    async def admit_queued(self) -> None:
        """Admit queued requests whenever a worker or room is available. Runs until cancelled."""
        while True:
            await self._services.fleet.capacity_change()
            self._services.admission.wake()

    async def serve(self, request: GenerateRequest, out: Out) -> None:
        """Write the answer to `request` to `out`.

        Raises ModelNotFound, ContextLengthExceeded, Overloaded and Unavailable, mostly before the
        first write. Raises DeadlineExceeded, WorkerFailed and its subclasses, the errors of the
        engine, and Cancelled if the client does not read, at any time.
        """
        if not request.media:
            await self._parse(request, out)
            return
        async with self._services.media_memory.keep(request.media) as file:
            if file is not None:
                # In place: the caller's request would keep the data in memory.
                request.media = tuple([x.without_data() for x in request.media])
                request.read_media = file.read
            await self._parse(request, out)

    async def _parse(self, request: GenerateRequest, out: Out) -> None:
        if request.parsing is not None and self._parser is not None:
            await self._parser.serve(request, request.parsing, out, self._serve)
        else:
            await self._serve(request, out)

    async def _serve(self, request: GenerateRequest, out: Out) -> None:
        services, now = self._services, self._services.fleet.now
        record, adapter = self._begin(request), request.adapter_key
        generations: list[Generation] = []
        span: Span | None = None
        suspicion: Suspicion | None = None
        is_answered = False
        # An adapter is unloaded only when no open request uses it.
        self.open_adapters[adapter] += 1
        try:
            suspicion = services.suspects.begin(request)
            if self._tracing is not None:
                span = self._begin_span(self._tracing, request)
                request = request.under("" if span is None else span.traceparent)
                record.trace_id = trace_id(request.traceparent)
            last: frozenset[str] = frozenset()
            if request.session:
                last = services.sessions.workers_of(request)
                request = replace(request, next_turn_s=services.sessions.arrived(request))
            demand = services.placer.demand(request, last)
            with (
                services.admission.enter(request, kv_tokens=demand.kv_tokens) as slot,
                await self._reserve(slot, demand) as reservation,
            ):
                record.admitted = now()
                if span is not None:
                    span.phase("admission", 0.0, record.admitted - record.arrived)
                generations += [
                    Generation(services, request, demand, out, index, suspicion)
                    for index in range(request.sampling.n)
                ]
                self._generations.update(generations)
                record.answers = [x.answer for x in generations]
                record.outcome = await self._generate(generations, record, reservation)
            is_answered = True
        except BaseException as error:
            self._failed(request, record, generations, span, error)
            raise
        finally:
            self._generations.difference_update(generations)
            if suspicion is not None:
                services.suspects.end(request, suspicion, answered=is_answered)
            self._end(record)
            self.open_adapters[adapter] -= 1
            if not self.open_adapters[adapter]:
                del self.open_adapters[adapter]
            if record.admitted:
                services.metrics.count("requests", request.model, record.outcome)
                failed = ["failed"] if is_service_error(record.outcome) else []
                revision = generations[0].revision if generations else None
                services.metrics.count_revision(request.model, revision, "ended", *failed)
            if span is not None:
                span.end()

    async def _reserve(self, slot: Slot, demand: Demand) -> Reservation:
        """Reserve workers as soon as it is the request's turn and they have room."""
        while True:
            await slot.turn()
            try:
                reservation = self._services.placer.reserve(demand)
            except Unavailable as reason:
                slot.wait_for(reason)
            else:
                slot.take()
                return reservation

    async def _generate(
        self, generations: Sequence[Generation], record: RequestRecord, reservation: Reservation
    ) -> str:
        """Write all answers and return the finish reason of the first one. The last delta has the
        usage and the receipt of all answers."""
        parent, *children = generations
        out, unfinished = parent.answer.out, len(generations)

        async def complete(generation: Generation, reservation: Reservation | None) -> None:
            nonlocal unfinished
            end = await generation.run(reservation)
            generation.finish_reason = end.reason.value
            delta = end.delta
            last = AnswerDelta(delta.token_ids, delta.text, delta.logprobs)
            last.finish_reason, last.stop_reason = end.reason, delta.stop_reason
            last.index = generation.answer.index
            last.prompt_logprobs = delta.prompt_logprobs
            unfinished -= 1
            if not unfinished:
                last.usage, last.receipt = self._account(generations, record)
            out.write(last)

        if (kv_worker := parent.answer.kv_worker) is None:
            await complete(parent, reservation)
            return parent.finish_reason
        # Parallel sampling: one prefill and one transfer for the first answer. The others start on
        # its decode worker after that, because it then has the prompt's KV in its prefix cache.
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(complete(parent, reservation))
                member = await kv_worker
                reservation.release_children()
                for child in children:
                    group.create_task(complete(child, child.reserve_on(member)))
            return parent.finish_reason
        except BaseExceptionGroup as errors:
            # Callers handle one PdserveError. The first failure cancelled the other answers.
            raise errors.exceptions[0] from None

    def _begin(self, request: GenerateRequest) -> RequestRecord:
        """Enter a request in the log."""
        log = self.log
        log.begun += 1
        record = RequestRecord(
            number=log.begun,
            request_id=request.request_id,
            model=request.model,
            tenant=request.tenant,
            service_class=request.service_class,
            session=request.session,
            prompt_tokens=len(request.prompt_token_ids),
            arrived=self._services.fleet.now(),
        )
        log.open[record] = None
        return record

    def _end(self, record: RequestRecord) -> None:
        """Move a request to the ended ones in the log."""
        del self.log.open[record]
        record.ended, record.answers = self._services.fleet.now(), []
        self.log.ended.append(record)
        self.log.ended_count += 1

    def _failed(
        self,
        request: GenerateRequest,
        record: RequestRecord,
        generations: Sequence[Generation],
        span: Span | None,
        error: BaseException,
    ) -> None:
        """Record why a request was not answered. `serve` must not keep the error: its traceback
        refers to the frame of `serve`, so both would wait for a garbage collection."""
        if not isinstance(error, PdserveError):
            error = Cancelled("the client went away")
        elif record.admitted:
            logger.info("request %s failed: %s", request.request_id, error.message)
        else:
            # Names that clients make up must not become labels: each label costs memory.
            known = request.model if request.model in self.models() else ""
            self._services.metrics.refused(known, request.tenant, error)
        record.outcome, record.reason, record.message = error.code, error.reason, error.message
        # The work was done, although nobody pays for it: it counts as waste.
        for generation in generations:
            generation.charge(failed=error.code)
        if span is not None:
            span.end(error)

    def _account(
        self, generations: Sequence[Generation], record: RequestRecord
    ) -> tuple[Usage, Receipt]:
        """Return usage and receipt of all answers, and record them in the metrics."""
        metrics, now = self._services.metrics, self._services.fleet.now()
        parent, arrived = generations[0], record.arrived
        waited_s = record.admitted - arrived
        request, resumed = parent.request, len(parent.request.resume)
        lengths = [len(x.answer.tokens) for x in generations]
        # Each token counts once, even if retries computed it several times.
        usage = Usage(len(request.prompt_token_ids), sum(lengths), parent.answer.cached_tokens)
        receipt = combined_receipt([x.receipt(waited_s) for x in generations])
        receipt.images, receipt.render_s = len(request.media), request.render_s
        ttft_s = min([x.answer.first_token_at or now for x in generations]) - arrived
        e2e_s = now - arrived
        record.usage, record.receipt, record.ttft_s = usage, receipt, ttft_s
        if request.session:
            workers = frozenset((receipt.prefill_worker, receipt.decode_worker)) - {""}
            record.recomputed_tokens = self._services.sessions.answered(request, usage, workers)
            metrics.count("session_turns", request.model)
            metrics.count("recomputed_tokens", request.model, by=record.recomputed_tokens)
        self._count_saved(parent.answer)
        metrics.answered(
            request.model,
            request.tenant,
            usage,
            receipt,
            resumed=resumed,
            longest=max(lengths) - resumed,
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            revision=parent.revision,
            trace_id=record.trace_id,
        )
        if image_tokens := sum(x.length for x in request.media):
            metrics.count("fetched_images", request.model, by=receipt.fetched_images)
            for stream in parent.answer.streams:
                if stream.side is Side.ENCODE and stream.report is not None:
                    seconds = stream.report.encode_s
                    self._services.costs.encoded(request.model, image_tokens, seconds)
        # Retries, resumed and parallel answers would distort the means of the cost model.
        if len(generations) == 1 and not (receipt.fallbacks or resumed):
            ttft_s, e2e_s = ttft_s - waited_s, e2e_s - waited_s
            costs = self._services.costs
            costs.answered(request.model, usage, receipt, ttft_s=ttft_s, e2e_s=e2e_s)
        return usage, receipt

    def _count_saved(self, answer: Answer) -> None:
        """Record the price of the prefill that the prefix cache saved, predicted by the step
        model."""
        first, cached = answer.first_token_stream, answer.cached_tokens
        if first is None or not cached:
            return
        steps = self._services.costs.step_model(first.worker_id)
        if steps is not None and steps.knows_prefill:
            info = self._services.fleet.members[first.worker_id].info
            self._services.accounting.saved(info, steps.prompt_s(cached, cached**2 / 2))

    def move_off(self, worker_id: str, reason: str, *, live_only: bool = False) -> int:
        """Move the requests of a worker to other workers. Return the number that move.

        KV moves along where possible; `live_only` moves only such requests. The others end on this
        worker.
        """
        generations = list(self._generations)
        return sum(x.move_off(worker_id, reason, live_only=live_only) for x in generations)

    @property
    def open_requests(self) -> int:
        return len(self.log.open)

    def models(self) -> Mapping[str, ModelInfo]:
        """The models of the registered workers, and on-demand models without workers, by name."""
        models, on_demand = self._services.fleet.models(), self._services.on_demand
        return models if on_demand is None else on_demand.with_missing(models)

    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that are served, by name."""
        return self._services.adapters

    def check_ready(self) -> None:
        """Raise Unavailable unless every model can be served now or started on demand."""
        models, fleet, on_demand = self.models(), self._services.fleet, self._services.on_demand
        if not models and on_demand is None:
            raise Unavailable("no worker is registered")
        for name in models:
            # A router that is not ready gets no requests, so nothing would start the model.
            if on_demand is not None and on_demand.is_missing(name):
                continue
            if fleet.of_model(name) or not fleet.pooling(name):
                check_servable(fleet.candidates(name), name, aggregated=True)
            else:
                pick(fleet, name)

    @staticmethod
    def _begin_span(tracing: Tracing, request: GenerateRequest) -> Span | None:
        attributes: dict[str, str | int] = {
            "gen_ai.request.model": request.model,
            "pdserve.request_id": request.request_id,
            "pdserve.prompt_tokens": len(request.prompt_token_ids),
        }
        return tracing.begin("request", request.traceparent, attributes)


class Generation:
    """Generates one answer of a request in one or more attempts."""

    def __init__(
        self,
        services: Services,
        request: GenerateRequest,
        demand: Demand,
        out: Out,
        index: int,
        suspicion: Suspicion,
    ) -> None:
        sampling, kv_worker = request.sampling, None
        if sampling.n > 1:
            request = replace(request, sampling=sampling.of_choice(index))
            kv_worker = None if index else asyncio.get_running_loop().create_future()
        self.request = request
        self.answer = Answer(out, sampling.max_tokens, list(request.resume), index, kv_worker)
        self.finish_reason = ""
        self._services = services
        self._first: Reservation | None = None
        self._failover = Failover(services, request, demand, self.answer, suspicion)
        self._attempt: Attempt | None = None
        self._charge: UsageCharge | None = None
        self._copies: list[WorkerStream] = []

    async def run(self, reservation: Reservation | None) -> Finished:
        """Run attempts until the answer is complete. The caller writes the last delta, which is
        returned. Raises PdserveError."""
        try:
            return await self._run(reservation)
        finally:
            self._failover.end()

    async def _run(self, reservation: Reservation | None) -> Finished:
        services, failover, moved = self._services, self._failover, None
        if (first := reservation) is not None:
            self._first = first
            failover.begin(first)
        if len(self.answer.tokens) >= self.answer.max_tokens:
            return Finished(StreamDelta(0), FinishReason.LENGTH)
        if reservation is None:
            reservation = await failover.wait_for_workers()
        while True:
            opened, copied = len(self.answer.streams), None
            if reservation.fetch is not None and not failover.is_suspect:
                copied = await self._fetch(reservation)
            self._attempt = Attempt(
                services.fleet, services.links, self.request, reservation, self.answer, moved
            )
            match end := await self._attempt.run():
                case Finished():
                    return end
                case Failed():
                    streams = self.answer.streams[opened:]
                    if copied is not None:
                        streams += copied.streams
                    failover.note_death(streams, moved)
                    reservation, moved = await failover.after(end, reservation), None
                case Moved():
                    reservation, moved = end.reservation, end
                    failover.moved(reservation)

    async def _fetch(self, reservation: Reservation) -> Fetched | None:
        """Copy cached KV as planned, before the attempt with `reservation`."""
        fetcher, tokens = self._services.fetcher, self.answer.tokens
        try:
            copied = await fetcher.fetch(self.request, tokens, reservation)
        except BaseException:
            reservation.release()
            raise
        if copied is not None:
            self.answer.fetched = copied
            self._copies += copied.streams
        return copied

    def reserve_on(self, member: Member) -> Reservation | None:
        """Reserve an aggregated attempt on `member`. Return None if it is not ready."""
        try:
            return self._failover.reserve_on(member)
        except Unavailable:
            return None

    def move_off(self, worker_id: str, reason: str, *, live_only: bool) -> bool:
        """Continue the answer on another worker, with its KV if possible.

        Return False without any change if the answer does not use `worker_id`, is nearly done, or
        no other worker can take it.
        """
        attempt, failover = self._attempt, self._failover
        if attempt is None:
            return False
        if attempt.can_export(worker_id):
            # If no worker can take the KV, fall through: the prompt can be computed again.
            with suppress(Unavailable):
                attempt.export(
                    failover.reserve_live(worker_id, reason), self._services.export_timeout_s
                )
                return True
        if live_only or not attempt.uses(worker_id):
            return False
        with suppress(Unavailable):
            attempt.leave(failover.reserve_elsewhere(worker_id, reason))
            return True
        return False

    @property
    def revision(self) -> str | None:
        """The revision of the first attempt, None if its model had no weights."""
        return None if self._first is None else self._first.revision

    def charge(self, failed: str = "") -> UsageCharge:
        """Charge the work for the answer once and return the charge. `failed` is the error code of
        a failed request, whose work is waste."""
        if self._charge is None:
            streams = [*self._copies, *self.answer.streams]
            work = [StreamUsage(x.member.info, x.report, x.cause) for x in streams]
            self._charge = self._services.accounting.charge(work, self.request.tenant, failed)
        return self._charge

    def receipt(self, admission_s: float) -> Receipt:
        """Charge the answer and return its receipt."""
        return receipt_of(
            self.answer,
            self.charge(),
            admission_s=admission_s,
            retries=self._failover.retries,
            prediction=None if self._first is None else self._first.prediction,
        )
