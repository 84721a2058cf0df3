"""The simulated service: the router's own booker, gate, pool and cost book; modelled engines."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from benchmarks.simulation.caches import PrefixCaches
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.flight import Flight, Outcome
from benchmarks.simulation.gaps import Gaps
from benchmarks.simulation.service_model import MODEL_NAME, known_moments, worker_info
from pdserve.config import RouterConfig
from pdserve.errors import PdserveError
from pdserve.types import GenerateRequest, Role, SamplingParams
from router.admission.gate import Gate, Place
from router.admission.limits import AdmissionLimits, bid_of
from router.booking import Booker
from router.cost.book import CostBook
from router.cost.objective import Slo
from router.fleet import Fleet
from router.placement.context import PlacementContext
from router.placement.policies.by_name import POLICIES
from router.prefill_queue import PrefillQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.simulation.arrivals import Arrival
    from benchmarks.simulation.clock import VirtualClock
    from benchmarks.simulation.service_model import ServiceModel
    from router.member import Member

_FOREVER_S = 1e18


@dataclass(frozen=True, slots=True)
class Workers:
    """How many there are of each role."""

    prefill: int = 0
    decode: int = 0
    aggregated: int = 0

    @property
    def by_role(self) -> Mapping[Role, int]:
        return {
            Role.PREFILL: self.prefill,
            Role.DECODE: self.decode,
            Role.AGGREGATED: self.aggregated,
        }

    def __str__(self) -> str:
        apart = f"{self.prefill}P{self.decode}D" if self.prefill or self.decode else ""
        return apart + (f"{self.aggregated}A" if self.aggregated else "")


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The router's configuration. With `as_many_as_seats` as many requests run as the workers have
    seats, whatever it says: its default is made for a few workers."""

    config: RouterConfig = field(default_factory=RouterConfig)
    as_many_as_seats: bool = True


class Service:
    """State: the fleet's members, one engine each, and the requests in flight."""

    def __init__(
        self,
        model: ServiceModel,
        workers: Workers,
        settings: RouterSettings,
        clock: VirtualClock,
        *,
        block_tokens: int = 0,
    ) -> None:
        config = settings.config
        self.model, self.clock = model, clock
        self.gaps = Gaps()
        self.engines: dict[str, Engine] = {}
        self.open_requests = 0
        self.caches: PrefixCaches | None = None
        self._timeout_s = config.request_timeout_s
        self._fleet = Fleet(router_id="simulated", lease_s=_FOREVER_S, clock=clock.now)
        self.members = self._fleet.pool.members
        self._open_engines(workers, block_tokens)
        limits = AdmissionLimits(
            config.max_running_requests, config.max_queued_requests, batch_share=config.batch_share
        )
        if settings.as_many_as_seats:
            limits = AdmissionLimits(self._seats(), config.max_queued_requests)
        self.gate = Gate(limits, clock=clock.now)
        slo = Slo(config.slo.ttft_s, config.slo.tpot_s)
        costs = CostBook(self._fleet.pool, slo, clock.now)
        self.booker = Booker(
            self._fleet,
            POLICIES[config.policy],
            PlacementContext(self.caches, costs),
            costs,
            prefill_queue=PrefillQueue(config.prefill_chunks_ahead),
            drain=self.gate.drain,
            on_room=self.gate.wake,
        )
        self._fleet.subscribe(self.gate.wake)

    def _open_engines(self, workers: Workers, block_tokens: int) -> None:
        wanted = {role: count for role, count in workers.by_role.items() if count}
        models = {role: self.model.engine(role) for role in wanted}
        moments = {role: known_moments(model, role) for role, model in models.items()}
        infos = {
            role: [worker_info(role, i, models[role]) for i in range(count)]
            for role, count in wanted.items()
        }
        if block_tokens:
            capacities = {
                x.worker_id: models[role].capacity_tokens for role in infos for x in infos[role]
            }
            self.caches = PrefixCaches(block_tokens, capacities)
        pool = self._fleet.pool
        for role, of_role in infos.items():
            for info in of_role:
                pool.register(info, self.clock.now_s)
                member = self.members[info.worker_id]
                pool.attached(member)
                pool.measured(member, moments[role])
                self.engines[info.worker_id] = self._engine(member)

    def _engine(self, member: Member) -> Engine:
        engine = Engine(
            member.worker_id,
            self.model.engine(member.info.role),
            self.clock,
            gaps=self.gaps,
            on_load=lambda load: self._fleet.reported(member, load),
            caches=self.caches,
        )
        self._fleet.reported(member, engine.load)
        return engine

    def _seats(self) -> int:
        members = self.members.values()
        return sum(x.info.max_num_seqs for x in members if x.info.role is not Role.PREFILL)

    def ask(self, index: int, arrival: Arrival, on_end: Callable[[Outcome], None]) -> None:
        """A request comes; `on_end` hears once how it ended."""
        now = self.clock.now_s
        request = _request(index, arrival, now + self._timeout_s)
        if self.caches is not None:
            self.caches.prefixes[request.request_id] = arrival.prefix
        self.open_requests += 1
        flight = Flight(self, request, arrival, lambda outcome: self._ended(outcome, on_end))
        try:
            demand = self.booker.demand(request)
            bid = bid_of(request, kv_tokens=demand.kv_tokens, deadline=request.deadline)
            # Prompts of one length are one here, requests are not.
            bid = replace(bid, identity=(index,))
            outcome = self.gate.offer(bid, lambda: self.booker.book(demand), flight)
        except PdserveError as error:
            flight.refused(error)
            return
        if isinstance(outcome, Place):
            flight.place = outcome
            self.gate.settle(outcome)
        else:
            flight.granted(outcome)

    def engine_of(self, member: Member) -> Engine:
        return self.engines[member.worker_id]

    def _ended(self, outcome: Outcome, on_end: Callable[[Outcome], None]) -> None:
        self.open_requests -= 1
        if self.caches is not None:
            self.caches.prefixes.pop(outcome.request_id, None)
        on_end(outcome)

    def leftovers(self) -> list[str]:
        """What is still held, in words; nothing when the last request has ended."""
        found = [
            f"{name} is not empty" for name, engine in self.engines.items() if not engine.is_empty
        ]
        for member in self.members.values():
            held = (member.outstanding_requests, member.outstanding_tokens, member.reserved_blocks)
            if any(held):
                found.append(f"{member.worker_id}: requests, tokens, blocks {held}")
        if self.gate.running or self.gate.queued or self.open_requests:
            found.append(f"{self.gate.running} running, {self.gate.queued} queued")
        return found


def _request(index: int, arrival: Arrival, deadline: float) -> GenerateRequest:
    tokens = _prompt(arrival.prompt_tokens)
    sampling = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
    return GenerateRequest(f"request-{index}", MODEL_NAME, tokens, sampling, deadline)


@lru_cache(maxsize=1024)
def _prompt(tokens: int) -> tuple[int, ...]:
    return (0,) * tokens
