"""Opens the request path: admission, placement, steps and attempts."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from pdserve.background import background
from pdserve.observe.telemetry import open_tracing
from pdserve.process.child_pool import execute, start_module
from pdserve.process.entry_points import PROCESSES, entry_point
from pdserve.types import StaleKv
from router.admission import AdmissionController, Tenants
from router.admission.memory import MediaMemory
from router.attempt import specs
from router.attempt.copies import PrefixFetcher
from router.attempt.failover import EXPORT_TIMEOUT_S, Failover, Mover
from router.attempt.observer import StreamObserver
from router.attempt.placer import Placer
from router.attempt.pooling_placer import ATTEMPTS, POOLING_STEPS, PoolingPlacer
from router.attempt.recovery import RecoveryLimits
from router.attempt.retry_budget import RetryBudget
from router.attempt.suspects import Suspects
from router.fleet.on_demand import OnDemandModels
from router.fleet.peers import RegionPeers
from router.fleet.region_load import RegionLoad, can_leave
from router.fleet.served_models import ServedModels
from router.guardrails.open import no_guards
from router.placement.cost import MAX_PAIRS, REFIT_S, CostModel
from router.placement.decisions import DecisionLog
from router.placement.policies import POLICIES
from router.placement.revisions import RevisionShares
from router.placement.values import PlacementContext
from router.serve import Answering, EmbeddingServer, EmbedSteps, GenerateSteps, RequestServer
from router.steps.account import AccountPoolingStep, AccountStep
from router.steps.adapters import AdaptersStep
from router.steps.admit import AdmitStep
from router.steps.audit import AuditQueue, AuditStep
from router.steps.capsule import NO_CAPSULES, CapsuleStep
from router.steps.forward import ForwardStep
from router.steps.guard import GuardStep
from router.steps.ledger import NO_LEDGER, LedgerStep
from router.steps.log import RECORDS_KEPT, CountInputsStep, LogStep, RequestLog, make_log
from router.steps.media import MediaStep
from router.steps.parse import ParseStep
from router.steps.parser_process import ParserProcess
from router.steps.poison import PoisonStep
from router.steps.session import Sessions, SessionStep
from router.steps.trace import TraceStep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from pdserve.config import RouterConfig
    from pdserve.observe.telemetry import Tracing
    from pdserve.process.child_pool import Start
    from pdserve.types import Adapter, GenerateRequest
    from router.fleet.open import OpenedFleet
    from router.fleet.registry import Fleet
    from router.guardrails.guard import Guards
    from router.guardrails.open import GuardsOf
    from router.metrics import RouterMetrics
    from router.placement.policies import Place
    from router.steps.capsule import Capsules
    from router.steps.ledger import ResidencyLedger
    from router.walk import RequestStep

NOT_PARSED = ParseStep(None)
# Limit of the prompts queued on a worker: this many chunks, or one longer prompt.
PREFILL_CHUNKS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class PathLimits:
    """Times and bounds that have no configuration key. See the classes that get them."""

    export_timeout_s: float = EXPORT_TIMEOUT_S
    refit_s: float = REFIT_S
    max_pairs: int = MAX_PAIRS
    records_kept: int = RECORDS_KEPT
    decisions_kept: int = 1024  # requests whose placement `pdserve explain` shows
    prefill_chunks_ahead: int = PREFILL_CHUNKS_AHEAD
    policy: Place | None = None  # replaces `router.policy` in tests


DEFAULT_PATH_LIMITS = PathLimits()


@dataclass(frozen=True, slots=True)
class RequestPath:
    """The parts that the APIs and operations of a router use, and their dependencies. `generating`
    also moves answers off a worker. `embeddings` places embeddings. `open_adapters` counts the open
    requests of each LoRA adapter. `peers`: the other regions. `load`: of this region.
    requests of each LoRA adapter. `guards` check answers in the path, and prompts before it.
    `audits`: the answers that wait for an audit, None without audits.
    """

    workers: OpenedFleet
    metrics: RouterMetrics
    server: RequestServer
    embedder: EmbeddingServer
    generating: Answering
    embeddings: PoolingPlacer
    models: ServedModels
    admission: AdmissionController
    costs: CostModel
    shares: RevisionShares
    decisions: DecisionLog
    log: RequestLog
    sessions: Sessions
    media_memory: MediaMemory
    open_adapters: AdaptersStep
    on_demand: OnDemandModels | None
    peers: RegionPeers
    load: RegionLoad
    guards: Guards
    capsules: Capsules
    audits: AuditQueue | None

    async def admit_queued(self) -> None:
        """Admit queued requests whenever a worker or room is available. Runs until cancelled."""
        while True:
            await self.workers.fleet.capacity_change()
            self.admission.wake()


class _Placing(NamedTuple):
    """Parts that admit requests and choose their workers."""

    costs: CostModel
    admission: AdmissionController
    shares: RevisionShares
    decisions: DecisionLog
    placer: Placer
    pooling: PoolingPlacer
    suspects: Suspects


def _build_placing(config: RouterConfig, workers: OpenedFleet, limits: PathLimits) -> _Placing:
    fleet, links = workers.fleet, workers.link_pool.links
    costs = CostModel(
        fleet, config.slo, fleet.now, refit_s=limits.refit_s, max_pairs=limits.max_pairs
    )
    admission = AdmissionController(
        config.queue,
        max_ttft_s=config.slo.ttft_s * config.slo.reject_factor,
        tenants=Tenants(config.tenants),
        latency=costs,
        slots=partial(attrgetter("slots"), fleet),
        clock=fleet.now,
    )
    shares, decisions = RevisionShares(), DecisionLog(limits.decisions_kept)
    placer = Placer(
        fleet,
        limits.policy or POLICIES[config.policy],
        PlacementContext(workers.watcher, costs, fetches=config.fetch_cached_kv),
        shares=shares,
        costs=costs,
        log=decisions,
        prefill_chunks_ahead=limits.prefill_chunks_ahead,
    )
    suspects = Suspects(fleet, links, config.retry)
    return _Placing(costs, admission, shares, decisions, placer, PoolingPlacer(fleet), suspects)


def _build_answering(
    config: RouterConfig,
    workers: OpenedFleet,
    placing: _Placing,
    metrics: RouterMetrics,
    limits: PathLimits,
    budget: RetryBudget,
    leaves: Callable[[GenerateRequest], bool],
) -> tuple[Answering, Answering]:
    """Return the parts that generate answers and compute embeddings."""
    fleet, links = workers.fleet, workers.link_pool.links
    placer, suspects, observer = placing.placer, placing.suspects, StreamObserver(fleet)
    failover = Failover(fleet, placer, budget, suspects, metrics, leaves)
    generating = Answering(
        links,
        observer,
        failover,
        RecoveryLimits(config.queue, config.retry, stale_kv=StaleKv(config.weights.stale_kv)),
        specs.generation,
        PrefixFetcher(fleet, links, observer, placing.costs, metrics),
        Mover(placer, failover, limits.export_timeout_s),
    )
    embedding = Answering(
        links,
        observer,
        Failover(fleet, placing.pooling, RetryBudget(0.0), suspects, metrics),
        RecoveryLimits(config.queue, config.retry, POOLING_STEPS, ATTEMPTS - 1),
        specs.pooling,
    )
    return generating, embedding


class _LastingParts(NamedTuple):
    """Parts that remember something between requests."""

    models: ServedModels
    on_demand: OnDemandModels | None
    log: RequestLog
    sessions: Sessions
    media_memory: MediaMemory
    open_adapters: AdaptersStep


def _build_kept(
    config: RouterConfig,
    fleet: Fleet,
    adapters: Mapping[str, Adapter],
    peers: RegionPeers,
    limits: PathLimits,
) -> _LastingParts:
    on_demand = None
    if names := config.on_demand_models:
        on_demand = OnDemandModels(names, fleet, adapters, config.queue)
    return _LastingParts(
        ServedModels(fleet, adapters, on_demand, peers),
        on_demand,
        make_log(limits.records_kept),
        Sessions(fleet.now, idle_s=config.session_idle_s),
        MediaMemory(config.images.memory_mib << 20, config.images.disk_mib << 20),
        AdaptersStep(),
    )


class _Regions(NamedTuple):
    """The other regions, this one's load, which requests may leave, and where data was."""

    peers: RegionPeers
    load: RegionLoad
    leaves: Callable[[GenerateRequest], bool]
    ledger: ResidencyLedger


