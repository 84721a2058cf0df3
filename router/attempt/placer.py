"""Choose workers for a request and reserve capacity on them. Nothing is sent here."""

from __future__ import annotations

import time
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

from msgspec import Struct, structs

from pdserve.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Unavailable
from pdserve.kv_compatibility import exchange
from pdserve.types import Role
from router.admission import NoAdapterSlot, NoRoom
from router.attempt.recovery import RetryStep
from router.fleet.shortlist import MOST_DRAWN, Wanted
from router.placement.decisions import DecisionLog
from router.placement.encoders import choose_encoder
from router.placement.filters import eligible, feasible, with_states
from router.placement.policies import (
    Policy,
    place_aggregated,
    place_live,
    place_or_aggregate,
)
from router.placement.revisions import RevisionShares, bound_to, cohort, draw
from router.placement.values import (
    NO_CONTEXT,
    NO_TOKENS_CACHED,
    Decision,
    Demand,
    FoundPrefix,
    MemberState,
    PlacementContext,
    may_hold,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pdserve.types import GenerateRequest
    from router.attempt.recovery import Constraints
    from router.fleet.health import Pair
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.placement.cost import CostModel, QueuedPrompt
    from router.placement.policies import Place
    from router.placement.values import Candidate, Prediction, PrefixFetch


# Times the usual sample, if all decode workers in that are saturated.
SATURATED_FACTOR = 4


class Charge:
    """Capacity that one stream holds on one worker. A second release does nothing."""

    __slots__ = ("_adapter", "_blocks", "_prompt_tokens", "_released", "member")

    def __init__(
        self,
        member: Member,
        prompt_tokens: int = 0,
        kv_tokens: int = 0,
        adapter: str = "",
    ) -> None:
        self.member = member
        self._adapter = adapter
        self._prompt_tokens = prompt_tokens
        self._blocks = member.blocks_for(kv_tokens)
        self._released = False
        placed = member.placed
        placed.outstanding_requests += 1
        placed.outstanding_tokens += prompt_tokens
        placed.reserved_blocks += self._blocks
        if adapter:
            placed.use_adapter(adapter, member.info.limits.max_loras)

    def prefilled(self) -> bool:
        """Release the prompt's share once it is computed. Return True if that made room for another
        prompt."""
        if not self._prompt_tokens:
            return False
        self.member.placed.outstanding_tokens -= self._prompt_tokens
        self.member.roomier.add(self.member)
        self._prompt_tokens = 0
        return True

    def release(self) -> None:
        if self._released:
            return
        self._released = True
        self.prefilled()
        self.member.roomier.add(self.member)
        placed = self.member.placed
        placed.outstanding_requests -= 1
        placed.reserved_blocks -= self._blocks
        if self._adapter:
            placed.resident[self._adapter] -= 1


class Room(Struct, frozen=True):
    """Capacity for one attempt: prompt tokens to compute, tokens of KV to keep, of which
    `children_kv_tokens` are for further answers, a LoRA adapter, and tokens of images to encode."""

    prompt_tokens: int = 0
    kv_tokens: int = 0
    children_kv_tokens: int = 0
    adapter: str = ""
    image_tokens: int = 0


_NO_ROOM = Room()


class Reservation:
    """Workers for one attempt and the capacity held on them. A context manager, whose exit releases
    it. A second release does nothing.

    `prefill` computes the prompt for `decode`. Without it, `decode` runs both phases, or continues
    with the KV of `producer`, the previous decode worker. `prediction` has the expected latencies.
    `revision` is the revision of the workers, None if their model has no weights. `fetch`: cached
    KV to copy from another worker before the prompt is computed. `encoder` computes the embeddings
    of the prompt's images for `prefill`.
    """

    def __init__(
        self,
        decode: Member,
        *,
        prefill: Member | None = None,
        producer: Member | None = None,
        encoder: Member | None = None,
        room: Room = _NO_ROOM,
        prediction: Prediction | None = None,
        queued: tuple[CostModel, QueuedPrompt] | None = None,
        revision: str | None = None,
        fetch: PrefixFetch | None = None,
    ) -> None:
        """`queued`: the prompt in the cost model's queue, which it leaves when `prefilled`."""
        self.decode, self.prefill, self.producer = decode, prefill, producer
        self.revision = revision
        self.prediction, self.fetch = prediction, fetch
        self._queued = queued
        self._released = False
        self.prefill_charge: Charge | None = None
        self.encode_charge = None if encoder is None else Charge(encoder, room.image_tokens)
        self._children_charge: Charge | None = None
        kv_tokens, children_kv_tokens = room.kv_tokens, room.children_kv_tokens
        if decode.info.role is Role.PREFILL:
            # Prefill frees its blocks after one token, so a prefill worker reserves none.
            kv_tokens = children_kv_tokens = 0
        if children_kv_tokens:
            # A separate charge, because it is released before the first answer ends.
            self._children_charge = Charge(decode, 0, children_kv_tokens, room.adapter)
        if prefill is None:
            self.decode_charge = Charge(decode, room.prompt_tokens, kv_tokens, room.adapter)
        else:
            self.prefill_charge = Charge(prefill, room.prompt_tokens, 0, room.adapter)
            self.decode_charge = Charge(decode, 0, kv_tokens, room.adapter)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def pair(self) -> Pair | None:
        """The ids of the workers that exchange KV."""
        producer = self.producer or self.prefill
        return None if producer is None else (producer.worker_id, self.decode.worker_id)

    @property
    def is_pooling(self) -> bool:
        return self.decode.info.role is Role.POOLING

    @property
    def members(self) -> list[Member]:
        """The workers that compute, in order of their phases."""
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]

    def prefilled(self) -> bool:
        """Release the prompt's share once it is computed or abandoned. Return True if that made
        room for another prompt."""
        if self._queued is not None:
            costs, prompt = self._queued
            costs.computed(prompt)
            self._queued = None
        return (self.prefill_charge or self.decode_charge).prefilled()

    def release_children(self) -> None:
        """Release the KV blocks of the other answers to a parallel-sampling request, which from now
        on reserve their own."""
        if self._children_charge is not None:
            self._children_charge.release()

    def release(self) -> None:
        if self._released:
            return
        self._released = True
        self.prefilled()
        if self._children_charge is not None:
            self._children_charge.release()
        for charge in (self.decode_charge, self.prefill_charge, self.encode_charge):
            if charge is not None:
                charge.release()


