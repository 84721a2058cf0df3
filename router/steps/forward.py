"""Forwards a request to another region (router.peers) that this region does not serve.

A request is served here first, unless the router drains, no worker is ready, or another region is
predicted to answer much sooner. If it is refused or fails here, or in another region, it continues
where it may be, after the tokens that were delivered. A request of another region is served here
or refused: the router that its client called tries the others, so no request goes in circles.
"""

from __future__ import annotations

import time
from copy import copy
from typing import TYPE_CHECKING

from msgspec import structs

from pdserve.errors import (
    LIMITS_OF_TENANTS,
    BudgetExhausted,
    InternalError,
    Overloaded,
    PdserveError,
    Refusal,
    Unavailable,
    WorkerFailed,
)
from pdserve.types import Receipt, ServiceClass
from router.admission import UNAVAILABLE_RETRY_AFTER_S
from router.attempt.forwarded import forward, new_answers, request_to_pb
from router.placement.peers import choose_peer
from router.placement.values import Decision, Demand, shown_regions
from router.steps.ledger import ROUTER, TOKEN_BYTES, DataTransfer
from router.walk import Answered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.types import GenerateRequest, ModelInfo
    from router.admission import AdmissionController
    from router.attempt.answer import AnswerDelta, Out
    from router.attempt.retry_budget import RetryBudget
    from router.fleet.peers import RegionPeers
    from router.fleet.region_load import RegionLoad
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics
    from router.placement.cost import CostModel
    from router.placement.decisions import DecisionLog
    from router.placement.peers import PeerChoice
    from router.steps.ledger import ResidencyLedger
    from router.steps.session import Sessions
    from router.walk import Proceed, Walk

# In receipts and metrics: why a request was not served in its own region, besides refusals.
DRAINED, NO_WORKER, SPILL_OVER = "drained", "no_worker", "spill_over"
FORWARDED = "forwarded"


class ForwardStep:
    """Raises what its own region raised, if no other one serves the request either."""

    def __init__(
        self,
        peers: RegionPeers,
        load: RegionLoad,
        models: Callable[[], Mapping[str, ModelInfo]],
        sessions: Sessions,
        *,
        fleet: Fleet,
        costs: CostModel,
        admission: AdmissionController,
        budget: RetryBudget,
        metrics: RouterMetrics,
        decisions: DecisionLog,
        ledger: ResidencyLedger,
    ) -> None:
        """`load`: of this region. `models`: those of all regions by name. `budget`: of retries."""
        self._peers, self._load, self._models = peers, load, models
        self._sessions, self._fleet, self._costs = sessions, fleet, costs
        self._admission, self._budget, self._metrics = admission, budget, metrics
        self._decisions, self._ledger = decisions, ledger

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        peers, own = self._peers, self._peers.region
        if not (peers.by_region or peers.draining):
            return await proceed(walk)
        if walk.request.from_region:
            if peers.draining:
                raise Unavailable(f"region {own} is drained", reason=Refusal.REGION_DRAINED)
            return await proceed(walk)
        failure: PdserveError | None = None
        tried: set[str] = set()
        reason, here_s = self._why_leave(walk.request)
        while True:
            place, choice = own, None
            if reason:
                choice = self._choose(walk.request, tried, here_s)
                place = choice.region or own
            if choice is not None and place == own and (own in tried or not self._serves(walk)):
                self._record(walk, choice, reason, refused=True)
                raise copy(failure or self._refusal(walk.request, choice)) from None
            try:
                if choice is None or place == own:
                    return await proceed(_here(walk, tried))
                self._record(walk, choice, reason)
                return await self._forward(walk, place, reason)
            except (Overloaded, Unavailable, WorkerFailed) as error:
                walk = _rest(walk, error)
                # What this region says is the truth for its client, and when to try again.
                if failure is None or place == own:
                    failure = copy(error)
                reason, here_s = error.reason or error.code, None
            tried.add(place)

    def _why_leave(self, request: GenerateRequest) -> tuple[str, float | None]:
        """Return why a request is not served here first, "" if it is, and the TTFT here that
        another region must beat."""
        if self._peers.draining:
            return DRAINED, None
        if not self._fleet.has_ready(request.model, request.regions):
            is_updating = self._load.is_updating(request.model)
            return "" if is_updating else NO_WORKER, None
        # A later turn of a session finds its history here. Requests of batches have time.
        if request.service_class is ServiceClass.BATCH or self._sessions.find(request) is not None:
            return "", None
        load = self._load.models().get(request.model)
        here_s = None if load is None else load.predicted_s(len(request.prompt_token_ids))
        if here_s is None or here_s <= self._costs.slo.ttft_s:
            return "", None
        return SPILL_OVER, here_s

    def _serves(self, walk: Walk) -> bool:
        return bool(not self._peers.draining and self._fleet.of_model(walk.request.model))

    def _choose(
        self, request: GenerateRequest, tried: set[str], here_s: float | None
    ) -> PeerChoice:
        own, views = self._load.models().get(request.model), self._peers.views()
        return choose_peer(views, request, own, without=tried, here_s=here_s)

    def _refusal(self, request: GenerateRequest, choice: PeerChoice) -> Unavailable:
        """Return the error of a request that neither this region nor another one serves."""
        own, why = self._peers.region, Refusal.NO_WORKER_IN_REGION
        text = f"no worker of model {request.model} is in region {own}"
        if self._peers.draining:
            why, text = Refusal.REGION_DRAINED, f"region {own} is drained"
        others = "; ".join(f"{x}: {reason}" for x, reason in choice.reasons.items())
        text = f"{text}, and no other one serves the request ({others or 'there is none'})"
        return Unavailable(text, retry_after_s=UNAVAILABLE_RETRY_AFTER_S, reason=why)

    async def _forward(self, walk: Walk, region: str, reason: str) -> Answered:
        """Have another region serve the request. Write its answer."""
        request, record, peer = walk.request, walk.record, self._peers.by_region[region]
        model, now = self._models().get(request.model), self._fleet.now
        tokens = len(request.prompt_token_ids) + len(request.resume)
        limit = self._admission.elsewhere(request)
        if record.admitted:  # it was computed before
            limit = self._budget.taking(request.model, tokens, now())
        tokenizer = "" if model is None else model.tokenizer
        with limit:
            try:
                message = await request_to_pb(
                    request, tokenizer=tokenizer, from_region=self._peers.region
                )
            except OSError as error:
                raise InternalError("the router's disk failed: the images are lost") from error
            before = record.receipt or Receipt()  # of what failed here
            answers = record.answers = new_answers(request, walk.out)
            peer.sends(request)
            self._metrics.count("forwarded_requests", request.model, region, reason)
            try:
                last = await forward(peer, message, answers, request.deadline)
            except PdserveError as error:
                self._metrics.count("forward_failures", request.model, region, error.code)
                raise
            finally:
                first = [x.first_token_at for x in answers if x.first_token_at is not None]
                record.admitted = record.admitted or min(first, default=0.0)
                self._write_ledger(request, region, sum(len(x.tokens) for x in answers))
        _complete(last, request, region, reason, before)
        record.usage, record.receipt, record.is_partial = last.usage, last.receipt, False
        if first:
            record.ttft_s = min(first) - record.arrived
            self._metrics.observe("forwarded_ttft_seconds", record.ttft_s, request.model, region)
        walk.out.write(last)
        return Answered(answers, last, last.usage, last.receipt)

    def _write_ledger(self, request: GenerateRequest, region: str, tokens: int) -> None:
        peer, ledger = f"{ROUTER}-{region}", self._ledger
        regions = {ROUTER: ledger.region, peer: region}
        prompt = TOKEN_BYTES * (len(request.prompt_token_ids) + len(request.resume))
        images = 0 if request.pixels is None else request.pixels.size
        sizes = (("prompt", prompt), ("images", images))
        moved = [DataTransfer(kind, ROUTER, peer, size) for kind, size in sizes if size]
        if made := tokens - request.sampling.n * len(request.resume):
            moved.append(DataTransfer("answer", peer, ROUTER, TOKEN_BYTES * made))
        for transfer in moved:
            ledger.moved(request.tenant, request.request_id, transfer, regions)

    def _record(
        self, walk: Walk, choice: PeerChoice, reason: str, *, refused: bool = False
    ) -> None:
        """Record the choice of a region for `explain`."""
        request = walk.request
        demand = Demand(
            request.model,
            len(request.prompt_token_ids),
            0,
            request_id=request.request_id,
            session=request.session,
        )
        decision = Decision("", (), demand, 0)
        self._decisions.record(
            decision,
            time.time(),
            cause=reason,
            refused="no region serves it" if refused else "",
            forwarded_to=choice.region,
            peers=choice.reasons,
        )