class _OptionalSteps(NamedTuple):
    """Steps that depend on the configuration."""

    trace: TraceStep | None
    guard: GuardStep | None
    parse: RequestStep
    capsule: CapsuleStep | None
    ledger: LedgerStep | None
    audit: AuditStep | None


def _build_steps(
    workers: OpenedFleet,
    placing: _Placing,
    kept: _LastingParts,
    regions: _Regions,
    optional: _OptionalSteps,
    poison: PoisonStep,
    budget: RetryBudget,
    metrics: RouterMetrics,
) -> GenerateSteps:
    fleet, costs, admission = workers.fleet, placing.costs, placing.admission
    return GenerateSteps(
        log=LogStep(kept.log, metrics, kept.models.models, fleet.now),
        trace=optional.trace,
        media=MediaStep(kept.media_memory),
        guard=optional.guard,
        parse=optional.parse,
        adapters=kept.open_adapters,
        poison=poison,
        forward=ForwardStep(
            regions.peers,
            regions.load,
            kept.models.models,
            kept.sessions,
            fleet=fleet,
            costs=costs,
            admission=admission,
            budget=budget,
            metrics=metrics,
            decisions=placing.decisions,
            ledger=regions.ledger,
        ),
        capsule=optional.capsule,
        session=SessionStep(kept.sessions, metrics),
        admit=AdmitStep(admission, placing.placer, fleet.now, regions.leaves),
        ledger=optional.ledger,
        audit=optional.audit,
        account=AccountStep(workers.billing, metrics, costs, fleet),
    )


