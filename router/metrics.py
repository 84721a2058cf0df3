"""Prometheus metrics of the router.

A request is observed once, at its end. Workers are counted when the metrics are scraped.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from collections import defaultdict
from contextlib import asynccontextmanager
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from pdserve.background import background
from pdserve.observe.metrics import (
    METRICS,
    Histogram,
    Kind,
    KvCollector,
    family,
    histogram_family,
    render,
    watch_tasks,
)
from pdserve.security.tls import CertificateCollector
from pdserve.types import Role
from router.fleet.view import worker_views
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from pdserve.config import RouterConfig, SloConfig
    from pdserve.observe.metrics import Labelled, Row
    from pdserve.types import Receipt, Usage
    from router.admission import AdmissionController
    from router.admission.memory import MemoryGuard
    from router.fleet.peers import RegionPeers
    from router.fleet.prefix_watch import PrefixWatcher
    from router.fleet.registry import Fleet
    from router.fleet.view import WorkerView
    from router.placement.peers import PeerView
    from router.placement.revisions import RevisionShares

# Listed here, so that each metric exists from the start and a misspelt name is a KeyError.
_COUNTERS = (
    *("requests", "refusals", "fallbacks", "continuations", "slo_requests"),
    *("forwarded_requests", "forward_failures", "peer_requests"),
    *("api_responses", "guard_verdicts"),
    *("prompt_tokens", "cached_tokens", "generation_tokens", "kv_transfer_bytes"),
    *("audits", "pair_probes", "worker_probes", "parser_restarts"),
    *("body_process_failures", "responses_not_stored", "revision_requests"),
    *("tenant_answers", "tenant_tokens", "tenant_refusals", "tenant_cost"),
    *("session_turns", "recomputed_tokens", "fetched_images"),
    *("kv_fetches", "kv_fetched_tokens", "kv_fetched_blocks"),
    *("engine_seconds", "cost", "energy_joules", "cost_saved"),
    *("model_choices", "escalations", "weights_updates", "capsules"),
)
_LOADS = (
    *("num_running_reqs", "num_waiting_reqs", "kv_cache_usage", "session_blocks"),
    *("preemptions", "draft_tokens", "accepted_draft_tokens"),
)


async def measure_loop_lag(observe: Callable[[float], None], period_s: float = 0.1) -> None:
    """Observe the delay of the event loop in seconds, once per period."""
    while True:
        # Not loop.time(): uvloop updates it once per iteration, so it misses slow callbacks.
        due = time.monotonic() + period_s
        await asyncio.sleep(period_s)
        observe(max(0.0, time.monotonic() - due))


class _Histograms(dict[tuple[str, ...], Histogram]):
    """Histograms of one metric by labels, each created at its first use."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds

    def __missing__(self, labels: tuple[str, ...]) -> Histogram:
        found = self[labels] = Histogram(self._bounds)
        return found


