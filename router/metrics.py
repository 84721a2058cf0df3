"""The router's Prometheus metrics.

A request is observed once, at its end. Workers are counted when metrics are read.
"""

from __future__ import annotations

from collections import Counter as Tally
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdserve.metrics import KvCollector
from router.prefix import PrefixMetrics
from router.roles.metrics import RoleMetrics
from router.token_gaps import BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.errors import PdserveError
    from pdserve.metrics import Labelled
    from pdserve.types import Receipt, Usage
    from router.admission import AdmissionController, Tenants
    from router.cost.book import CostBook
    from router.fleet.pool import WorkerPool
    from router.fleet.registry import Fleet
    from router.prefix import PrefixWatcher

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)

# Name without "pdserve_", what it counts, labels.
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("requests", "Requests by how they ended.", "model outcome"),
    ("refusals", "Requests refused before any work.", "model code reason"),
    ("fallbacks", "Retries of requests.", "model step reason"),
    ("continuations", "Answers that continued on another worker, by origin of KV.", "model from"),
    ("prompt_tokens", "Prompt tokens of answered requests.", "model"),
    ("cached_tokens", "Prompt tokens of answered requests that were cached.", "model"),
    ("generation_tokens", "Tokens generated for answered requests.", "model"),
    ("kv_transfer_bytes", "KV bytes moved.", "model"),
    ("pair_probes", "Active health checks of pairs of workers.", "model outcome"),
    ("worker_probes", "Active health checks of single workers.", "model outcome"),
    ("tenant_answers", "Requests answered in full.", "tenant"),
    ("tenant_tokens", "Tokens of answered requests.", "tenant kind"),
    ("tenant_refusals", "Requests refused before any work.", "tenant code reason"),
)
# The same, and the buckets.
_HISTOGRAMS: tuple[tuple[str, str, str, tuple[float, ...]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", "model", _SECONDS),
    ("time_per_output_token_seconds", "Mean gap between tokens.", "model", BOUNDS_S),
    ("e2e_request_seconds", "From arrival to the last token.", "model", _SECONDS),
    ("request_queue_seconds", "Waiting in router and worker.", "model", _SECONDS),
    ("request_prefill_seconds", "Prefill.", "model", _SECONDS),
    ("request_decode_seconds", "Decode.", "model", _SECONDS),
    ("kv_transfer_seconds", "KV transfer, from subscription to last byte.", "model", _SECONDS),
    ("kv_transfer_exposed_seconds", "KV transfer after prefill ended.", "model", _SECONDS),
    ("role_change_seconds", "From request to first placement.", "model role outcome", _SECONDS),
    ("prediction_ratio", "Predicted over actual.", "model what", _RATIOS),
)
_LOADS = (
    ("num_running_reqs", "Requests that a worker's engine computes."),
    ("num_waiting_reqs", "Requests that wait in a worker's engine."),
    ("kv_cache_usage", "Used share of a worker's KV cache, from 0 to 1."),
)


class RouterMetrics:
    """All metrics of one router. `render` returns what Prometheus reads."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.prefix = PrefixMetrics(registry)
        self.roles = RoleMetrics(registry)
        # Cached: finding a labelled child costs more than counting.
        self._count: dict[str, Callable[..., Counter]] = {
            name: cache(Counter(f"pdserve_{name}", text, labels.split(), registry=registry).labels)
            for name, text, labels in _COUNTERS
        }
        self._histogram: dict[str, Callable[..., Histogram]] = {
            name: cache(
                Histogram(
                    f"pdserve_{name}", text, labels.split(), buckets=buckets, registry=registry
                ).labels
            )
            for name, text, labels, buckets in _HISTOGRAMS
        }
        self.tenants = TenantMetrics(self._count, registry)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def watch(
        self,
        fleet: Fleet,
        costs: CostBook,
        admission: AdmissionController,
        watcher: PrefixWatcher | None,
    ) -> None:
        """Report their state whenever the metrics are read."""
        pool, register = fleet.pool, self.registry.register
        register(_Workers(pool))
        register(_Loads(pool))
        register(KvCollector(lambda: _kv_reports(pool)))
        register(_Goodput(costs, pool))
        register(fleet.gaps)
        self.tenants.watch(admission.tenants)
        if watcher is not None:
            self.prefix.watch(watcher)
        for name, text, read in (
            (
                "kv_ejected_pairs",
                "Pairs of workers that are not used together because KV between them failed.",
                lambda: len(fleet.outliers.ejected(fleet.now())),
            ),
            ("requests_running", "Requests admitted.", lambda: admission.running),
            ("requests_queued", "Requests waiting for admission.", lambda: admission.queued),
        ):
            Gauge(f"pdserve_{name}", text, registry=self.registry).set_function(read)

    def refused(self, model: str, error: PdserveError) -> None:
        """A request ended before anything was sent to a worker."""
        self._count["refusals"](model, error.code, error.reason).inc()

    def ended(self, model: str, outcome: str) -> None:
        """A request ended. `outcome` is its finish reason or its error's code."""
        self._count["requests"](model, outcome).inc()

    def fell_back(self, model: str, step: str, reason: str) -> None:
        """A request is retried, or fails after retries."""
        self._count["fallbacks"](model, step, reason).inc()

    def continued(self, model: str, source: str) -> None:
        """An answer with tokens continues elsewhere, with "live_kv" or after "prefill"."""
        self._count["continuations"](model, source).inc()

    def answered(
        self,
        model: str,
        usage: Usage,
        receipt: Receipt,
        *,
        ttft_s: float,
        e2e_s: float,
        longest: int | None = None,
    ) -> None:
        """A request was answered in full. `longest` is the length of the longest of n answers."""
        count, seconds = self._count, self._histogram
        seconds["time_to_first_token_seconds"](model).observe(ttft_s)
        seconds["e2e_request_seconds"](model).observe(e2e_s)
        tokens = longest or usage.completion_tokens
        if tokens > 1:
            gap_s = (e2e_s - ttft_s) / (tokens - 1)
            seconds["time_per_output_token_seconds"](model).observe(gap_s)
        seconds["request_queue_seconds"](model).observe(receipt.queue_s)
        seconds["request_prefill_seconds"](model).observe(receipt.prefill_s)
        seconds["request_decode_seconds"](model).observe(receipt.decode_s)
        if receipt.transport:
            seconds["kv_transfer_seconds"](model).observe(receipt.transfer_s)
            seconds["kv_transfer_exposed_seconds"](model).observe(receipt.exposed_transfer_s)
            count["kv_transfer_bytes"](model).inc(receipt.transfer_bytes)
        count["prompt_tokens"](model).inc(usage.prompt_tokens)
        count["cached_tokens"](model).inc(usage.cached_tokens)
        count["generation_tokens"](model).inc(usage.completion_tokens)

    def predicted(self, model: str, what: str, ratio: float) -> None:
        """Compare a prediction of ttft, prefill, transfer or itl with what happened."""
        self._histogram["prediction_ratio"](model, what).observe(ratio)

    def pair_probe(self, model: str, outcome: str) -> None:
        """A pair of workers was probed."""
        self._count["pair_probes"](model, outcome).inc()

    def worker_probe(self, model: str, outcome: str) -> None:
        """A worker was probed."""
        self._count["worker_probes"](model, outcome).inc()

    def role_changed(self, model: str, role: str, outcome: str, seconds: float) -> None:
        """A worker's role was to change to `role`."""
        self._histogram["role_change_seconds"](model, role, outcome).observe(seconds)


class TenantMetrics:
    """Metrics by tenant. Requests without a tenant are not counted."""

    def __init__(
        self, count: dict[str, Callable[..., Counter]], registry: CollectorRegistry
    ) -> None:
        self._count = count
        self._registry = registry

    def watch(self, tenants: Tenants) -> None:
        self._registry.register(_OpenByTenant(tenants))

    def answered(self, tenant: str, usage: Usage) -> None:
        if tenant:
            self._count["tenant_answers"](tenant).inc()
            self._count["tenant_tokens"](tenant, "prompt").inc(usage.prompt_tokens)
            self._count["tenant_tokens"](tenant, "generated").inc(usage.completion_tokens)

    def refused(self, tenant: str, error: PdserveError) -> None:
        if tenant:
            self._count["tenant_refusals"](tenant, error.code, error.reason).inc()


class _OpenByTenant(Collector):
    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "pdserve_tenant_requests_open", "Requests waiting and running.", labels=("tenant",)
        )
        for name in self._tenants.names():
            family.add_metric((name,), self._tenants.concurrent(name))
        yield family


