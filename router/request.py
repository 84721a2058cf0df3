"""One request from admission to its last token. Read this file first.

    admission ─► reserve workers ─► attempt: prefill and decode ─► tokens to the client
                        ▲                  │
                        └───── retry ◄─────┘  a worker failed, drains, or changes its role

Every way to continue a request is another attempt of one loop (`Generation.run`). An attempt
continues after the tokens that were delivered, which are never repeated or changed; with the KV of
the old worker if that lives.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from pdserve.errors import (
    BudgetExhausted,
    Cancelled,
    PdserveError,
    TransferCorrupted,
    Unavailable,
    is_service_error,
)
from pdserve.telemetry import trace_id
from pdserve.types import FinishReason, Receipt, Role, StreamDelta, TransferReport, Usage
from router.accounting import Done, sum_known
from router.answer import AnswerDelta
from router.handoff import Failed, Finished, Phase
from router.placement.filters import check_servable
from router.pooling import pick
from router.retry import LIVE_KV, MOVED, RETRYABLE, Constraints, RetryPolicy, RetryStep
from router.upstream import Answer, Attempt, deadline_passed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.telemetry import Span, Tracing
    from pdserve.types import Adapter, GenerateRequest, ModelInfo, ServiceClass
    from router.accounting import Accounting, Charge
    from router.admission import AdmissionController
    from router.answer import Out
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.handoff import StreamState
    from router.metrics import RouterMetrics
    from router.on_demand import OnDemandModels
    from router.parsing import AnswerParser
    from router.placement.cost import CostModel
    from router.placement.values import Demand
    from router.placer import Placer, Reservation
    from router.retry import RetryBudget
    from router.upstream import Moved

logger = logging.getLogger(__name__)

UNAVAILABLE_RETRY_AFTER_S = 5.0
RECORDS_KEPT = 10_000  # about 1 KiB each


@dataclass(frozen=True, slots=True)
class Services:
    """What a request uses. A stream that lost its worker waits `queue_timeout_s` for another."""

    fleet: Fleet
    admission: AdmissionController
    placer: Placer
    costs: CostModel
    metrics: RouterMetrics
    accounting: Accounting
    budget: RetryBudget
    queue_timeout_s: float = 30.0
    on_demand: OnDemandModels | None = None


class RequestRecord(Struct, eq=False, kw_only=True):
    """What is remembered of a request; nothing of its prompt and answer.

    `number` counts requests. `arrived`, `admitted` and `ended` are in seconds on the event loop's
    clock, 0 if it has not happened. `outcome` is the finish reason or the error's code, "" while
    the request is open; `reason` and `message` are the error's. `answers` are there while they are
    made.
    """

    number: int = 0
    request_id: str
    model: str
    tenant: str
    service_class: ServiceClass
    prompt_tokens: int
    arrived: float
    admitted: float = 0.0
    ended: float = 0.0
    ttft_s: float = 0.0
    outcome: str = ""
    reason: str = ""
    message: str = ""
    trace_id: str = ""
    usage: Usage | None = None
    receipt: Receipt | None = None
    answers: list[Answer] = []

    @classmethod
    def of(cls, request: GenerateRequest, now: float) -> RequestRecord:
        return cls(
            request_id=request.request_id,
            model=request.model,
            tenant=request.tenant,
            service_class=request.service_class,
            prompt_tokens=len(request.prompt_token_ids),
            arrived=now,
        )


class RequestLog:
    """State: `open`, the requests that have not ended, in order of arrival; `ended`, the last ones
    that have; and `ended_count`, how many have."""

    def __init__(self) -> None:
        self.open: dict[RequestRecord, None] = {}
        self.ended: deque[RequestRecord] = deque(maxlen=RECORDS_KEPT)
        self.ended_count = 0
        self._begun = 0

    def begin(self, record: RequestRecord) -> None:
        self._begun += 1
        record.number = self._begun
        self.open[record] = None

    def end(self, record: RequestRecord, now: float, error: PdserveError | None) -> None:
        """The request was answered, or ended by `error`."""
        del self.open[record]
        record.ended, record.answers = now, []
        if error is not None:
            record.outcome = error.code
            record.reason, record.message = error.reason, error.message
        self.ended.append(record)
        self.ended_count += 1


class RequestServer:
    """Serves requests. State: the answers that are being generated. `admit_queued` must run."""

    def __init__(
        self,
        services: Services,
        tracing: Tracing | None = None,
        parser: AnswerParser | None = None,
    ) -> None:
        self.admission = services.admission
        self._services = services
        self._tracing = tracing
        self._parser = parser
        self._generations: set[Generation] = set()
        self.log = RequestLog()
        self.open_adapters = Counter[str]()  # open requests by the key of their LoRA adapter

    async def admit_queued(self) -> None:
        """Admit queued requests whenever workers or room come. Runs until it is cancelled."""
        while True:
            await self._services.fleet.capacity_change()
            self._services.admission.wake()

    async def serve(self, request: GenerateRequest, out: Out) -> None:
        """Write the answer to `request` to `out`.

        Raises, mostly before anything was written: ModelNotFound, ContextLengthExceeded, Overloaded
        and Unavailable; at any time: DeadlineExceeded, WorkerFailed and its subclasses, the errors
        of the engine, and Cancelled if the client does not read.
        """
        if request.parsing is not None and self._parser is not None:
            await self._parser.serve(request, request.parsing, out, self.serve)
            return
        services, now = self._services, self._services.fleet.now
        placer, metrics = services.placer, services.metrics
        span: Span | None = None
        ended_by: PdserveError | None = Cancelled("the client went away")
        generations: list[Generation] = []
        record, adapter = RequestRecord.of(request, now()), request.adapter_key
        self.log.begin(record)
        self.open_adapters[adapter] += 1
        try:
            if self._tracing is not None:
                span = self._begin_span(self._tracing, request)
                request = request.under("" if span is None else span.traceparent)
                record.trace_id = trace_id(request.traceparent)
            demand = placer.demand(request)
            with await services.admission.slot(
                request,
                lambda: placer.reserve(demand),
                kv_tokens=demand.kv_tokens,
                has_adapter_slot=lambda: placer.has_adapter_slot(demand),
            ) as reservation:
                record.admitted = now()
                if span is not None:
                    span.phase("admission", 0.0, record.admitted - record.arrived)
                generations += [
                    Generation(services, request, demand, out, index)
                    for index in range(request.sampling.n)
                ]
                self._generations.update(generations)
                record.answers = [x.answer for x in generations]
                record.outcome = await self._generate(generations, record, reservation)
            ended_by = None
        except PdserveError as error:
            ended_by = error
            if record.admitted:
                logger.info("request %s failed: %s", request.request_id, error.message)
            else:
                # A model name that is not served must not become a label.
                known = request.model if request.model in self.models() else ""
                metrics.refused(known, request.tenant, error)
            raise
        finally:
            self._generations.difference_update(generations)
            self.log.end(record, now(), ended_by)
            self.open_adapters[adapter] -= 1
            if not self.open_adapters[adapter]:
                del self.open_adapters[adapter]
            if ended_by is not None:
                for generation in generations:
                    generation.charge(failed=ended_by.code)
            if record.admitted:
                metrics.count("requests", request.model, record.outcome)
                failed = ["failed"] if is_service_error(record.outcome) else []
                revision = generations[0].revision if generations else None
                metrics.count_revision(request.model, revision, "ended", *failed)
            if span is not None:
                span.end(ended_by)
            ended_by = None  # its traceback has this frame: as a cycle both would be garbage

    async def _generate(
        self, generations: Sequence[Generation], record: RequestRecord, reservation: Reservation
    ) -> str:
        """Write all answers and return why the first one ended. The last delta has the usage and
        the receipt of all."""
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

        if not children:
            await complete(parent, reservation)
            return parent.finish_reason
        # Parallel sampling: one prefill and one transfer for the first answer; the others start on
        # its decode worker, which then has the KV of the prompt in its cache.
        parent.answer.kv_worker = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(complete(parent, reservation))
                member = await parent.answer.kv_worker
                reservation.release_children()
                for child in children:
                    group.create_task(complete(child, child.reserve_on(member)))
            return parent.finish_reason
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _account(
        self, generations: Sequence[Generation], record: RequestRecord
    ) -> tuple[Usage, Receipt]:
        """Return what all answers cost, and count it."""
        metrics, now = self._services.metrics, self._services.fleet.now()
        parent, arrived = generations[0], record.arrived
        waited_s = record.admitted - arrived
        request, resumed = parent.request, len(parent.request.resume)
        lengths = [len(x.answer.tokens) for x in generations]
        # Each token is counted once, however often it was computed.
        usage = Usage(len(request.prompt_token_ids), sum(lengths), parent.answer.cached_tokens)
        receipt = combined_receipt([x.receipt(waited_s) for x in generations])
        ttft_s = min([x.answer.first_token_at or now for x in generations]) - arrived
        e2e_s = now - arrived
        record.usage, record.receipt, record.ttft_s = usage, receipt, ttft_s
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
        if len(generations) == 1 and not (receipt.fallbacks or resumed):
            ttft_s, e2e_s = ttft_s - waited_s, e2e_s - waited_s
            costs = self._services.costs
            costs.answered(request.model, usage, receipt, ttft_s=ttft_s, e2e_s=e2e_s)
        return usage, receipt

    def _count_saved(self, answer: Answer) -> None:
        """Count the price of the tokens that were cached, as the step model predicts it."""
        first, cached = answer.first_token_stream, answer.cached_tokens
        if first is None or not cached:
            return
        steps = self._services.costs.step_model(first.worker_id)
        if steps is not None and steps.knows_prefill:
            info = self._services.fleet.members[first.worker_id].info
            self._services.accounting.saved(info, steps.prompt_s(cached, cached**2 / 2))

    def move_off(self, worker_id: str, reason: str, *, live_only: bool = False) -> int:
        """Move the requests of a worker elsewhere, with their KV if possible; with `live_only` no
        other. Return how many move. The rest end where they are."""
        generations = list(self._generations)
        return sum(x.move_off(worker_id, reason, live_only=live_only) for x in generations)

    @property
    def open_requests(self) -> int:
        return len(self.log.open)

    def models(self) -> Mapping[str, ModelInfo]:
        """The models of the registered workers, and those that may have none, by name."""
        models, on_demand = self._services.fleet.models(), self._services.on_demand
        return models if on_demand is None else on_demand.with_missing(models)

    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that are served, by name."""
        return self._services.fleet.adapters

    def check_ready(self) -> None:
        """Raises Unavailable unless every model can be served now, or started when it is asked
        for."""
        models, fleet, on_demand = self.models(), self._services.fleet, self._services.on_demand
        if not models and on_demand is None:
            raise Unavailable("no worker is registered")
        for name in models:
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
    """Generates one answer of a request, in as many attempts as that takes."""

    def __init__(
        self, services: Services, request: GenerateRequest, demand: Demand, out: Out, index: int
    ) -> None:
        sampling = request.sampling
        if sampling.n > 1:
            request = replace(request, sampling=sampling.of_choice(index))
        self.request = request
        self.answer = Answer(out, sampling.max_tokens, list(request.resume), index)
        self.finish_reason = ""
        self.first_reservation: Reservation | None = None
        self._services = services
        self._retry = RetryPolicy()
        if extra := demand.children_tokens:
            demand = structs.replace(demand, kv_tokens=demand.kv_tokens - extra, children_tokens=0)
        self._demand = demand
        self._attempt: Attempt | None = None
        self._charge: Charge | None = None

    def charge(self, failed: str = "") -> Charge:
        """Account for the answer, or for what was done of it if the request `failed`. Later calls
        return the same."""
        if self._charge is None:
            work = [Done(x.member.info, x.report, x.cause) for x in self.answer.streams]
            self._charge = self._services.accounting.charge(work, self.request.tenant, failed)
        return self._charge

    async def run(self, reservation: Reservation | None) -> Finished:
        """Attempt until the answer is complete; its last tokens are not written. Raises
        PdserveError."""
        fleet, moved = self._services.fleet, None
        self.first_reservation = reservation
        if reservation is not None:
            self._stay_with(reservation.revision)
        if len(self.answer.tokens) >= self.answer.max_tokens:
            return Finished(StreamDelta(0), FinishReason.LENGTH)
        if reservation is None:
            reservation = await self._reserve_again(Unavailable("no worker is ready"), MOVED)
        while True:
            with Attempt(fleet, self.request, reservation, self.answer, moved) as attempt:
                self._attempt = attempt
                try:
                    end = await attempt.pump()
                finally:
                    self._attempt = None
            if isinstance(end, Finished):
                return end
            if isinstance(end, Failed):
                reservation, moved = await self._after_failure(end, moved), None
            else:
                reservation, moved = end.reservation, end if end.producer is not None else None
                self._continue(reservation, MOVED, "the worker is to be empty")

    async def _after_failure(self, end: Failed, moved: Moved | None) -> Reservation:
        """Place the next attempt. Raises the error of the failure if there is none."""
        error = end.error
        if not isinstance(error, RETRYABLE):
            raise error
        failed = end.stream.worker_id
        if isinstance(error, TransferCorrupted) and end.stream.phase is Phase.DECODE:
            # Either worker may have damaged the KV; the producer is easier to replace.
            producer = None if moved is None else moved.producer
            failed = self.answer.prefill_worker if producer is None else producer.worker_id
        self._retry.failed(failed, error, len(self.answer.tokens))
        return await self._reserve_again(error, MOVED if end.was_moving else error.code)

    async def _reserve_again(self, error: PdserveError, reason: str) -> Reservation:
        """Reserve workers for the next attempt; wait for some if none is ready."""
        model, fleet = self.request.model, self._services.fleet
        deadline = self.request.deadline or math.inf
        give_up_at = min(deadline, fleet.now() + self._services.queue_timeout_s)
        while True:
            unavailable: Unavailable | None = None
            pair_helps = len(self.answer.tokens) + 1 < self.answer.max_tokens
            while (step := self._retry.next(pair_helps=pair_helps)) is not None:
                try:
                    reservation = self._reserve(step, error.message)
                except BudgetExhausted as exhausted:
                    raise self._gave_up(exhausted) from None
                except Unavailable as nowhere:
                    unavailable = nowhere
                    continue
                self._continue(reservation, reason, error.message)
                return reservation
            nobody_is_ready = unavailable is not None or not fleet.has_ready(model)
            if self._retry.is_used_up or not nobody_is_ready:
                tried = " and ".join(self._retry.done)
                after = f" (after {tried})" if tried else ""
                raise self._gave_up(type(error)(f"{error.message}{after}"))
            if not await fleet.capacity_change(until=give_up_at):
                if give_up_at == deadline:
                    raise deadline_passed(self.answer)
                refused = unavailable or Unavailable(f"no worker is ready for model {model}")
                refused.retry_after_s = refused.retry_after_s or UNAVAILABLE_RETRY_AFTER_S
                raise self._gave_up(refused)
            self._retry.restart()

    def _gave_up(self, error: PdserveError) -> PdserveError:
        self._services.metrics.count("fallbacks", self.request.model, "error", error.code)
        return error

    def _reserve(self, constraints: Constraints, cause: str) -> Reservation:
        """Raises BudgetExhausted or another Unavailable."""
        demand, services = self._demand_now(), self._services
        services.budget.take(demand.model, demand.prompt_tokens, services.fleet.now())
        try:
            return services.placer.reserve_again(demand, constraints, cause=cause)
        except Unavailable:
            services.budget.give_back(demand.model, demand.prompt_tokens)
            raise

    def reserve_on(self, member: Member) -> Reservation | None:
        """Reserve an aggregated attempt on `member`, or nothing if it is not ready."""
        try:
            return self._services.placer.reserve_on(member, self._demand)
        except Unavailable:
            return None

    def _demand_now(self) -> Demand:
        """Return the demand of the next attempt: the tokens delivered join the prompt."""
        made = tuple(self.answer.tokens[len(self.request.resume) :])
        return structs.replace(
            self._demand,
            prompt_tokens=self._demand.prompt_tokens + len(made),
            prefill_only=False,
            token_ids=self._demand.token_ids + made,
            hashes={},
        )

    @property
    def revision(self) -> str | None:
        """The revision that it was sent to first; None if its model had no weights."""
        return None if self.first_reservation is None else self.first_reservation.revision

    def _stay_with(self, revision: str | None) -> None:
        """Later attempts use the same revision while it has workers."""
        if self._demand.revision != revision:
            self._demand = structs.replace(self._demand, revision=revision)

    def _continue(self, reservation: Reservation, reason: str, cause: str) -> None:
        """Record that the next attempt uses `reservation`."""
        prefill, tokens = reservation.prefill, len(self.answer.tokens)
        step, kv_from = RetryStep.PAIR.value, "prefill"
        if reservation.producer is not None:
            step = kv_from = LIVE_KV
        elif prefill is None:
            step = RetryStep.AGGREGATED.value
        self._retry.continued(step, reason, tokens)
        self.answer.cause = reason
        model, metrics = self.request.model, self._services.metrics
        metrics.count("fallbacks", model, step, reason)
        if reason != MOVED:
            metrics.count_revision(model, self.revision, "retried")
        self._stay_with(reservation.revision)
        if tokens:
            metrics.count("continuations", model, kv_from)
        workers = [x.worker_id for x in (prefill, reservation.decode) if x is not None]
        logger.info(
            "request %s: %s on %s after %d tokens: %s",
            *(self.request.request_id, step, " and ".join(workers), tokens, cause),
        )

    def move_off(self, worker_id: str, reason: str, *, live_only: bool) -> bool:
        """Continue on another worker, with the KV of this one if possible. Return False, and change
        nothing, if the answer is not there, is nearly done or has nowhere to go."""
        attempt, placer = self._attempt, self._services.placer
        if attempt is None:
            return False
        if (stream := attempt.handoff.exportable(worker_id)) is not None:
            # If there is no worker for it, the prompt can still be computed again.
            with suppress(Unavailable):
                demand = self._demand_now()
                attempt.export(stream, placer.reserve_live(demand, worker_id, cause=reason))
                return True
        if live_only or not attempt.handoff.uses(worker_id):
            return False
        elsewhere = Constraints(RetryStep.PAIR, without=frozenset({worker_id}))
        with suppress(Unavailable):
            attempt.leave(self._reserve(elsewhere, reason))
            return True
        return False

    def receipt(self, admission_s: float) -> Receipt:
        """Charge the answer and sum the seconds of all attempts. The queue time of decode is left
        out, because it passes beside prefill. Workers and transfer are those of the last
        attempt."""
        answer, first = self.answer, self.answer.first_token_stream
        prediction = None if self.first_reservation is None else self.first_reservation.prediction
        queue_s, prefill_s, decode_s, transfer = admission_s, 0.0, 0.0, _NO_TRANSFER
        decode: StreamState | None = None
        for stream in answer.streams:
            if stream.phase is not Phase.PREFILL:
                decode = stream
            report = stream.report
            if report is None:
                continue
            queue_s += report.queue_s if stream.phase is not Phase.DECODE else 0.0
            prefill_s += report.prefill_s
            decode_s += report.decode_s
            transfer = report.transfer or transfer
        if decode is not None and len(answer.tokens) <= 1 and decode.role is not Role.AGGREGATED:
            decode = None  # the one token is that of prefill
        return Receipt(
            queue_s,
            prefill_s,
            transfer.transfer_s,
            transfer.exposed_s,
            decode_s,
            transfer.bytes,
            transfer.blocks,
            "" if first is None else first.worker_id,
            "" if decode is None else decode.worker_id,
            transfer.transport,
            answer.cached_tokens,
            "" if first is None else first.role.value,
            tuple(self._retry.done),
            0.0 if prediction is None else prediction.ttft_s,
            *self.charge(),
        )


_NO_TRANSFER = TransferReport(0.0, 0.0, 0, 0, "")


def combined_receipt(receipts: Sequence[Receipt]) -> Receipt:
    """Return the receipt of several answers to one prompt. They run side by side, so times are
    those of the longest; the workers are those of the answer whose KV was transferred."""
    if len(receipts) == 1:
        return receipts[0]
    return replace(
        next((x for x in receipts if x.transport), receipts[0]),
        queue_s=max(x.queue_s for x in receipts),
        prefill_s=max(x.prefill_s for x in receipts),
        decode_s=max(x.decode_s for x in receipts),
        transfer_bytes=sum(x.transfer_bytes for x in receipts),
        transfer_blocks=sum(x.transfer_blocks for x in receipts),
        fallbacks=tuple(name for x in receipts for name in x.fallbacks),
        cost=sum_known(x.cost for x in receipts),
        energy_j=sum_known(x.energy_j for x in receipts),
    )
