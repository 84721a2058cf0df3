"""Simulation of a service: the real router and worker code with fake engines, in virtual time.

Only the engines are modelled. The event loop does not sleep: when no task can run, its clock jumps
to the next timer. Router and workers share one process. The cost of an engine step is linear in its
prompt tokens and its decoding requests.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
import socket
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from benchmarks.client import ServedModel, Target, piece_of
from benchmarks.errors import BenchError, TargetError
from benchmarks.replay import ReplaySettings, read_json, run_replay
from benchmarks.traces import Trace, TraceMeta, TraceRequest
from benchmarks.workload import shape_workload
from kv_transfer.settings import ConnectorConfig
from pdserve.background import background
from pdserve.config import ScalingConfig, SessionRetentionConfig
from pdserve.deploy.scaling.scaler import Bounds, Scaler
from pdserve.errors import PdserveError
from pdserve.net import deadline
from pdserve.types import GenerateRequest, ModelInfo, Role, WorkerInfo
from router.control.autoscaler import loads_of
from router.fleet.billing import Billing
from router.fleet.checks import run_checks
from router.fleet.link_pool import LinkPool
from router.fleet.open import DEFAULT_FLEET_LIMITS, OpenedFleet
from router.fleet.prefix_watch import PrefixWatcher
from router.fleet.registry import Fleet
from router.metrics import RouterMetrics
from router.request_path import PathLimits, build_request_path
from workers.control.worker_intake import WorkerIntake
from workers.fake.engine import FakeEngine
from workers.fake.lockstep import FakeLockstep
from workers.fake.settings import FakeSettings
from workers.link.router_link import OpenLinks, RouterLink
from workers.service import WorkerService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
    from pathlib import Path

    from benchmarks.client import Piece, Request
    from benchmarks.metrics import RequestTimeline, Summary
    from benchmarks.progress import Progress
    from benchmarks.replay import ReplayResult
    from benchmarks.workload import Shape
    from pdserve.config import RouterConfig
    from router.attempt.answer import AnswerDelta
    from router.fleet.member import Member
    from router.request_path import RequestPath
    from router.serve import RequestServer

_MODEL: Final = ModelInfo("simulated", "", 1 << 20, 1024, "float32")
_NEVER_S: Final = 1e9
_LOOK_S: Final = 1.0
_TICK_S: Final = 1e-6
_OF_ENGINE: Final = ("model", "kv", "block_size", "total_blocks", "limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs in seconds. An engine step costs `step_s`, plus `prefill_s` per prompt token and
    `decode_s` per decoding request. `transfer_s`: time between the end of prefill and the first
    decode step. `far_transfer_s` is added between regions.

    The defaults were measured with the demo model on one core of a server from 2023.
    """

    step_s: float = 0.004
    prefill_s: float = 0.00004
    decode_s: float = 0.0002
    transfer_s: float = 0.002
    far_transfer_s: float = 0.1

    @classmethod
    def read(cls, path: Path) -> Costs:
        """Return the costs in a JSON file. Raises BenchError."""
        try:
            return cls(**{name: float(x) for name, x in read_json(path).items()})
        except (BenchError, ValueError, TypeError, AttributeError) as error:
            raise BenchError(f"{path} holds no step costs: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A service and its load. Requests arrive at a mean of `rate_per_s`, with the trace's spacing.
    The workers of each role are distributed over `regions` in turn; the router is in the first.
    `scale`: if set, the prefill and decode workers scale with the load, from their given number up
    to this number per role. A new worker takes `cold_start_s` to start. `prefill`, `decode` and
    `aggregated` count data-parallel groups of `*_ranks` workers."""

    prefill: int = 0
    decode: int = 0
    aggregated: int = 0
    prefill_ranks: int = 1
    decode_ranks: int = 1
    aggregated_ranks: int = 1
    regions: int = 1
    scale: int = 0
    cold_start_s: float = 0.0
    costs: Costs = Costs()
    retention: SessionRetentionConfig = field(default_factory=SessionRetentionConfig)
    max_num_seqs: int = 64
    total_blocks: int = 8192
    rate_per_s: float = 4.0
    requests: int = 400
    seed: int = 0
    slo_s: Mapping[str, float]

    @property
    def name(self) -> str:
        roles = (role for role in _ROLES if getattr(self, role))
        return "".join(f"{_in_groups(self, role)}{role[0].upper()}" for role in roles)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when no task can run."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        # Advance by at least one tick: because of rounding errors, a timer may be set again for the
        # current time, and the clock would never advance.
        return super().call_at(max(when, self.time() + _TICK_S), callback, *args, context=context)


class _VirtualSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if timeout is None and not ready:
            raise RuntimeError("the simulation waits for something that never happens")
        if not ready:
            self.now += timeout or 0.0
        return ready


def connect_in_process(new_links: Mapping[str, Callable[[], RouterLink]]) -> Any:
    """Return the connect function for `Fleet`. `new_links` makes the worker's end of a connection,
    by the worker's id."""

    async def connect(info: WorkerInfo, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        await loop.connect_accepted_socket(new_links[info.worker_id], theirs)
        await loop.create_connection(make_protocol, sock=ours)

    return connect


class _SimulatedTarget(Target):
    """A router in this process."""

    kind = "simulated"

    def __init__(self, server: RequestServer, timeout_s: float) -> None:
        super().__init__("virtual time")
        self._server = server
        self._timeout_s = timeout_s

    async def _models(self) -> list[ServedModel]:
        return [ServedModel(_MODEL.name, _MODEL.max_model_len, _MODEL.vocab_size)]

    async def stream(self, request: Request) -> AsyncIterator[Piece]:
        out = _Out()
        made = GenerateRequest(
            request.request_id,
            request.model,
            request.body,
            request.sampling,
            deadline=deadline.after(self._timeout_s),
            session=request.session,
        )
        serving = asyncio.create_task(self._server.serve(made, out))
        serving.add_done_callback(lambda _: out.pieces.put_nowait(None))
        while (piece := await out.pieces.get()) is not None:
            yield piece
        try:
            await serving
        except PdserveError as error:
            raise TargetError(f"{type(error).__name__}: {error}") from None


class _Out:
    """The destination of one answer in the router. None in `pieces` ends it."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[Piece | None] = asyncio.Queue()

    def write(self, delta: AnswerDelta) -> bool:
        self.pieces.put_nowait(piece_of(delta))
        return True


def simulate(
    setup: Setup, config: RouterConfig, trace: Trace, shape: Shape, progress: Progress
) -> ReplayResult:
    """Simulate the replay of a trace and return its result. The same setup always has the same
    result. Raises BenchError."""
    settings = ReplaySettings(
        trace=trace.meta.name,
        shape=replace(shape, limit=setup.requests),
        rate_per_s=setup.rate_per_s,
        seed=setup.seed,
        warmup=0,
        drain_timeout_s=_NEVER_S,
        slo_s=setup.slo_s,
    )
    if setup.scale and (setup.aggregated or setup.scale < max(setup.prefill, setup.decode)):
        raise BenchError("--scale must not be below --prefill and --decode, without --aggregated")
    if setup.scale and max(setup.prefill_ranks, setup.decode_ranks) > 1:
        raise BenchError("--scale does not scale data-parallel groups: remove --*-ranks")
    random.seed(setup.seed)  # for the jitter of pauses
    scaled: list[dict[str, float]] = []

    async def serve() -> ReplayResult:
        clock = asyncio.get_running_loop().time
        async with AsyncExitStack() as stack:
            target = await _start(setup, config, stack, scaled)
            return await run_replay(settings, target, progress, trace=trace, clock=clock)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        result = runner.run(serve())
    return replace(
        result,
        target={**result.target, "name": setup.name, **_crossings(setup, result.records)}
        | ({"scaled": scaled} if scaled else {}),
        settings={**result.settings, **asdict(setup), "policy": config.policy},
    )


def _in_groups(service: Setup | CapacityPlan, role: str) -> str:
    """Return the number of a role's workers, as `2` or, of groups of four, `2x4`."""
    count, ranks = getattr(service, role), getattr(service, f"{role}_ranks")
    return f"{count}x{ranks}" if ranks > 1 else str(count)


def _region(setup: Setup, number: int) -> str:
    return f"r{number % setup.regions}"


def _crossings(setup: Setup, records: Iterable[RequestTimeline]) -> dict[str, float]:
    """Return the share of answers whose KV was sent between regions, and the share that was decoded
    outside the router's region. Empty with one region."""
    found = [record.receipt for record in records if record.receipt]
    if setup.regions == 1 or not found:
        return {}
    places = [
        [str(receipt[name]).rpartition("@")[2] for name in ("prefill_worker", "decode_worker")]
        for receipt in found
    ]
    crossed = sum(bool(x["transport"]) and p != d for x, (p, d) in zip(found, places, strict=True))
    away = sum(decode != _region(setup, 0) for _, decode in places)
    return {"kv_between_regions": crossed / len(found), "decoded_away": away / len(found)}


async def _start(
    setup: Setup, config: RouterConfig, stack: AsyncExitStack, scaled: list[dict[str, float]]
) -> _SimulatedTarget:
    """Start router and workers. Changes of the number of workers are appended to `scaled`."""
    new_links: dict[str, Callable[[], RouterLink]] = {}
    fleet = Fleet(lease_s=_NEVER_S, health=config.health, topology={"region": _region(setup, 0)})
    watcher = PrefixWatcher(DEFAULT_FLEET_LIMITS.prefix_blocks)
    stack.push_async_callback(watcher.aclose)
    connect = connect_in_process(new_links)
    link_pool = LinkPool(fleet, router_id="router", connect=connect, watches=watcher)
    metrics = RouterMetrics(config.slo)
    billing = Billing(config.prices, metrics.count)
    router = build_request_path(
        config,
        OpenedFleet(fleet, link_pool, billing, watcher),
        metrics,
        {},
        limits=PathLimits(decisions_kept=1),
    )

    async def add(role: Role, number: int, group: str, lockstep: FakeLockstep | None) -> None:
        region = _region(setup, number)
        name = f"{role}-{number}" + (f"@{region}" if setup.regions > 1 else "")
        settings = FakeSettings(
            max_num_seqs=setup.max_num_seqs,
            total_blocks=setup.total_blocks,
            **asdict(setup.costs),
            far_producers=f"*@r[!{region[1:]}]" if setup.regions > 1 else "",
            prefix_cache=True,
            listens=False,
        )
        kv = None if role is Role.AGGREGATED else ConnectorConfig()
        fake = FakeEngine(_MODEL, settings, kv, name, lockstep, setup.retention)
        service, links = WorkerService(fake, WorkerIntake(role)), OpenLinks()
        new_links[name] = partial(RouterLink, name, service, links)
        stack.push_async_callback(links.closed)
        stack.push_async_callback(service.close)
        engine = await service.start()
        described: dict[str, Any] = {field: getattr(engine, field) for field in _OF_ENGINE}
        described |= dict.fromkeys(("worker_id", "instance_id", "address", "session_address"), name)
        fleet.register(WorkerInfo(role=role, group=group, topology={"region": region}, **described))

    for role in map(Role, _ROLES):
        ranks = getattr(setup, f"{role}_ranks")
        for first in range(0, getattr(setup, role) * ranks, ranks):
            group, lockstep = (f"{role}-{first}", FakeLockstep()) if ranks > 1 else ("", None)
            for number in range(first, first + ranks):
                await add(role, number, group, lockstep)
    await stack.enter_async_context(link_pool)
    checks = partial(run_checks, fleet, link_pool, billing)
    await stack.enter_async_context(background("fleet-checks", checks))
    await stack.enter_async_context(background("admit", router.admit_queued))
    if setup.scale:
        more = partial(add, group="", lockstep=None)
        follow = partial(_follow_load, setup, router, more, scaled)
        await stack.enter_async_context(background("scale", follow))
    # Wait until the router has connected to the workers, so that they are ready for the first
    # request.
    await asyncio.sleep(1.0)
    return _SimulatedTarget(router.server, config.request_timeout_s)


async def _follow_load(
    setup: Setup,
    router: RequestPath,
    add: Callable[[Role, int], Awaitable[None]],
    scaled: list[dict[str, float]],
) -> None:
    """Start and remove workers as the scaler decides. Removed workers finish their requests
    first."""
    fleet, costs, loop = router.workers.fleet, router.costs, asyncio.get_running_loop()
    started = {role: getattr(setup, role) for role in (Role.PREFILL, Role.DECODE)}
    bounds = {role: Bounds(least, setup.scale) for role, least in started.items()}
    scaler, starting = Scaler(bounds, ScalingConfig(), started), deque[tuple[float, Role]]()
    while True:
        await asyncio.sleep(_LOOK_S)
        members = [m for m in fleet.of_model(_MODEL.name) if not m.lost]
        loads = loads_of(
            members,
            queued=router.admission.queued_of(_MODEL.name),
            means=costs.means(_MODEL.name),
            step_model=costs.step_model,
            tpot_s=costs.slo.tpot_s,
        )
        wanted = scaler.decide(loads.needs, loop.time())
        counts: dict[Role, int] = {}
        for role, want in wanted.items():
            serving = [m for m in members if m.info.role is role and not m.reported.draining]
            counts[role] = len(serving) + sum(x is role for _, x in starting)
            for _ in range(counts[role], want):
                starting.append((loop.time() + setup.cold_start_s, role))
            for member in sorted(serving, key=_unfinished)[: max(0, len(serving) - want)]:
                fleet.renew(member.worker_id, member.info.instance_id, load=None, draining=True)
        for member in members:
            if member.reported.draining and not any(_unfinished(member)):
                fleet.deregister(member.worker_id, member.info.instance_id)
        while starting and starting[0][0] <= loop.time():
            _, role = starting.popleft()
            await add(role, started[role])
            started[role] += 1
        if counts != wanted:
            counts_now = {role.value: float(want) for role, want in wanted.items()}
            scaled.append({"at_s": loop.time(), **counts_now})


def _unfinished(member: Member) -> tuple[int, int]:
    return member.placed.outstanding_requests, member.placed.outstanding_tokens


def drawn_trace(mean_input: int, mean_output: int, *, requests: int, seed: int) -> Trace:
    """Return a trace with random arrivals. Lengths have gamma distributions with a standard
    deviation of half the mean."""
    chance = random.Random(f"lengths {seed}")

    def draw(mean: int) -> int:
        return max(1, round(chance.gammavariate(4.0, mean / 4.0)))

    at_s = itertools.accumulate(chance.expovariate(1.0) for _ in range(requests))
    rows = tuple(TraceRequest(x, draw(mean_input), draw(mean_output)) for x in at_s)
    meta = TraceMeta(name=f"{mean_input} tokens in, {mean_output} out", format="drawn")
    return Trace(meta, rows)


# -- capacity planning: a first guess by arithmetic, then a search by simulation

BUSY: Final = 0.8  # share of a worker's capacity that the first guess uses
MOST_WORKERS: Final = 24  # a larger service is planned by scaling down the load
MOST_TRIES: Final = 40
_ROLES: Final = ("prefill", "decode", "aggregated")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """A service that meets the SLOs. `prefill`, `decode` and `aggregated` count data-parallel
    groups of `*_ranks` workers. `cost_per_million`: price of a million output tokens."""

    prefill: int
    decode: int
    aggregated: int
    prefill_ranks: int
    decode_ranks: int
    aggregated_ranks: int
    attainment: float
    requests_per_s: float
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    cost_per_million: float | None

    @property
    def workers(self) -> int:
        return _workers(self)

    def row(self) -> list[object]:
        """Return the cells of the table."""
        numbers = ", ".join(f"{_in_groups(self, role)} {role}" for role in _ROLES[:2])
        whole = _in_groups(self, _ROLES[2]) if self.aggregated_ranks > 1 else ""
        service = numbers if self.prefill else f"{whole} aggregated".strip()
        times_ms = [x if x is None else x * 1000 for x in (self.ttft_p99_s, self.tpot_p99_s)]
        rest = [f"{self.attainment:.1%}", self.requests_per_s, *times_ms, self.cost_per_million]
        return [service, self.workers, *rest]


def _workers(service: Setup | CapacityPlan) -> int:
    return sum(getattr(service, role) * getattr(service, f"{role}_ranks") for role in _ROLES)


@dataclass(frozen=True, slots=True)
class Planner:
    """Searches for the smallest service that meets the SLOs. `setup` defines the load; its numbers
    of workers are ignored."""

    setup: Setup
    config: RouterConfig
    trace: Trace
    shape: Shape
    target: float
    price: float | None
    progress: Progress

    def plans(self) -> list[CapacityPlan]:
        """Return the smallest disaggregated and the smallest aggregated service found. Raises
        BenchError if even a single request misses the SLOs."""
        alone = replace(self.setup, prefill=1, decode=1, rate_per_s=0.01, requests=20)
        if not self._passes(self._run(alone)):
            raise BenchError("a request alone in the service misses the SLOs: no number helps")
        prefill, decode = self._guess()
        guess = replace(self.setup, prefill=prefill, decode=decode, aggregated=0)
        scale = min(max(1, ceil(_workers(guess) / MOST_WORKERS)), max(prefill, decode))
        small = replace(self.setup, rate_per_s=self.setup.rate_per_s / scale)
        first = replace(small, prefill=ceil(prefill / scale), decode=ceil(decode / scale))
        groups = ceil(_workers(first) / self.setup.aggregated_ranks)
        whole = replace(small, prefill=0, decode=0, aggregated=groups)
        return [self._search(start, scale) for start in (first, whole)]

    def _guess(self) -> tuple[int, int]:
        """Return the first guess of prefill and decode groups: load / capacity of one group."""
        s, costs = self.setup, self.setup.costs
        cut = shape_workload(self.trace, self.shape).cut
        answer_s = cut.mean_output * (costs.step_s + s.max_num_seqs * costs.decode_s)
        prefill_s = costs.step_s + cut.mean_input * costs.prefill_s
        prefill = s.rate_per_s * prefill_s / BUSY / s.prefill_ranks
        decode = s.rate_per_s * answer_s / s.max_num_seqs / BUSY / s.decode_ranks
        return max(1, ceil(prefill)), max(1, ceil(decode))

    def _search(self, setup: Setup, scale: int) -> CapacityPlan:
        """Add workers of the limiting role until the SLOs are met, then remove unneeded ones."""
        summary = self._run(setup)
        for _ in range(MOST_TRIES):
            if self._passes(summary):
                break
            setup = _more(setup, summary)
            summary = self._run(setup)
        else:
            raise BenchError(f"{setup.name} still misses the SLOs after {MOST_TRIES} tries")
        for kind in _ROLES:
            while (count := getattr(setup, kind)) > 1:
                less = replace(setup, **{kind: count - 1})
                found = self._run(less)
                if not self._passes(found):
                    break
                setup, summary = less, found
        counts = {role: getattr(setup, role) * scale for role in _ROLES}
        ranks = {name: getattr(setup, name) for name in (f"{role}_ranks" for role in _ROLES)}
        tokens_per_h = summary.output_tokens_per_s * scale * 3600
        cost = None
        if self.price is not None and tokens_per_h:
            cost = self.price * _workers(setup) * scale / tokens_per_h * 1e6
        ttft, tpot = summary.latency["ttft"], summary.latency["tpot"]
        return CapacityPlan(
            **counts,
            **ranks,
            attainment=0.0 if summary.slo is None else summary.slo.attainment,
            requests_per_s=summary.completed_per_s * scale,
            ttft_p99_s=None if ttft is None else ttft.p99,
            tpot_p99_s=None if tpot is None else tpot.p99,
            cost_per_million=cost,
        )

    def _run(self, setup: Setup) -> Summary:
        self.progress.step(f"simulating {setup.name}")
        return simulate(setup, self.config, self.trace, self.shape, self.progress).summary()

    def _passes(self, summary: Summary) -> bool:
        return summary.slo is not None and summary.slo.attainment >= self.target


def _more(setup: Setup, summary: Summary) -> Setup:
    """Return the setup with a tenth more workers, at least one, of the role whose limit is exceeded
    most."""

    def excess(metric: str) -> float:
        found, limit_s = summary.latency[metric], setup.slo_s.get(metric)
        return 0.0 if found is None or limit_s is None else found.p95 / limit_s

    kind = "decode" if excess("tpot") > excess("ttft") else "prefill"
    kind = "aggregated" if setup.aggregated else kind
    count = getattr(setup, kind)
    return replace(setup, **{kind: count + ceil(count / 10)})
