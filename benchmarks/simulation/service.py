"""The simulated service: the router's own booker, gate, pool, cost book and role watcher; modelled
engines."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from benchmarks.simulation.caches import PrefixCaches
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.flight import Flight, Outcome
from benchmarks.simulation.gaps import Gaps
from benchmarks.simulation.roles import RoleMoves
from benchmarks.simulation.service_model import MODEL_NAME, known_moments, worker_info
from pdserve.config import RouterConfig
from pdserve.errors import PdserveError
from pdserve.types import GenerateRequest, Role, SamplingParams
from router.admission.gate import Gate, Place
from router.admission.limits import AdmissionLimits, bid_of
from router.admission.tenants import Tenants
from router.booking import Booker
from router.cost.book import CostBook
from router.cost.objective import slo_of
from router.fleet import Fleet
from router.placement.context import PlacementContext
from router.placement.policies.by_name import POLICIES
from router.prefill_queue import PrefillQueue
from router.roles.watcher import RoleWatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.simulation.arrivals import Arrival
    from benchmarks.simulation.clock import VirtualClock
    from benchmarks.simulation.router_meter import RouterMeter
    from benchmarks.simulation.service_model import EngineModel, ServiceModel
    from pdserve.step_moments import StepMoments
    from pdserve.types import WorkerInfo
    from router.admission.tenants import Tenant
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
    seats, whatever it says: its default is made for a few workers. `tenants` are those that ask;
    with none, whoever comes is taken. `flip_s` is from a worker's last
    request in one role until it is given work in the other."""

    config: RouterConfig = field(default_factory=RouterConfig)
    as_many_as_seats: bool = True
    flip_s: float = 0.5
    tenants: tuple[Tenant, ...] = ()


@dataclass(slots=True)
class Shift:
    """A worker in one of its roles, while it had it."""

    role: Role
    engine: Engine
    since_s: float
    until_s: float = _FOREVER_S

    def seconds(self, horizon_s: float) -> float:
        """Up to `horizon_s`."""
        return max(0.0, min(self.until_s, horizon_s) - self.since_s)