class Placer:
    """Places requests on the workers of a fleet by a policy and records each decision. State: the
    number of placements, which breaks ties.

    A worker that prefills gets at most `prefill_chunks_ahead` chunks of prompts, or one longer
    prompt. Further prompts wait in the router's queue, because priorities do not apply in an
    engine's queue. 0 disables the limit. A worker without `max_num_batched_tokens` is not limited,
    because its next step computes all prompts.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Place,
        context: PlacementContext = NO_CONTEXT,
        *,
        shares: RevisionShares | None = None,
        costs: CostModel | None = None,
        log: DecisionLog | None = None,
        prefill_chunks_ahead: int = 0,
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._policy_or_aggregated = partial(place_or_aggregate, policy)
        self._context = context
        self._shares = RevisionShares() if shares is None else shares
        self._costs = costs
        self._log = DecisionLog(0) if log is None else log
        self._chunks_ahead = prefill_chunks_ahead
        self._turn = 0

    def demand(
        self, request: GenerateRequest, session_workers: frozenset[str] = frozenset()
    ) -> Demand:
        """Return the resources that `request` needs. Its KV is capped at the largest worker's.
        `session_workers`: ids of the workers of its session's last turn.

        Raises ModelNotFound if its model has no workers, UnsupportedField for a sampling parameter
        that any of them refuses, and ContextLengthExceeded if no worker can hold the prompt and one
        token.
        """
        members = self._fleet.of_model(request.model)
        if not members:
            if self._fleet.pooling(request.model):
                text = f"model {request.model} has pooling workers alone: it generates no text"
                raise InvalidRequest(text, field="model")
            raise ModelNotFound(f"model {request.model} is not served", field="model")
        # Checked against all workers: a decode worker's refusal could come after the first token.
        for fields in self._fleet.unsupported_fields(request.model):
            request.sampling.check_supported(fields)
        token_ids = request.prompt_token_ids
        if request.resume:
            token_ids = (*token_ids, *request.resume)
        prompt_tokens = len(token_ids)
        max_tokens = request.sampling.max_tokens - len(request.resume)
        prefill_only = max_tokens <= 1  # prefill samples the first token
        capacity, block_size = self._fleet.largest(request.model, prefill_only=prefill_only)
        if prompt_tokens + min(1, max_tokens) > capacity:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_tokens} tokens, and the largest worker of model "
                f"{request.model} holds the KV of {capacity}",
                field="prompt",
            )
        kv_tokens, children = min(prompt_tokens + max_tokens, capacity), request.sampling.n - 1
        computes_all = request.sampling.routed_experts and not request.resume
        # A child shares all blocks of the prompt except the last, which it writes to.
        own = (prompt_tokens if computes_all else (prompt_tokens - 1) % block_size + 1) + max_tokens
        children_tokens = children * -(-own // block_size) * block_size
        children_tokens = min(children_tokens, capacity - kv_tokens)
        shares = self._shares.by_model.get(request.model)
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
            media=tuple([(x.hash, x.offset, x.length) for x in request.media]),
            session=request.session,
            session_workers=session_workers,
            regions=request.regions,
            computes_all=computes_all,
        )

    def reserve(self, demand: Demand) -> Reservation:
        """Place a new request. Raises NoAdapterSlot or NoRoom if it has to wait for one, and
        another Unavailable if waiting would not help."""
        if (decision := self._place_on_sample(self._place_new, demand)) is not None:
            return self._hold(decision)
        demand, candidates = self._cohort(demand)
        try:
            return self._reserve(self._place_new, demand, candidates)
        except NoRoom:
            if _has_adapter_slot(candidates, demand):
                raise
            raise NoAdapterSlot(f"no worker has a slot for adapter {demand.adapter}") from None

    def reserve_again(self, demand: Demand, constraints: Constraints, *, cause: str) -> Reservation:
        """Place an admitted request after a failure. `explain` shows `cause`. Raises Unavailable.

        An aggregated attempt ignores missing room, because its client is already reading.
        """
        cause = f"{constraints.step}: {cause}"
        policy = place_aggregated if constraints.step is RetryStep.AGGREGATED else self._policy
        demand = structs.replace(demand, avoid=constraints.avoid)
        bound = structs.replace(demand, without=constraints.without)
        unusable = constraints.without | constraints.avoid | constraints.failed
        if (decision := self._place_on_sample(policy, bound, unusable=unusable)) is not None:
            return self._hold(decision, cause=cause)
        demand, candidates = self._cohort(demand, failed=constraints.failed)
        # Set after the revision is chosen: an excluded worker must not change the revision.
        demand = structs.replace(demand, without=constraints.without)
        return self._reserve(policy, demand, candidates, cause=cause)

    def reserve_on(self, member: Member, demand: Demand) -> Reservation:
        """Reserve an aggregated attempt on `member`, which has the prompt's KV cached. Raises
        Unavailable if it is not ready."""
        demand = self._beside(demand, member)
        return self._reserve(
            place_aggregated, demand, [member.snapshot()], cause="parallel sampling"
        )

    def reserve_live(
        self,
        demand: Demand,
        producer_id: str,
        *,
        cause: str,
        without: frozenset[str] = frozenset(),
    ) -> Reservation:
        """Reserve a decode worker, not in `without`, that continues with the KV of `producer_id`.
        Raises Unavailable if none fits."""
        producer, cause = self._fleet.members[producer_id], f"live_kv: {cause}"
        if producer.info.kv is None:
            raise Unavailable(f"worker {producer_id} cannot export the KV of a running request")
        policy = partial(place_live, producer.snapshot())
        demand = structs.replace(self._beside(demand, producer), without=without)
        unusable = without | {producer_id}
        decision = self._place_on_sample(policy, demand, unusable=unusable, producer=producer)
        if decision is not None:
            return self._hold(decision, cause=cause, producer=producer)
        candidates = self._fleet.candidates(demand.model)
        if demand.revision is not None:
            candidates = [c for c in candidates if c.info.revision == demand.revision]
        return self._reserve(policy, demand, candidates, cause=cause, producer=producer)

    def _place_on_sample(
        self,
        policy: Place,
        demand: Demand,
        *,
        unusable: Collection[str] = (),
        producer: Member | None = None,
    ) -> Decision | None:
        """Decide on a sample of a large fleet. Return None if the fleet is small, or if all workers
        must be compared to decide. `unusable`: workers that are not drawn."""
        fleet, shares = self._fleet, self._shares.by_model.get(demand.model)
        if fleet.shortlist(demand.model) is None:
            return None
        if shares is None:
            demand = bound_to(demand, None)
        elif demand.revision is None or demand.spilled_from is not None:
            demand = bound_to(demand, demand.spilled_from or draw(shares, demand.request_id))
        demand = self._without_ejected(demand)
        shortlist = fleet.shortlist(demand.model, demand.adapter, demand.revision)
        if shortlist is None or not len(shortlist):
            return None
        wanted, context = self._wanted(demand, unusable, producer)
        for most in (wanted.most, SATURATED_FACTOR * wanted.most):
            sample = shortlist.draw(demand, self._turn, wanted._replace(most=most))
            if unusable and not sample.is_whole:
                return None  # only the unusable workers of a role may be left
            try:
                decision = policy(sample.candidates, demand, self._turn, context)
            except Unavailable:
                return None
            if decision.placement is not None or sample.is_full:
                break
            if not self._is_saturated(sample.candidates, demand):
                return None
        if decision.placement is None and (demand.adapter or unusable):
            return None
        return structs.replace(
            decision, not_drawn=len(fleet.of_model(demand.model)) - len(sample.candidates)
        )

    def _wanted(
        self, demand: Demand, unusable: Collection[str], producer: Member | None
    ) -> tuple[Wanted, PlacementContext]:
        """Return the workers to draw, and a context with what their caches hold."""
        policy, context, regions = self._policy, self._context, demand.regions
        cached, most = NO_TOKENS_CACHED, MOST_DRAWN
        roles: tuple[Role, ...] = ()
        if isinstance(policy, Policy):
            most = MOST_DRAWN if policy.decode else 1
            if policy.uses_prefix and context.prefix is not None:
                cached = context.prefix.cached_tokens(demand)
                context = replace(context, prefix=FoundPrefix(cached, context.prefix))
        if demand.prefill_only:
            roles = (Role.PREFILL, Role.AGGREGATED)
        if producer is not None:
            roles = (Role.DECODE,)

        def serves(c: Candidate) -> bool:
            return (
                c.state is MemberState.READY
                and (regions is None or may_hold(regions, c.info.topology))
                and c.capacity_tokens > demand.prompt_tokens
                and c.worker_id not in unusable
                and (producer is None or exchange(producer.kind, c.kind))
            )

        def has_room(c: Candidate) -> bool:
            has_enough = c.role is not Role.DECODE and self._has_enough(c, demand)
            return not has_enough and (c.role is Role.PREFILL or c.has_room(demand))

        return Wanted(most, serves, has_room, roles, cached, demand.session_workers), context

    def _place_new(
        self, candidates: Sequence[Candidate], demand: Demand, turn: int, context: PlacementContext
    ) -> Decision:
        """Place a new request by the policy. Without a placement in the decision, it waits."""
        busy = self._busy(candidates, demand)
        if not busy:
            policy = self._policy_or_aggregated
            return self._unsaturated(policy, candidates, demand, turn, context)
        waits = Decision("", candidates, demand, turn)
        free = [c for c in candidates if c.worker_id not in busy]
        if any(c.role is not Role.DECODE for c in free):
            try:
                return self._unsaturated(self._policy, free, demand, turn, context)
            except Unavailable:
                found = eligible(candidates, demand)
                if found.has_pair or found.aggregated:
                    return waits  # the busy workers can serve it
            try:
                policy = self._policy_or_aggregated
                return self._unsaturated(policy, free, demand, turn, context)
            except Unavailable:
                return waits  # no free worker is ready
        if self._costs is None:
            return waits
        # All prefill workers are busy. Only prefill on a decode worker remains, and only a policy
        # with costs can decide that it is cheaper than waiting.
        decision = self._unsaturated(self._policy, candidates, demand, turn, context)
        placement = decision.placement
        if placement is not None and (placement.prefill or placement.decode).worker_id in busy:
            decision = structs.replace(decision, placement=None)
        return decision

    def _beside(self, demand: Demand, member: Member) -> Demand:
        """Return `demand` for workers that use the KV of `member`. Its revision must be kept,
        because two revisions may have different model weights under one name, and their KV does not
        show it."""
        has_shares = demand.model in self._shares.by_model
        return bound_to(demand, member.info.revision if has_shares else None)

    def _cohort(
        self, demand: Demand, *, failed: frozenset[str] = frozenset()
    ) -> tuple[Demand, list[Candidate]]:
        """Return `demand` with the revision that serves it now, and the workers of that revision. A
        model without weights has one group: all its workers."""
        candidates = self._fleet.candidates(demand.model)
        shares = self._shares.by_model.get(demand.model)
        if shares is not None:
            return cohort(demand, candidates, shares, failed)
        # Rarely anything to do: only weights that were removed bind a demand.
        return demand if demand.revision is None else bound_to(demand, None), candidates

    def _reserve(
        self,
        policy: Place,
        demand: Demand,
        candidates: Sequence[Candidate],
        *,
        cause: str = "",
        producer: Member | None = None,
    ) -> Reservation:
        """Reserve the workers that the policy selects and record the decision.

        Raises NoRoom if the policy decides to wait, and Unavailable otherwise.
        """
        demand = self._without_ejected(demand)
        try:
            decision = policy(candidates, demand, self._turn, self._context)
        except Unavailable as error:
            unavailable = with_states(error, candidates, demand)
            refusal = Decision("", candidates, demand, self._turn, None)
            self._log.record(refusal, time.time(), cause=cause, refused=unavailable.message)
            raise copy(unavailable) from None  # its traceback will refer to `unavailable`
        return self._hold(decision, cause=cause, producer=producer)

    def _without_ejected(self, demand: Demand) -> Demand:
        ejected = self._fleet.outliers.ejected(self._fleet.now())
        return structs.replace(demand, excluded=ejected) if ejected else demand

    def _hold(
        self, decision: Decision, *, cause: str = "", producer: Member | None = None
    ) -> Reservation:
        """Record a decision and reserve its workers. Raises NoRoom if the decision is to wait."""
        demand, placement, encoder = decision.demand, decision.placement, None
        if demand.media and placement is not None and (found := self._fleet.encoding(demand.model)):
            choice = choose_encoder(decision, [m.snapshot() for m in found], self._costs)
            names = {"encoder": choice.worker_id, "encoder_reason": choice.reason}
            decision = structs.replace(decision, **names)
            encoder = self._fleet.members.get(choice.worker_id)
        self._log.record(decision, time.time(), cause=cause)
        if placement is None:
            raise NoRoom(f"no worker of model {demand.model} has room")
        self._turn += 1
        prediction, queued = None, None
        if self._costs is not None and producer is None:
            prediction, prompt = self._costs.placed(decision)
            queued = (self._costs, prompt)
        members = self._fleet.members
        prefill = None if placement.prefill is None else members[placement.prefill.worker_id]
        decode = members[placement.decode.worker_id]
        computes = (prefill or decode).worker_id
        cached, fetch = decision.cached.get(computes, 0), decision.fetches.get(computes)
        children_tokens = demand.children_tokens
        room = Room(
            # An engine computes the last token of a prompt even if all of it is cached.
            prompt_tokens=max(1, demand.prompt_tokens - cached) if producer is None else 0,
            kv_tokens=demand.kv_tokens - children_tokens,
            children_kv_tokens=children_tokens,
            adapter=demand.adapter,
            image_tokens=sum(length for *_, length in demand.media),
        )
        return Reservation(
            decode,
            prefill=prefill,
            producer=producer,
            encoder=encoder,
            room=room,
            prediction=prediction,
            queued=queued,
            revision=demand.revision,
            fetch=fetch if fetch is not None and fetch.worth else None,
        )

    def _unsaturated(
        self,
        policy: Place,
        candidates: Sequence[Candidate],
        demand: Demand,
        turn: int,
        context: PlacementContext,
    ) -> Decision:
        """Apply `policy`, if it chooses a saturated decode worker without all of these.

        A decode worker is saturated if one more stream would take its streams over the limit of the
        SLO. If all are saturated, the decision is to wait.
        """
        decision = policy(candidates, demand, turn, context)
        costs, placement = self._costs, decision.placement
        if costs is None or placement is None or costs.has_capacity(demand, placement.decode):
            return decision
        if self._is_saturated(candidates, demand):
            return structs.replace(decision, placement=None)
        left = [
            c
            for c in candidates
            if may_hold(demand.regions, c.info.topology)
            and (c.role is Role.PREFILL or costs.has_capacity(demand, c))
        ]
        return policy(left, demand, turn, context)

    def _is_saturated(self, candidates: Sequence[Candidate], demand: Demand) -> bool:
        """Return True if one more stream on any of the decode workers would miss the SLO."""
        return self._costs is not None and not any(
            c.role is not Role.PREFILL
            and may_hold(demand.regions, c.info.topology)
            and self._costs.has_capacity(demand, c)
            for c in candidates
        )

    def _busy(self, candidates: Sequence[Candidate], demand: Demand) -> set[str]:
        """Return the ids of prefilling workers whose engine queue is full, or whose adapter slots
        (max_loras) all run other LoRA adapters."""
        return {
            c.worker_id
            for c in candidates
            if c.role is not Role.DECODE
            and may_hold(demand.regions, c.info.topology)
            and c.state is MemberState.READY
            and (self._has_enough(c, demand) or not c.can_run(demand.adapter))
        }

    def _has_enough(self, c: Candidate, demand: Demand) -> bool:
        limit = self._chunks_ahead * c.info.limits.max_num_batched_tokens
        # An idle worker accepts a prompt of any length.
        return bool(
            c.outstanding_tokens and 0 < limit < c.outstanding_tokens + demand.prompt_tokens
        )


def _has_adapter_slot(candidates: Sequence[Candidate], demand: Demand) -> bool:
    """Return False if, for some role, no worker with the adapter has a free adapter slot
    (max_loras)."""
    if not demand.adapter:
        return True
    found = feasible(candidates, demand)
    roles = {c.role for c in found if c.can_run(demand.adapter)}
    return all(c.role in roles for c in found)
