"""Choose workers for a request and reserve capacity on them. Nothing is sent here."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from pdserve.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Unavailable
from pdserve.types import HandoffStyle, Role
from router.decisions import DecisionLog
from router.placement.filters import able, with_states
from router.placement.policies import place_aggregated, place_live, place_or_aggregate
from router.placement.revisions import cohort, draw, of_revision
from router.placement.values import (
    NO_CONTEXT,
    Decision,
    Demand,
    MemberState,
    PlacementContext,
)
from router.retry import RetryStep

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pdserve.types import GenerateRequest, WorkerInfo
    from router.fleet.health import Pair
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.placement.cost import CostModel
    from router.placement.policies import Place
    from router.placement.values import Candidate, Prediction
    from router.retry import Constraints

# Prompt tokens of one step of an engine that does not report how many it computes.
ASSUMED_CHUNK_TOKENS = 2048


class _NoRoomError(Unavailable):
    """The request can be placed later."""


class Charge:
    """Capacity that one stream takes of one worker. Releasing it again does nothing."""

    __slots__ = ("_adapter", "_blocks", "_leave_backlog", "_prompt_tokens", "_released", "member")

    def __init__(
        self,
        member: Member,
        prompt_tokens: int = 0,
        kv_tokens: int = 0,
        leave_backlog: Callable[[], None] | None = None,
        adapter: str = "",
    ) -> None:
        self.member = member
        self._adapter = adapter
        self._prompt_tokens = prompt_tokens
        self._blocks = member.blocks_for(kv_tokens)
        self._leave_backlog = leave_backlog
        self._released = False
        member.outstanding_requests += 1
        member.outstanding_tokens += prompt_tokens
        member.reserved_blocks += self._blocks
        if adapter:
            member.use_adapter(adapter)

    def prefilled(self) -> bool:
        """The prompt is computed. Return True if that made room for another prompt."""
        tokens, self._prompt_tokens = self._prompt_tokens, 0
        self.member.outstanding_tokens -= tokens
        if self._leave_backlog is not None:
            self._leave_backlog()
            self._leave_backlog = None
        return tokens > 0

    def release(self) -> None:
        if self._released:
            return
        self._released = True
        self.prefilled()
        self.member.outstanding_requests -= 1
        self.member.reserved_blocks -= self._blocks
        if self._adapter:
            self.member.resident[self._adapter] -= 1


class Reservation:
    """Workers for one attempt, and its charges. Releasing it again does nothing.

    `prefill` computes the prompt for `decode`; without it `decode` does both phases, or continues
    with the KV of `producer`, which has decoded before. `prediction` is what is expected.
    `revision` is that of the workers, None if their model has no weights.
    """

    def __init__(
        self,
        decode: Member,
        *,
        prefill: Member | None = None,
        producer: Member | None = None,
        prompt_tokens: int = 0,
        kv_tokens: int = 0,
        children_kv_tokens: int = 0,
        prediction: Prediction | None = None,
        leave_backlog: Callable[[], None] | None = None,
        adapter: str = "",
        revision: str | None = None,
    ) -> None:
        self.decode, self.prefill, self.producer = decode, prefill, producer
        self.revision = revision
        self.prediction = prediction
        self.prefill_charge: Charge | None = None
        self._children_charge: Charge | None = None
        if decode.info.role is Role.PREFILL:
            # It holds blocks for one prefill only, and promises none.
            kv_tokens = children_kv_tokens = 0
        if children_kv_tokens:
            self._children_charge = Charge(decode, 0, children_kv_tokens, None, adapter)
        if prefill is None:
            self.decode_charge = Charge(decode, prompt_tokens, kv_tokens, leave_backlog, adapter)
        else:
            self.prefill_charge = Charge(prefill, prompt_tokens, 0, leave_backlog, adapter)
            self.decode_charge = Charge(decode, 0, kv_tokens, None, adapter)

    @property
    def pair(self) -> Pair | None:
        """The ids of the workers that exchange KV."""
        producer = self.producer or self.prefill
        return None if producer is None else (producer.worker_id, self.decode.worker_id)

    def release_children(self) -> None:
        """The other answers of a parallel-sampling request reserve for themselves now."""
        if self._children_charge is not None:
            self._children_charge.release()

    def release(self) -> None:
        if self._children_charge is not None:
            self._children_charge.release()
        self.decode_charge.release()
        if self.prefill_charge is not None:
            self.prefill_charge.release()


class Placer:
    """Places requests on the workers of a fleet by a policy and records each decision. State: the
    number of placements, which breaks ties.

    A worker that prefills is given at most `prefill_chunks_ahead` chunks of prompts, or one longer
    prompt; the others wait in the router's queue, where priorities apply. 0 disables that.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Place,
        context: PlacementContext = NO_CONTEXT,
        *,
        costs: CostModel | None = None,
        log: DecisionLog | None = None,
        prefill_chunks_ahead: int = 0,
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._policy_or_aggregated = partial(place_or_aggregate, policy)
        self._context = context
        self._costs = costs
        self._log = DecisionLog(0) if log is None else log
        self._chunks_ahead = prefill_chunks_ahead
        self._turn = 0

    def demand(self, request: GenerateRequest) -> Demand:
        """Return what `request` asks for; its KV is capped to the largest worker's.

        Raises ModelNotFound if its model has no workers, UnsupportedField for a sampling parameter
        that one of them refuses, and ContextLengthExceeded if the prompt and one token fit none.
        """
        members = self._fleet.of_model(request.model)
        if not members:
            if self._fleet.pooling(request.model):
                text = f"model {request.model} has pooling workers alone: it generates no text"
                raise InvalidRequest(text, field="model")
            raise ModelNotFound(f"model {request.model} is not served", field="model")
        for member in members:
            request.sampling.check_supported(member.info.unsupported_fields)
        token_ids = request.prompt_token_ids + request.resume
        prompt_tokens = len(token_ids)
        max_tokens = request.sampling.max_tokens - len(request.resume)
        prefill_only = max_tokens <= 1
        capacity, block_size = self._fleet.largest(request.model, prefill_only=prefill_only)
        if prompt_tokens + min(1, max_tokens) > capacity:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_tokens} tokens, and the largest worker of model "
                f"{request.model} holds the KV of {capacity}",
                field="prompt",
            )
        kv_tokens, children = min(prompt_tokens + max_tokens, capacity), request.sampling.n - 1
        # A child shares all blocks of the prompt but the last.
        own = (prompt_tokens - 1) % block_size + 1 + max_tokens
        children_tokens = children * -(-own // block_size) * block_size
        children_tokens = min(children_tokens, capacity - kv_tokens)
        shares = self._fleet.shares.get(request.model)
        return Demand(
            model=request.model,
            prompt_tokens=prompt_tokens,
            kv_tokens=kv_tokens + children_tokens,
            children_tokens=children_tokens,
            prefill_only=prefill_only,
            request_id=request.request_id,
            token_ids=token_ids,
            adapter=request.adapter_key,
            revision=draw(shares, request.request_id) if shares else None,
            cache_salt=request.cache_salt,
        )

    def reserve(self, demand: Demand) -> Reservation | None:
        """Place a new request. Return None if it must wait for room. Raises Unavailable if waiting
        for room would not help."""
        demand, candidates = self._cohort(demand)
        busy = self._busy(candidates, demand)
        try:
            if not busy:
                return self._reserve(self._policy_or_aggregated, demand, candidates, is_new=True)
            free = [c for c in candidates if c.worker_id not in busy]
            if any(c.role is not Role.DECODE for c in free):
                try:
                    return self._reserve(self._policy, demand, free, is_new=True)
                except Unavailable:
                    return None  # the busy workers can serve it
            if self._costs is None:
                return None
            # What is left is prefill on a decode worker, if the policy finds that cheaper.
            return self._reserve(self._policy, demand, candidates, busy=busy, is_new=True)
        except _NoRoomError:
            return None

    def has_adapter_slot(self, demand: Demand) -> bool:
        """Return False if all workers of a role that have the adapter run as many others as they
        can."""
        if not demand.adapter:
            return True
        demand, candidates = self._cohort(demand)
        found = able(candidates, demand)
        roles = {c.role for c in found if c.can_run(demand.adapter)}
        return all(c.role in roles for c in found)

    def reserve_again(self, demand: Demand, constraints: Constraints, *, cause: str) -> Reservation:
        """Place an admitted request after a failure; `cause` is for `explain`. Raises Unavailable.

        An aggregated attempt waits for no room: its client is reading the answer.
        """
        demand = structs.replace(demand, avoid=constraints.avoid)
        demand, candidates = self._cohort(demand, failed=constraints.failed)
        policy = self._policy
        if constraints.step is RetryStep.AGGREGATED:
            policy = place_aggregated
        else:
            candidates = [c for c in candidates if c.worker_id not in constraints.without]
        return self._reserve(policy, demand, candidates, cause=f"{constraints.step}: {cause}")

    def reserve_on(self, member: Member, demand: Demand) -> Reservation:
        """Reserve an aggregated attempt on a worker that has the KV of the prompt cached. Raises
        Unavailable if it is not ready."""
        demand, _ = self._cohort(demand, beside=member)
        return self._reserve(place_aggregated, demand, [member.seen()], cause="parallel sampling")

    def reserve_live(self, demand: Demand, producer_id: str, *, cause: str) -> Reservation:
        """Reserve a decode worker that continues with the KV of `producer_id`. Raises Unavailable
        if there is none."""
        producer = self._fleet.members[producer_id]
        kv = producer.info.kv
        if kv is None or kv.handoff is not HandoffStyle.CONCURRENT:
            raise Unavailable(f"worker {producer_id} cannot export the KV of a running request")
        policy = partial(place_live, producer.seen())
        demand, candidates = self._cohort(demand, beside=producer)
        return self._reserve(
            policy, demand, candidates, cause=f"live_kv: {cause}", producer=producer
        )

    def _cohort(
        self,
        demand: Demand,
        *,
        failed: frozenset[str] = frozenset(),
        beside: Member | None = None,
    ) -> tuple[Demand, list[Candidate]]:
        """Return `demand` for the revision that serves it now, and the workers of that; without
        weights all. With `beside` it is that of the worker whose KV is used: two revisions may have
        other weights under one name, which their KV does not show."""
        candidates = self._fleet.candidates(demand.model)
        shares = self._fleet.shares.get(demand.model)
        if shares is not None and beside is not None:
            return of_revision(demand, candidates, beside.info.revision)
        if shares is not None:
            return cohort(demand, candidates, shares, failed)
        if demand.revision is not None:
            demand = structs.replace(demand, revision=None, spilled_from=None)
        return demand, candidates

    def _reserve(
        self,
        policy: Place,
        demand: Demand,
        candidates: Sequence[Candidate],
        *,
        cause: str = "",
        busy: Collection[str] = (),
        is_new: bool = False,
        producer: Member | None = None,
    ) -> Reservation:
        """Reserve what the policy decides, and record the decision. Raises Unavailable; if the
        decision is to wait, or for a busy worker, that is a _NoRoomError."""
        if ejected := self._fleet.outliers.ejected(self._fleet.now()):
            demand = structs.replace(demand, excluded=ejected)
        try:
            decision = policy(candidates, demand, self._turn, self._context)
            if is_new:
                decision = self._unsaturated(decision, policy)
        except Unavailable as error:
            told = with_states(error, candidates)
            refusal = Decision("", candidates, demand, self._turn, None)
            self._log.record(refusal, time.time(), cause=cause, refused=told.message)
            raise told from error
        placement = decision.placement
        if placement is not None and (placement.prefill or placement.decode).worker_id in busy:
            decision, placement = structs.replace(decision, placement=None), None
        self._log.record(decision, time.time(), cause=cause)
        if placement is None:
            raise _NoRoomError(f"no decode worker of model {demand.model} has room")
        self._turn += 1
        prediction, leave_backlog = None, None
        if self._costs is not None and producer is None:
            prediction, ticket = self._costs.placed(decision)
            leave_backlog = partial(self._costs.computed, ticket)
        members = self._fleet.members
        prefill = None if placement.prefill is None else members[placement.prefill.worker_id]
        decode = members[placement.decode.worker_id]
        cached = decision.cached.get((prefill or decode).worker_id, 0)
        children_tokens = demand.children_tokens
        return Reservation(
            decode,
            prefill=prefill,
            producer=producer,
            # An engine computes the last token of a prompt even if all of it is cached.
            prompt_tokens=max(1, demand.prompt_tokens - cached) if producer is None else 0,
            kv_tokens=demand.kv_tokens - children_tokens,
            children_kv_tokens=children_tokens,
            prediction=prediction,
            leave_backlog=leave_backlog,
            adapter=demand.adapter,
            revision=demand.revision,
        )

    def _unsaturated(self, decision: Decision, policy: Place) -> Decision:
        """Return `decision`, or place again without saturated decode workers: those whose streams
        would exceed the limit of the SLO with one more. The decision is to wait if all are."""
        costs, demand, placement = self._costs, decision.demand, decision.placement
        if costs is None or placement is None or costs.has_capacity(demand, placement.decode):
            return decision
        left = [
            c
            for c in decision.candidates
            if c.role is Role.PREFILL or costs.has_capacity(demand, c)
        ]
        if all(c.role is Role.PREFILL for c in left):
            return structs.replace(decision, placement=None)
        return policy(left, demand, self._turn, self._context)

    def _busy(self, candidates: Sequence[Candidate], demand: Demand) -> set[str]:
        """Return the workers that prefill and have enough prompts queued in their engine, or run as
        many other LoRA adapters as they can."""

        def has_enough(c: Candidate) -> bool:
            tokens = c.outstanding_tokens + demand.prompt_tokens
            limit = self._chunks_ahead * chunk_tokens(c.info)
            return bool(c.outstanding_tokens and 0 < limit < tokens)

        return {
            c.worker_id
            for c in candidates
            if c.role is not Role.DECODE
            and c.state is MemberState.READY
            and (has_enough(c) or not c.can_run(demand.adapter))
        }


def chunk_tokens(info: WorkerInfo) -> int:
    """Return the prompt tokens that a worker computes in one step."""
    told = info.settings.get("max_num_batched_tokens", "")
    return int(told) if told.isdecimal() and int(told) else ASSUMED_CHUNK_TOKENS