class Service:
    """State: the fleet's members, one engine each, and the requests in flight. `shifts` are all the
    engines that there were. Up to `horizon_s` engines count what they do."""

    def __init__(
        self,
        model: ServiceModel,
        workers: Workers,
        settings: RouterSettings,
        clock: VirtualClock,
        *,
        block_tokens: int = 0,
        horizon_s: float = _FOREVER_S,
        meter: RouterMeter | None = None,
    ) -> None:
        config = settings.config
        self.model, self.clock = model, clock
        self.gaps = Gaps()
        self.engines: dict[str, Engine] = {}
        self.shifts: list[Shift] = []
        self.horizon_s = horizon_s
        self.caches: PrefixCaches | None = None
        self._timeout_s = config.request_timeout_s
        self._flights: dict[Flight, None] = {}
        self._moments: dict[Role, StepMoments] = {}
        self.fleet = Fleet(router_id="simulated", lease_s=_FOREVER_S, clock=clock.now)
        self.members = self.fleet.pool.members
        self._open_engines(workers, block_tokens)
        slo = slo_of(config.slo)
        limits = AdmissionLimits(
            config.max_running_requests,
            config.max_queued_requests,
            batch_share=config.batch_share,
            ttft_s=slo.latest_ttft_s,
        )
        if settings.as_many_as_seats:
            seats = self._seats(any_role=config.roles.auto)
            limits = replace(limits, max_running_requests=seats)
        self.gate = Gate(limits, clock=clock.now, tenants=Tenants(settings.tenants))
        self._meter = meter
        if meter is not None:
            meter.time(self.gate, "offer", "settle", "wake", "leave", "expire")
        costs = CostBook(self.fleet.pool, slo, clock.now)
        self.booker = Booker(
            self.fleet,
            POLICIES[config.policy],
            PlacementContext(self.caches, costs),
            costs,
            prefill_queue=PrefillQueue(config.prefill_chunks_ahead),
            drain=self.gate.drain,
            on_room=self.gate.wake,
        )
        if meter is not None:
            meter.time(self.booker, "demand", "answered")
            meter.count(self.booker, "book")
        self.fleet.subscribe(self.gate.wake)
        watcher = RoleWatcher(self.fleet, costs, config.roles, queued=self.gate.queued_of)
        self.roles = RoleMoves(self, watcher, config.roles, settings.flip_s)
        if config.roles.auto:
            self.roles.start()

    @property
    def open_requests(self) -> int:
        return len(self._flights)

    def _open_engines(self, workers: Workers, block_tokens: int) -> None:
        infos = [
            worker_info(role, i, self.model.engine(role))
            for role, count in workers.by_role.items()
            for i in range(count)
        ]
        if block_tokens:
            capacities = {x.worker_id: x.block_size * x.total_blocks for x in infos}
            self.caches = PrefixCaches(block_tokens, capacities)
        for info in infos:
            self.open(info)

    def open(self, info: WorkerInfo, *, draining: bool = False) -> None:
        """A worker registers, with an empty engine; one of its name is replaced."""
        pool, role, now = self.fleet.pool, info.role, self.clock.now_s
        model = self.model.engine(role)
        pool.register(info, now)
        member = self.members[info.worker_id]
        pool.attached(member)
        pool.measured(member, self._known(role, model))
        pool.renew(info.worker_id, info.epoch, now, load=None, draining=draining)
        engine = Engine(
            info.worker_id,
            model,
            self.clock,
            gaps=self.gaps,
            on_load=lambda load: self.fleet.reported(member, load),
            caches=self.caches,
        )
        engine.horizon_s = self.horizon_s
        before = self.engines.get(info.worker_id)
        for shift in self.shifts if before is not None else ():
            if shift.engine is before:
                shift.until_s = now
        self.engines[info.worker_id] = engine
        self.shifts.append(Shift(role, engine, now))
        self.fleet.reported(member, engine.load)

    def _known(self, role: Role, model: EngineModel) -> StepMoments:
        found = self._moments.get(role)
        if found is None:
            found = self._moments[role] = known_moments(model, role)
        return found

    def _seats(self, *, any_role: bool) -> int:
        infos = [x.info for x in self.members.values()]
        return sum(x.max_num_seqs for x in infos if any_role or x.role is not Role.PREFILL)

    def ask(self, index: int, arrival: Arrival, on_end: Callable[[Outcome], None]) -> None:
        """A request comes; `on_end` hears once how it ended."""
        now = self.clock.now_s
        request = _request(index, arrival, now + (arrival.within_s or self._timeout_s))
        if self.caches is not None:
            self.caches.prefixes[request.request_id] = arrival.prefix

        def ended(outcome: Outcome) -> None:
            self._ended(flight)
            on_end(outcome)

        flight = Flight(self, request, arrival, ended)
        self._flights[flight] = None
        try:
            demand = self.booker.demand(request)
            bid = bid_of(request, kv_tokens=demand.kv_tokens, deadline=request.deadline)
            # Prompts of one length are one here, requests are not.
            bid = replace(bid, identity=(index,))
            waiter = flight if self._meter is None else self._meter.untimed(flight)
            outcome = self.gate.offer(bid, lambda: self.booker.book(demand), waiter)
        except PdserveError as error:
            flight.refused(error)
            return
        if isinstance(outcome, Place):
            flight.wait(outcome)
            self.gate.settle(outcome)
        else:
            flight.granted(outcome)

    def engine_of(self, member: Member) -> Engine:
        return self.engines[member.worker_id]

    def leave(self, engine: Engine) -> int:
        """Requests that are on `engine` go on elsewhere; how many."""
        return sum(flight.leave(engine) for flight in list(self._flights))

    def _ended(self, flight: Flight) -> None:
        del self._flights[flight]
        if self.caches is not None:
            self.caches.prefixes.pop(flight.request_id, None)

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
    request_id = f"request-{index}"
    tenant = arrival.tenant
    return GenerateRequest(request_id, MODEL_NAME, tokens, sampling, deadline, tenant=tenant)


@lru_cache(maxsize=1024)
def _prompt(tokens: int) -> tuple[int, ...]:
    return (0,) * tokens
