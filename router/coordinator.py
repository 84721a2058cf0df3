"""The one way from a request to its answer, under both faces.

    async with coordinator.generate(request) as answer:
        async for delta in answer: ...

Entering admits, places and submits to both workers at once, and raises PdserveError where it
cannot; `router/flight.py` then works until the answer is complete or its reader leaves.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.config import FallbackConfig
from pdserve.errors import Cancelled, PdserveError, Unavailable
from router.admission import AdmissionController, AdmissionLimits
from router.answer import AnswerStream
from router.booking import Booker
from router.choices import Choices
from router.flight import Flight
from router.ladder import LadderLimits
from router.metrics import RouterMetrics
from router.placement.context import PlacementContext
from router.placement.pairing import check_servable_alone
from router.placement.policies.least_loaded import least_loaded
from router.prefill_queue import EVERYTHING, PrefillQueue
from router.request_span import admit_traced
from router.retry_budget import RetryBudget

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.telemetry import Tracing
    from pdserve.types import GenerateRequest, ModelInfo
    from router.admission.tenants import Tenants
    from router.answer import AnswerBuffer, BufferLimits, Out
    from router.cost.book import CostBook
    from router.decisions.log import DecisionLog
    from router.fleet import Fleet
    from router.member import Member
    from router.placement.policies.by_name import Policy
    from router.releases import Releases


class Coordinator:
    """State: admission, the count of open requests, and whether those who wait are about to be
    looked at. Uses a fleet, which its owner closes."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        limits: AdmissionLimits | None = None,
        tenants: Tenants | None = None,
        request_timeout_s: float | None = 600.0,
        buffer_limits: BufferLimits | None = None,
        metrics: RouterMetrics | None = None,
        policy: Policy = least_loaded,
        fallback: FallbackConfig | None = None,
        costs: CostBook | None = None,
        decisions: DecisionLog | None = None,
        tracing: Tracing | None = None,
        prefill_queue: PrefillQueue = EVERYTHING,
    ) -> None:
        fallback = fallback or FallbackConfig()
        self.metrics = metrics or RouterMetrics()
        self._ladder_limits = LadderLimits(fallback.max_fallbacks, fallback.progress_tokens)
        self._budget = RetryBudget(fallback.tokens_per_s, fallback.burst_s)
        self._fleet = fleet
        self._tracing = tracing
        self._admission = AdmissionController(
            limits or AdmissionLimits(), tenants=tenants, latency=costs
        )
        watches = fleet.watches
        prefix = watches
        self._booker = Booker(
            fleet,
            policy,
            PlacementContext(prefix, costs),
            costs,
            decisions,
            prefill_queue=prefill_queue,
            on_room=self._admission.wake_soon,
            live_kv=fallback.live_kv,
        )
        self._request_timeout_s = request_timeout_s
        self._buffer_limits = buffer_limits
        self._open_requests = 0
        self._flights: set[Flight | Choices] = set()
        # Room or a worker may have come: those who wait try again.
        fleet.subscribe(self._admission.wake)
        fleet.subscribe_moving(self._make_room)
        if tenants is not None:
            self.metrics.tenants.watch(tenants)
        if watches is not None:
            self.metrics.prefix.watch(watches)
        self._show_metrics(fleet)

    def _show_metrics(self, fleet: Fleet) -> None:
        self.metrics.watch_pool(fleet.pool)
        self.metrics.watch_gaps(fleet.gaps)
        self.metrics.watch_gauge(
            "kv_quarantined_pairs",
            "Pairs of workers that are kept apart because KV between them failed.",
            lambda: len(fleet.quarantine.barred(fleet.now())),
        )
        self.metrics.watch_gauge(
            "requests_running", "Requests admitted.", lambda: self._admission.running
        )
        self.metrics.watch_gauge(
            "requests_queued", "Requests waiting for admission.", lambda: self._admission.queued
        )

    @property
    def open_requests(self) -> int:
        """Answers entered and not left."""
        return self._open_requests

    @property
    def running_requests(self) -> int:
        """Requests admitted and not ended."""
        return self._admission.running

    def queued_of(self, model: str) -> int:
        """Requests of one model that wait for admission."""
        return self._admission.queued_of(model)

    @property
    def queued_requests(self) -> int:
        """Requests waiting for admission."""
        return self._admission.queued

    def models(self) -> Mapping[str, ModelInfo]:
        """The models that registered workers serve, by name."""
        return self._fleet.pool.models()

    def check_ready(self) -> None:
        """Raises Unavailable, naming what is missing, unless every model can be served now, be it
        by workers that do both phases."""
        models = self.models()
        if not models:
            raise Unavailable("no worker is registered")
        for name in models:
            check_servable_alone(self._fleet.pool.candidates(name), name)

    def generate(self, request: GenerateRequest) -> AnswerStream:
        """The answer to `request`; nothing happens until it is entered.

        Entering raises ModelNotFound, ContextLengthExceeded, Unavailable, Overloaded or
        DeadlineExceeded; iterating raises WorkerFailed and its kind, DeadlineExceeded, the engine's
        refusals, and Cancelled where the reader fell too far behind.
        """

        async def open_answer(buffer: AnswerBuffer, stack: Releases) -> None:
            if self._tracing is None:
                await self._open(request, buffer, stack)
            else:
                await admit_traced(self._tracing, self._open, request, buffer, stack)

        return AnswerStream(open_answer, self._buffer_limits)

    async def serve(self, request: GenerateRequest, out: Out) -> None:
        """Admit `request`, place it, and write its answer to `out`. Raises PdserveError as
        `generate` does when it is entered and iterated."""
        async with self.generate(request) as answer:
            async for delta in answer:
                if not out.write(delta):
                    raise Cancelled("the client does not read its answer")

    async def _open(self, request: GenerateRequest, buffer: AnswerBuffer, stack: Releases) -> None:
        self._open_requests += 1
        stack.callback(self._closed)
        deadline = self._deadline(request)
        try:
            demand = self._booker.demand(request)
            flight = (Flight if request.sampling.n == 1 else Choices)(
                request,
                deadline=deadline,
                buffer=buffer,
                fleet=self._fleet,
                booker=self._booker,
                metrics=self.metrics,
                budget=self._budget,
                limits=self._ladder_limits,
            )
            slot = await self._admission.acquire(
                request if deadline is request.deadline else replace(request, deadline=deadline),
                lambda: self._booker.book(demand),
                kv_tokens=demand.kv_tokens,
            )
        except PdserveError as error:
            # A name that is not served would make a label of whatever clients send.
            known = request.model if request.model in self.models() else ""
            self.metrics.refused(known, error)
            self.metrics.tenants.refused(request.tenant, error)
            raise
        stack.callback(slot.release)
        stack.callback(flight.close)
        self._flights.add(flight)
        stack.callback(self._flights.discard, flight)
        flight.start(slot.reservation, demand, slot.release)

    def move_off(self, worker_id: str, reason: str, *, live_only: bool = False) -> int:
        """Have the requests that are on a worker go on elsewhere, and say how many do. They take
        their KV along where that can be; with `live_only` none moves without. The others are not in
        need of it or have nowhere to go; they end where they are."""
        flights = list(self._flights)
        return sum(flight.move_off(worker_id, reason, live_only=live_only) for flight in flights)

    def _make_room(self, member: Member, must: bool) -> None:
        reason = f"worker {member.worker_id} is to be empty"
        self.move_off(member.worker_id, reason, live_only=not must)

    def _deadline(self, request: GenerateRequest) -> float | None:
        if self._request_timeout_s is None:
            return request.deadline
        latest = time.monotonic() + self._request_timeout_s
        return latest if request.deadline is None else min(latest, request.deadline)

    def _closed(self) -> None:
        self._open_requests -= 1