class RouterMetrics(Collector):
    """All metrics of one router. Counters and histograms are plain numbers, because
    prometheus_client's cost a request ten times as much."""

    def __init__(self, slo: SloConfig) -> None:
        self.registry = CollectorRegistry()
        self.slo = slo
        self._counts = {name: defaultdict[tuple[str, ...], float](float) for name in _COUNTERS}
        self._histograms = {
            spec.name: _Histograms(spec.bounds)
            for spec in METRICS.values()
            if spec.kind is Kind.HISTOGRAM
        }
        # Metrics read from other parts at each scrape: name, and function that returns the rows.
        self._readings: list[tuple[str, Callable[[], Iterable[Row]]]] = []
        self._fleet: Fleet | None = None
        self._models_seen: set[str] = set()  # models that had workers
        self.registry.register(self)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition for Prometheus and its content type."""
        return render(self.registry, accept)

    def collect(self) -> Iterator[Metric]:
        for name, counts in self._counts.items():
            yield family(name, counts.items())
        for name, histograms in self._histograms.items():
            yield histogram_family(name, histograms.items())
        for name, rows in self._readings:
            yield family(name, rows())
        if self._fleet is not None:
            for name, found in _worker_rows(worker_views(self._fleet), self._models_seen):
                yield family(name, found)

    def watch(
        self,
        fleet: Fleet,
        admission: AdmissionController,
        watcher: PrefixWatcher | None,
        shares: RevisionShares,
        role_loads: Callable[[], Iterable[Row]],
        roles_wanted: Callable[[], Iterable[Row]],
    ) -> None:
        """Add metrics that read the state of these parts at each scrape."""

        def show(name: str, rows: Callable[[], Iterable[Row]]) -> None:
            self._readings.append((name, rows))

        def show_one(name: str, value: Callable[[], float]) -> None:
            show(name, lambda: [((), value())])

        def open_requests() -> Iterable[Row]:
            tenants = admission.tenants
            return [((x,), tenants.concurrent(x)) for x in tenants.names()]

        self._fleet = fleet
        show("role_load", role_loads)
        show("role_workers_wanted", roles_wanted)
        show("tenant_requests_open", open_requests)
        show("revision_share", partial(_revision_shares, shares))
        show(
            "weights_update", lambda: [((x,), fleet.weights_of(x).sequence) for x in fleet.models()]
        )
        show("weights_laggards", partial(_laggards, fleet))
        show_one("requests_running", lambda: admission.running)
        show_one("requests_queued", lambda: admission.queued)
        show_one("kv_ejected_pairs", lambda: len(fleet.outliers.ejected(fleet.now())))
        self.registry.register(KvCollector(partial(_kv_reports, fleet)))
        if watcher is not None:
            index = watcher.index
            show_one("prefix_blocks", lambda: len(index))

    def watch_memory(self, memory: MemoryGuard) -> None:
        """Add metrics that read the memory guard at each scrape."""
        self._readings += [
            ("memory_used_bytes", lambda: [((), memory.used)]),
            ("memory_limit_bytes", lambda: [((), memory.limit)]),
            ("memory_refusals", lambda: [((), memory.refused)]),
        ]

    def watch_peers(self, peers: RegionPeers) -> None:
        """Add metrics that read the state of the other regions at each scrape."""

        def rows(value: Callable[[PeerView], float]) -> Callable[[], Iterable[Row]]:
            return lambda: [((x.region,), value(x)) for x in peers.views()]

        self._readings += [
            ("peer_open", rows(lambda x: not x.reason)),
            ("peer_delay_seconds", rows(lambda x: x.delay_s)),
            ("router_draining", lambda: [((), peers.draining)]),
        ]

    def watch_audits(self, suspects: Callable[[], Iterable[Row]]) -> None:
        """Add the suspects of audits, read at each scrape."""
        self._readings.append(("audit_suspects", suspects))

    def watch_sessions(self, count: Callable[[], int]) -> None:
        """Add the number of sessions, read at each scrape."""
        self._readings.append(("sessions", lambda: [((), count())]))

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        self._counts[name][labels] += by

    def observe(self, name: str, value: float, *labels: str) -> None:
        self._histograms[name][labels].observe(value)

    def histogram(self, name: str, *labels: str) -> Histogram:
        return self._histograms[name][labels]

    def refused(self, model: str, tenant: str, code: str, reason: str) -> None:
        """Count a request that ended before anything was sent to a worker."""
        self.count("refusals", model, code, reason)
        if tenant:
            self.count("tenant_refusals", tenant, code, reason)

    def answered(
        self,
        model: str,
        tenant: str,
        usage: Usage,
        receipt: Receipt,
        *,
        resumed: int,
        longest: int,
        ttft_s: float,
        e2e_s: float,
        trace_id: str,
        revision: str | None = None,
    ) -> None:
        """Observe a request that was answered in full.

        `resumed`: tokens that the client had before. `longest`: length of the longest answer.
        `trace_id`: "" if the request is not traced. `revision`: None if its model has no weights.
        """
        self.histogram("time_to_first_token_seconds", model).observe(ttft_s, 1, trace_id)
        self.histogram("e2e_request_seconds", model).observe(e2e_s, 1, trace_id)
        self._judge(model, revision, "ttft", ttft_s <= self.slo.ttft_s)
        # A single token has no TPOT.
        if longest > 1:
            tpot_s = (e2e_s - ttft_s) / (longest - 1)
            self.histogram("time_per_output_token_seconds", model).observe(tpot_s, 1, trace_id)
            self._judge(model, revision, "tpot", tpot_s <= self.slo.tpot_s)
        if receipt.predicted_ttft_s and ttft_s > 0:
            self.observe("predicted_ttft_ratio", receipt.predicted_ttft_s / ttft_s, model)
        self.observe("request_queue_seconds", receipt.queue_s, model)
        self.observe("request_prefill_seconds", receipt.prefill_s, model)
        self.observe("request_decode_seconds", receipt.decode_s, model)
        if receipt.transport:
            self.observe("kv_transfer_seconds", receipt.transfer_s, model)
            self.observe("kv_transfer_exposed_seconds", receipt.exposed_transfer_s, model)
            self.count("kv_transfer_bytes", model, by=receipt.transfer_bytes)
        self.count("prompt_tokens", model, by=usage.prompt_tokens)
        self.count("cached_tokens", model, by=usage.cached_tokens)
        # The router that began the answer counted the resumed tokens.
        self.count("generation_tokens", model, by=usage.completion_tokens - resumed)
        if tenant:
            self.count("tenant_answers", tenant)
            self.count("tenant_tokens", tenant, "prompt", by=usage.prompt_tokens)
            self.count("tenant_tokens", tenant, "generated", by=usage.completion_tokens)

    def left(
        self, model: str, revision: str | None, *, ttft_s: float | None, waited_s: float
    ) -> bool | None:
        """Judge the TTFT of a request whose client left after `waited_s`. Return whether it met the
        SLO. Return None and count nothing if the client left before the first token was due."""
        limit_s = self.slo.ttft_s
        if ttft_s is None and waited_s <= limit_s:
            return None
        is_met = ttft_s is not None and ttft_s <= limit_s
        self._judge(model, revision, "ttft", is_met)
        return is_met

    def _judge(self, model: str, revision: str | None, slo: str, is_met: bool) -> None:
        self.count("slo_requests", model, slo, "yes" if is_met else "no")
        self.count_revision(model, revision, slo, *([f"{slo}_met"] if is_met else ()))

    def count_revision(self, model: str, revision: str | None, *results: str) -> None:
        """Count results of a request for its revision. Does nothing if its model has no weights."""
        if revision is not None:
            for result in results:
                self.count("revision_requests", model, revision, result)

    def of_revision(self, model: str, revision: str) -> dict[str, int]:
        """Return the counts of a revision by result."""
        found = self._counts["revision_requests"].items()
        return {x[2]: int(n) for x, n in found if x[:2] == (model, revision)}

    def keep_revisions(self, model: str, revisions: Collection[str]) -> None:
        """Drop the counts of other revisions of a model. Each rollout adds a label, so labels would
        grow without bound."""
        rows = self._counts["revision_requests"]
        for labels in [x for x in rows if x[0] == model and x[1] not in revisions]:
            del rows[labels]


def _worker_rows(
    views: Sequence[WorkerView], models: set[str]
) -> Iterator[tuple[str, Iterable[Row]]]:
    """Yield the metrics of workers: name and rows. Workers are counted for each role and state of
    every model that was ever seen, because an alert on a count that becomes 0 needs the 0. `models`
    has the names seen before, and is updated."""
    counts = Tally((*view.labels[:2], view.state.value) for view in views)
    models.update(view.info.model.name for view in views)
    states = product(sorted(models), Role, MemberState)
    yield "workers", [(labels, counts[labels]) for labels in states]
    loads = [(view.labels, view.load) for view in views if view.load is not None]
    for name in _LOADS:
        yield f"worker_{name}", [(labels, getattr(load, name)) for labels, load in loads]
    ended = [((*x, why), n) for x, load in loads for why, n in load.retentions_ended.items()]
    yield "worker_retentions_ended", ended
    busy = [(view.labels, view.busy_s) for view in views if view.busy_s is not None]
    yield "worker_busy_seconds", busy


def _laggards(fleet: Fleet) -> Iterator[Row]:
    outdated = [m for m in fleet.members.values() if m.is_outdated and not m.lost]
    for model in fleet.models():
        yield (model,), sum(m.info.model.name == model for m in outdated)


def _revision_shares(shares: RevisionShares) -> Iterator[Row]:
    for model, by_revision in shares.by_model.items():
        for revision, share in by_revision.items():
            yield (model, revision), share


def _kv_reports(fleet: Fleet) -> list[Labelled]:
    return [(view.info, view.kv) for view in worker_views(fleet) if view.kv is not None]


@asynccontextmanager
async def open_metrics(config: RouterConfig, memory: MemoryGuard) -> AsyncIterator[RouterMetrics]:
    """Open the metrics for the context, and measure this process: memory, event loop, tasks and
    certificates."""
    metrics = RouterMetrics(config.slo)
    watch_tasks(metrics.registry)
    metrics.watch_memory(memory)
    metrics.registry.register(CertificateCollector(config.access))
    lag = metrics.histogram("event_loop_lag_seconds").observe
    async with (
        background("memory", memory.run),
        background("event-loop-lag", partial(measure_loop_lag, lag)),
    ):
        yield metrics