def _build_audits(
    config: RouterConfig, capsule: CapsuleStep | None, metrics: RouterMetrics, fleet: Fleet
) -> tuple[AuditQueue | None, AuditStep | None]:
    """Return the queue of answers to audit, and the step that fills it."""
    if not config.audit.is_on:
        return None, None
    queue = AuditQueue(config.audit.max_waiting)
    evidence = None if capsule is None else capsule.evidence
    step = AuditStep(config.audit, queue, metrics.count, fleet.now, random.random, evidence)
    return queue, step


def _build_embedder(
    workers: OpenedFleet,
    placing: _Placing,
    embedding: Answering,
    poison: PoisonStep,
    ledger: LedgerStep | None,
    metrics: RouterMetrics,
) -> EmbeddingServer:
    steps = EmbedSteps(
        outcomes=CountInputsStep(metrics),
        poison=poison,
        admit=AdmitStep(placing.admission, placing.pooling, workers.fleet.now),
        ledger=ledger,
        account=AccountPoolingStep(workers.billing, metrics.count),
    )
    return EmbeddingServer(steps, embedding, workers.fleet.now)


def build_request_path(
    config: RouterConfig,
    workers: OpenedFleet,
    metrics: RouterMetrics,
    adapters: Mapping[str, Adapter],
    *,
    tracing: Tracing | None = None,
    parse: RequestStep = NOT_PARSED,
    limits: PathLimits = DEFAULT_PATH_LIMITS,
    ledger: ResidencyLedger = NO_LEDGER,
    peers: RegionPeers | None = None,
    guards_of: GuardsOf = no_guards,
    capsules: Capsules = NO_CAPSULES,
) -> RequestPath:
    """Build the request path. The simulator and tests use this too. `adapters`: the served LoRA
    adapters by name. `peers`: None for no other region. `guards_of`: see open_guards."""
    fleet = workers.fleet
    peers = RegionPeers(config.topology.region) if peers is None else peers
    placing = _build_placing(config, workers, limits)
    kept = _build_kept(config, fleet, adapters, peers, limits)
    load = RegionLoad(fleet, placing.costs, placing.admission, adapters)
    regions = _Regions(peers, load, partial(can_leave, peers, load), ledger)
    budget = RetryBudget(config.retry.tokens_per_s)
    generating, embedding = _build_answering(
        config, workers, placing, metrics, limits, budget, regions.leaves
    )
    poison = PoisonStep(placing.suspects)
    trace = None if tracing is None else TraceStep(tracing)
    written = None if ledger.file is None else LedgerStep(ledger)
    embedder = _build_embedder(workers, placing, embedding, poison, written, metrics)
    guards = guards_of(embedder.embed)
    capsule = CapsuleStep(capsules, placing.decisions, fleet.now) if capsules.is_on else None
    audits, audit = _build_audits(config, capsule, metrics, fleet)
    guard = GuardStep(guards) if guards else None
    optional = _OptionalSteps(trace, guard, parse, capsule, written, audit)
    generate = _build_steps(workers, placing, kept, regions, optional, poison, budget, metrics)
    return RequestPath(
        workers=workers,
        metrics=metrics,
        server=RequestServer(generate, generating, fleet.now),
        embedder=embedder,
        generating=generating,
        embeddings=placing.pooling,
        models=kept.models,
        admission=placing.admission,
        costs=placing.costs,
        shares=placing.shares,
        decisions=placing.decisions,
        log=kept.log,
        sessions=kept.sessions,
        media_memory=kept.media_memory,
        open_adapters=kept.open_adapters,
        on_demand=kept.on_demand,
        peers=peers,
        load=load,
        guards=guards,
        capsules=capsules,
        audits=audits,
    )


def parser_start(command: Sequence[str]) -> Start:
    """Return what starts a parser process: `router.parsers.command`, or ours if it is empty."""
    if command:
        return partial(execute, command)
    return partial(start_module, entry_point(PROCESSES, "parser").module)


@asynccontextmanager
async def open_request_path(
    config: RouterConfig,
    router_id: str,
    workers: OpenedFleet,
    metrics: RouterMetrics,
    adapters: Mapping[str, Adapter],
    limits: PathLimits = DEFAULT_PATH_LIMITS,
    ledger: ResidencyLedger = NO_LEDGER,
    peers: RegionPeers | None = None,
    guards_of: GuardsOf = no_guards,
    capsules: Capsules = NO_CAPSULES,
) -> AsyncIterator[RequestPath]:
    """Open the request path for the context, with its tracing and its parser process, and admit
    queued requests. `adapters`: the served LoRA adapters by name. `peers`: the other regions."""
    async with AsyncExitStack() as stack:
        tracing = open_tracing(config.otlp_endpoint, service="pdserve-router", instance=router_id)
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        parser = ParserProcess(metrics, parser_start(config.parsers.command))
        stack.push_async_callback(parser.close)
        parse = ParseStep(parser)
        path = build_request_path(
            config,
            workers,
            metrics,
            adapters,
            tracing=tracing,
            parse=parse,
            limits=limits,
            ledger=ledger,
            peers=peers,
            guards_of=guards_of,
            capsules=capsules,
        )
        await stack.enter_async_context(background("admit-queued-requests", path.admit_queued))
        yield path