def _rest(walk: Walk, error: PdserveError) -> Walk:
    """Return the walk of the rest of a request that failed. Raises `error` if nothing else can
    serve it."""
    request, answers = walk.request, walk.record.answers
    if isinstance(error, BudgetExhausted) or error.reason in LIMITS_OF_TENANTS:
        raise error
    tokens = max((len(x.tokens) for x in answers), default=0) - len(request.resume)
    if tokens <= 0:
        return walk
    if request.sampling.n > 1:  # the answers are of different lengths
        raise error
    return structs.replace(walk, request=structs.replace(request, resume=tuple(answers[0].tokens)))


def _here(walk: Walk, tried: set[str]) -> Walk:
    """Return the walk of a request in this region, after other ones were `tried`."""
    return structs.replace(walk, out=_Visited(walk.out, tried)) if tried else walk


class _Visited:
    """Adds the regions that had data of a request to its receipt."""

    def __init__(self, out: Out, regions: set[str]) -> None:
        self._out, self._regions = out, regions

    def write(self, delta: AnswerDelta) -> bool:
        if delta.receipt is not None and delta.usage is not None:
            delta.receipt.regions = tuple(sorted(self._regions | {*delta.receipt.regions}))
            delta.usage.inference_geo = shown_regions(delta.receipt.regions)
        return self._out.write(delta)


def _complete(
    last: AnswerDelta, request: GenerateRequest, region: str, reason: str, before: Receipt
) -> None:
    """Add to usage and receipt of another region what this router knows. `before`: receipt of what
    this region did."""
    usage, receipt = last.usage, last.receipt
    assert usage is not None, "the last delta has usage and receipt"
    assert receipt is not None, "the last delta has usage and receipt"
    receipt.forwarded_to, receipt.render_s = region, request.render_s
    receipt.regions = tuple(sorted({*receipt.regions, *before.regions, region}))
    receipt.spans = (*before.spans, *receipt.spans)
    receipt.stale_kv_tokens = max(before.stale_kv_tokens, receipt.stale_kv_tokens)
    receipt.fallbacks = (f"{FORWARDED}:{reason}", *receipt.fallbacks)
    usage.inference_geo = shown_regions(receipt.regions)
