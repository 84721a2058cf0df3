"""Placements with what they take of their workers: made before anything is sent."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdserve.errors import ContextLengthExceeded, Unavailable
from pdserve.types import HandoffStyle, Role
from router.cost.outcome import outcome_of
from router.decisions.log import DecisionLog
from router.ladder import Step
from router.large_pool import LargePool
from router.member import Charge
from router.placement.context import NO_CONTEXT, PlacementContext
from router.placement.live import place_live
from router.placement.pairing import check_known, with_states
from router.placement.policies.by_name import BY_PREFIX, OF_ALL
from router.placement.recompute import or_alone, place_recompute
from router.placement.values import Decision, Demand
from router.prefill_queue import EVERYTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pdserve.types import GenerateRequest, Receipt, Usage
    from router.cost.book import CostBook
    from router.fleet import Fleet
    from router.ladder import Rung
    from router.member import Member
    from router.placement.context import Prediction
    from router.placement.policies.by_name import Policy
    from router.placement.values import Candidate, Placement
    from router.pool import WorkerPool
    from router.prefill_queue import PrefillQueue
    from router.quarantine import Pair


class Booking:
    """A placement and its charges. Releasing again does nothing. `is_trial` says that a pair which
    was quarantined is tried with it; `prediction` is what it is expected to cost. `forks_charge` is
    what the forks take, until each has its own. `source` has decoded before, and gives its KV."""

    __slots__ = (
        "decision",
        "decode",
        "decode_charge",
        "forks_charge",
        "is_trial",
        "prediction",
        "prefill",
        "prefill_charge",
        "source",
    )

    def __init__(
        self,
        decision: Decision,
        placement: Placement,
        pool: WorkerPool,
        *,
        source: Member | None = None,
    ) -> None:
        demand = decision.demand
        self.decision = decision
        self.is_trial = False
        self.source = source
        self.prediction: Prediction | None = None
        self.decode: Member = pool.members[placement.decode.worker_id]
        self.prefill: Member | None = None
        self.prefill_charge: Charge | None = None
        self.forks_charge: Charge | None = None
        if demand.forks:
            self.forks_charge = fork_charge(self.decode, demand, demand.forks)
            demand = demand.without_forks()
        if source is not None:
            self.decode_charge = Charge(self.decode, kv_tokens=demand.kv_tokens)
        elif placement.prefill is None:
            self.decode_charge = whole_charge(self.decode, demand, decision.cached)
        else:
            self.prefill = pool.members[placement.prefill.worker_id]
            to_compute = _to_compute(self.prefill, demand, decision.cached)
            self.prefill_charge = Charge(self.prefill, prompt_tokens=to_compute)
            self.decode_charge = Charge(self.decode, kv_tokens=demand.kv_tokens)

    @property
    def pair(self) -> Pair | None:
        """The workers that exchange KV."""
        giver = self.source or self.prefill
        return None if giver is None else (giver.worker_id, self.decode.worker_id)

    def release(self) -> None:
        self.decode_charge.release()
        if self.prefill_charge is not None:
            self.prefill_charge.release()
        if self.forks_charge is not None:
            self.forks_charge.release()


def whole_charge(member: Member, demand: Demand, cached: Mapping[str, int]) -> Charge:
    """What both phases on one worker take. A prefill worker's blocks are not promised to anyone:
    it holds them for the time of a prefill, and its engine queues."""
    kv_tokens = 0 if member.info.role is Role.PREFILL else demand.kv_tokens
    return Charge(member, prompt_tokens=_to_compute(member, demand, cached), kv_tokens=kv_tokens)


def _to_compute(member: Member, demand: Demand, cached: Mapping[str, int]) -> int:
    """Prompt tokens that are not cached there: an engine computes the last one in any case."""
    return max(1, demand.prompt_tokens - cached.get(member.worker_id, 0))


def fork_charge(member: Member, demand: Demand, forks: int = 1) -> Charge:
    """What `forks` further answers take beside the first."""
    kv_tokens = 0 if member.info.role is Role.PREFILL else forks * demand.fork_tokens
    return Charge(member, kv_tokens=kv_tokens)


_NO_LOG = DecisionLog(0)


@dataclass(frozen=True, slots=True)
class _Look:
    """What a decision is made of, and where it is kept."""

    candidates: Sequence[Candidate]
    context: PlacementContext
    log: DecisionLog


class Booker:
    """Places requests over a fleet by a policy, and has every decision logged. State: the count of
    placements, to break ties."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        context: PlacementContext = NO_CONTEXT,
        costs: CostBook | None = None,
        log: DecisionLog | None = None,
        *,
        prefill_queue: PrefillQueue = EVERYTHING,
        on_room: Callable[[], None] = lambda: None,
        live_kv: bool = True,
    ) -> None:
        self._live_kv = live_kv
        self._fleet = fleet
        self._prefill_queue = prefill_queue
        self._on_room = on_room
        self._costs = costs
        self._context = context
        self._log = DecisionLog(0) if log is None else log
        self._pool = fleet.pool
        self._policy = policy
        self._policy_or_alone = or_alone(policy)
        prefix = context.prefix if policy in BY_PREFIX else None
        may_local = costs is not None and policy not in OF_ALL
        self._large_pool = LargePool(fleet.pool, prefill_queue, prefix, costs, may_local=may_local)
        self._turn = 0

    def demand(self, request: GenerateRequest) -> Demand:
        """What `request` asks for. KV for prompt and answer is capped to the largest worker's.

        Raises ModelNotFound and Unavailable where its model has no workers, and
        ContextLengthExceeded where its prompt and one token fit none of them.
        """
        if not self._pool.of_model(request.model):
            check_known((), request.model, others=self._pool.models())
        token_ids = request.prompt_token_ids + request.resume
        prompt_tokens = len(token_ids)
        max_tokens = request.sampling.max_tokens - len(request.resume)
        prefill_only = max_tokens <= 1
        capacity, block_size = self._pool.largest(request.model, prefill_only=prefill_only)
        if prompt_tokens + min(1, max_tokens) > capacity:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_tokens} tokens, and the largest worker of model "
                f"{request.model} holds the KV of {capacity}",
                field="prompt",
            )
        kv_tokens, forks = min(prompt_tokens + max_tokens, capacity), request.sampling.n - 1
        fork_tokens = _fork_tokens(prompt_tokens, max_tokens, block_size)
        if forks:
            left = (capacity - kv_tokens) // forks
            fork_tokens = min(fork_tokens, left // block_size * block_size)
        return Demand(
            model=request.model,
            prompt_tokens=prompt_tokens,
            kv_tokens=kv_tokens + forks * fork_tokens,
            forks=forks,
            fork_tokens=fork_tokens if forks else 0,
            prefill_only=prefill_only,
            request_id=request.request_id,
            token_ids=token_ids,
        )

    def book(self, demand: Demand, *, cause: str = "") -> Booking | None:
        """A placement now, or None where room must be waited for. `cause` says, for people, why
        the request is placed once more, where it is. Of a large pool some workers are looked at,
        and all where those cannot take it; where that is known before, nothing is, and the log has
        nothing of it. Raises Unavailable."""
        model = demand.model
        if not self._large_pool.is_large(model):
            return self._book_among(demand, self._all(self._pool.candidates(model)), cause)
        if self._large_pool.lacks_room(demand):
            return None
        is_short = self._large_pool.lacks_prefill(demand)
        now = self._fleet.now()
        if is_short and not self._large_pool.looks_local(model, self._turn, now):
            return None
        if self._policy not in OF_ALL and not self._fleet.quarantine.barred(now):
            booking = self._book_drawn(demand, cause)
            if booking is not None or is_short:
                return booking
        booking = self._book_among(demand, self._all(self._pool.candidates(model)), cause)
        if booking is None:
            self._large_pool.all_asked(demand)
        return booking

    def _book_drawn(self, demand: Demand, cause: str) -> Booking | None:
        """Among workers that are drawn; what comes to nothing is not logged."""
        candidates, known, others = self._large_pool.draw(demand, self._turn)
        context = PlacementContext(self._context.prefix and known, self._context.cost)
        try:
            booking = self._book_among(demand, _Look(candidates, context, _NO_LOG), cause)
        except Unavailable:
            return None
        if booking is not None:
            self._log.record(booking.decision, time.time(), cause=cause, not_drawn=others)
        return booking

    def _all(self, candidates: Sequence[Candidate]) -> _Look:
        return _Look(candidates, self._context, self._log)

    def _book_among(self, demand: Demand, look: _Look, cause: str) -> Booking | None:
        busy = self._prefill_queue.busy(look.candidates, demand.prompt_tokens)
        if not busy:
            policy = self._policy if look.log is _NO_LOG else self._policy_or_alone
            return self._book(demand, look, cause, policy=policy)
        free = [c for c in look.candidates if c.worker_id not in busy]
        if any(c.role is not Role.DECODE for c in free):
            try:
                return self._book(demand, replace(look, candidates=free), cause)
            except Unavailable:
                # With those that are busy now it could be placed.
                return None
        # What is left to choose from is a decode worker, where prefill on it is thought to pay.
        return None if self._costs is None else self._book(demand, look, cause, busy)

    def book_again(self, demand: Demand, rung: Rung, *, cause: str) -> Booking:
        """A placement of an admitted request that a worker has failed (`cause` says how, for
        people), as `rung` has it. Raises Unavailable where it leads nowhere."""
        cause = f"{rung.step}: {cause}"
        demand = replace(demand, avoid=rung.avoid)
        candidates = self._pool.candidates(demand.model)
        if rung.step is Step.ONE_WORKER:
            look = self._all(candidates)
            return self._whole(self._decide(place_recompute, demand, look, cause))
        look = self._all([c for c in candidates if rung.takes(c)])
        booking = self._book(demand, look, cause, again=True)
        if booking is None:
            raise Unavailable(f"no decode worker of model {demand.model} has room")
        return booking

    def book_live(self, demand: Demand, source_id: str, *, cause: str) -> Booking:
        """A decode worker that an answer goes on with, with the KV that it has on another. Raises
        Unavailable where there is none."""
        source, now = self._pool.members[source_id], self._fleet.now()
        is_able = source.info.kv is not None and source.info.kv.handoff is HandoffStyle.CONCURRENT
        if not (self._live_kv and is_able):
            raise Unavailable(f"worker {source_id} cannot give the KV of what it decodes")
        demand = replace(demand, barred=self._fleet.quarantine.barred(now))
        look = self._all(self._pool.candidates(demand.model))
        decision = self._decide(place_live(source.seen()), demand, look, f"live_kv: {cause}")
        assert decision.placement is not None, "it does not wait"
        self._turn += 1
        booking = Booking(decision, decision.placement, self._pool, source=source)
        assert booking.pair is not None
        booking.is_trial = self._fleet.quarantine.tries(booking.pair, now)
        return booking

    def _book(
        self,
        demand: Demand,
        look: _Look,
        cause: str,
        busy: Collection[str] = (),
        policy: Policy | None = None,
        *,
        again: bool = False,
    ) -> Booking | None:
        now = self._fleet.now()
        if barred := self._fleet.quarantine.barred(now):
            demand = replace(demand, barred=barred)
        decision = self._decide(policy or self._policy, demand, look, cause, busy, again=again)
        if decision.placement is None:
            return None
        booking = self._take(decision, decision.placement)
        if booking.pair is not None:
            booking.is_trial = self._fleet.quarantine.tries(booking.pair, now)
        return booking

    def _whole(self, decision: Decision) -> Booking:
        assert decision.placement is not None, "a recompute does not wait"
        return self._take(decision, decision.placement)

    def _take(self, decision: Decision, placement: Placement) -> Booking:
        """The prompt counts as ahead of later ones, on its worker, until it is computed."""
        self._turn += 1
        booking = Booking(decision, placement, self._pool)
        if self._costs is not None:
            booking.prediction = self._costs.decided(decision)
            member = booking.prefill or booking.decode
            charge = booking.prefill_charge or booking.decode_charge
            cached = decision.cached.get(member.worker_id, 0)
            tokens = decision.demand.prompt_tokens
            leave = self._costs.enter(member.worker_id, tokens, cached)
            charge.on_prefilled = lambda: self._prefilled(leave)
        elif self._prefill_queue.chunks_ahead:
            (booking.prefill_charge or booking.decode_charge).on_prefilled = self._on_room
        return booking

    def _prefilled(self, leave: Callable[[], None]) -> None:
        leave()
        if self._prefill_queue.chunks_ahead:
            self._on_room()

    def answered(
        self,
        prediction: Prediction | None,
        model: str,
        usage: Usage,
        receipt: Receipt,
        *,
        ttft_s: float,
        e2e_s: float,
    ) -> None:
        """A request was answered at its first attempt; times count from its placement."""
        if self._costs is not None:
            outcome = outcome_of(
                model,
                usage,
                receipt,
                ended_at=self._fleet.now(),
                ttft_s=ttft_s,
                e2e_s=e2e_s,
            )
            self._costs.answered(prediction, outcome)

    def _decide(
        self,
        policy: Policy,
        demand: Demand,
        look: _Look,
        cause: str,
        busy: Collection[str] = (),
        *,
        again: bool = True,
    ) -> Decision:
        """The policy's, logged; to wait, where it means one of `busy`. Unless it is placed `again`
        it goes to nobody whose gaps would be too long with one more."""
        try:
            decision = policy(look.candidates, demand, self._turn, look.context)
            if not again:
                decision = self._held(decision, policy, look)
        except Unavailable as error:
            told = with_states(error, look.candidates)
            refusal = Decision("", look.candidates, demand, self._turn, None)
            look.log.record(refusal, time.time(), cause=cause, refused=told.message)
            raise told from error
        placement = decision.placement
        if placement is not None and (placement.prefill or placement.decode).worker_id in busy:
            decision = replace(decision, placement=None)
        look.log.record(decision, time.time(), cause=cause)
        return decision

    def _held(self, decision: Decision, policy: Policy, look: _Look) -> Decision:
        """It, or another without those that decode and take no more; to wait, where all do."""
        costs, demand, placement = self._costs, decision.demand, decision.placement
        if costs is None or placement is None or costs.takes_one_more(demand, placement.decode):
            return decision
        left = [
            c for c in look.candidates if c.role is Role.PREFILL or costs.takes_one_more(demand, c)
        ]
        if all(c.role is Role.PREFILL for c in left):
            return replace(decision, placement=None)
        return policy(left, demand, self._turn, look.context)


def _fork_tokens(prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """What a fork does not share, in whole blocks: from the block of the prompt's last token on,
    which each answer computes for itself."""
    own = (prompt_tokens - 1) % block_size + 1 + max_tokens
    return -(-own // block_size) * block_size