class _Workers(Collector):
    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ("model", "role", "state")
        family = GaugeMetricFamily("pdserve_workers", "Registered workers.", labels=labels)
        tally = Tally(
            (m.info.model.name, m.info.role.value, m.state.value)
            for m in self._pool.members.values()
        )
        for values, count in sorted(tally.items()):
            family.add_metric(values, count)
        yield family


class _Loads(Collector):
    """The load that each worker last reported."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        members = [m for m in self._pool.members.values() if m.load is not None and not m.lost]
        for name, text in _LOADS:
            labels = ("model", "role", "worker")
            family = GaugeMetricFamily(f"pdserve_worker_{name}", text, labels=labels)
            for m in members:
                values = (m.info.model.name, m.info.role.value, m.worker_id)
                family.add_metric(values, getattr(m.load, name))
            yield family


class _Goodput(Collector):
    """Of the models that enough was measured of."""

    def __init__(self, costs: CostBook, pool: WorkerPool) -> None:
        self._costs = costs
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "pdserve_pd_goodput_ratio",
            "Predicted goodput with disaggregation over that of as many aggregated workers.",
            labels=("model",),
        )
        for model in sorted(self._pool.models()):
            ratio = self._costs.reading(model).ratio
            if ratio is not None:
                family.add_metric((model,), ratio)
        yield family


def _kv_reports(pool: WorkerPool) -> Iterator[Labelled]:
    for member in pool.members.values():
        if member.kv is not None and not member.lost:
            yield member.info, member.kv
