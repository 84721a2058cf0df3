"""The router's Prometheus metrics, in a registry of their own.

A request is observed once, at its end, the gaps between tokens once a frame: nothing here is on the
path of a token. Workers are counted
when the metrics are read.
"""

from __future__ import annotations

from collections import Counter as Tally
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdserve.kv_metrics import KvCollector
from router.counts import Counts
from router.histograms import Histograms
from router.prefix import PrefixMetrics
from router.roles.metrics import RoleMetrics
from router.tenant_metrics import TenantMetrics
from router.token_gaps import BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.errors import PdserveError
    from pdserve.kv_metrics import Labelled
    from pdserve.types import Receipt, Usage
    from router.cost.book import CostBook
    from router.counts import Count
    from router.histograms import Histogram
    from router.pool import WorkerPool

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_LOADS = (
    ("num_running_reqs", "Requests that a worker's engine computes."),
    ("num_waiting_reqs", "Requests that wait in a worker's engine."),
    ("kv_cache_usage", "The share of a worker's KV cache that is in use, from 0 to 1."),
)
_RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class _Workers(Collector):
    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        tally = Tally(
            (m.info.model.name, m.info.role.value, m.state.value)
            for m in self._pool.members.values()
        )
        family = GaugeMetricFamily(
            "pdserve_workers",
            "Workers by model, role and state.",
            labels=("model", "role", "state"),
        )
        for labels, count in sorted(tally.items()):
            family.add_metric(labels, count)
        yield family


class _Loads(Collector):
    """What each worker last said of its engine; nothing of one that has not."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        members = [m for m in self._pool.members.values() if m.load is not None and not m.lost]
        for name, text in _LOADS:
            family = GaugeMetricFamily(
                f"pdserve_worker_{name}", text, labels=("model", "role", "worker")
            )
            for m in members:
                labels = (m.info.model.name, m.info.role.value, m.worker_id)
                family.add_metric(labels, getattr(m.load, name))
            yield family


class _Goodput(Collector):
    """Only of the models that it is known of."""

    def __init__(self, costs: CostBook, pool: WorkerPool) -> None:
        self._costs = costs
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "pdserve_pd_goodput_ratio",
            "Goodput with prefill apart over that of as many aggregated workers, as modelled.",
            labels=("model",),
        )
        for model in sorted(self._pool.models()):
            ratio = self._costs.reading(model).ratio
            if ratio is not None:
                family.add_metric((model,), ratio)
        yield family


def _kv_reports(pool: WorkerPool) -> Iterator[Labelled]:
    """As old as the workers' last renewals."""
    for member in pool.members.values():
        if member.kv is not None and not member.lost:
            yield member.info, member.kv


class RouterMetrics:
    """Owns the registry; the coordinator observes, `/metrics` renders. A metric is held as the
    function from labels to what counts under them: to ask the library costs more than to count."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.prefix = PrefixMetrics(self.registry)
        self.tenants = TenantMetrics(self.registry)
        self.roles = RoleMetrics(self.registry)
        self._ttft = self._seconds("time_to_first_token", "From arrival to the first token.")
        self._tpot = self._seconds(
            "time_per_output_token", "Mean gap between tokens after the first.", BOUNDS_S
        )
        self._e2e = self._seconds("e2e_request", "From arrival to the last token.")
        self._queue = self._seconds("request_queue", "Waiting, in router and worker.")
        self._prefill = self._seconds("request_prefill", "Computing the prompt.")
        self._decode = self._seconds("request_decode", "Decoding.")
        self._transfer = self._seconds("kv_transfer", "Moving KV from grant to last byte.")
        self._exposed = self._seconds("kv_transfer_exposed", "Moving KV after prefill had ended.")
        self._canaries = self._counter(
            "pair_canaries", "Requests of the router's own over pairs of workers.", "outcome"
        )
        self._worker_canaries = self._counter(
            "worker_canaries",
            "Requests of the router's own to workers that got no work.",
            "outcome",
        )
        self._flips = self._histogram(
            "role_change_seconds",
            "From asking for a worker's other role until it was given work again.",
            _SECONDS,
            *("role", "outcome"),
        )
        self._predictions = self._histogram(
            "prediction_ratio",
            "Predicted over actual: of ttft, prefill, transfer (its exposed part) and itl.",
            _RATIOS,
            "what",
        )
        self._requests = self._counter("requests", "Requests by how they ended.", "outcome")
        self._refusals = self._counter(
            "refusals", "Requests refused before any work.", "code", "reason"
        )
        self._fallbacks = self._counter("fallbacks", "Fallbacks used.", "step", "reason")
        self._continuations = self._counter(
            "continuations",
            "Answers that went on elsewhere after some tokens, by where their KV is from.",
            "from",
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens answered.")
        self._cached_tokens = self._counter("cached_tokens", "Prompt tokens with KV at hand.")
        self._generated_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._transfer_bytes = self._counter("kv_transfer_bytes", "KV bytes moved.")

    def _seconds(
        self, name: str, text: str, bounds: tuple[float, ...] = _SECONDS
    ) -> Callable[..., Histogram]:
        return self._histogram(f"{name}_seconds", text, bounds)

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...], *labels: str
    ) -> Callable[..., Histogram]:
        metric = Histograms(f"pdserve_{name}", text, ("model", *labels), bounds)
        self.registry.register(metric)
        return metric.of

    def _counter(self, name: str, text: str, *labels: str) -> Callable[..., Count]:
        metric = Counts(f"pdserve_{name}", text, ("model", *labels))
        self.registry.register(metric)
        return metric.of

    def watch_pool(self, pool: WorkerPool) -> None:
        """Report the pool's members from now on."""
        self.registry.register(_Workers(pool))
        self.registry.register(_Loads(pool))
        self.registry.register(KvCollector(lambda: _kv_reports(pool)))

    def watch_gaps(self, gaps: Histograms) -> None:
        """Report the gaps between tokens from now on."""
        self.registry.register(gaps)

    def watch_costs(self, costs: CostBook, pool: WorkerPool) -> None:
        """Report whether prefill apart helps, from now on."""
        self.registry.register(_Goodput(costs, pool))

    def watch_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Report `read()` as the gauge `pdserve_<name>` from now on."""
        Gauge(f"pdserve_{name}", text, registry=self.registry).set_function(read)

    def refused(self, model: str, error: PdserveError) -> None:
        """A request ended before anything was sent to a worker."""
        self._refusals(model, error.code, error.reason).inc()

    def ended(self, model: str, outcome: str) -> None:
        """A started request ended: `outcome` is its finish reason or its error's code."""
        self._requests(model, outcome).inc()

    def fell_back(self, model: str, step: str, reason: str) -> None:
        """A request goes on elsewhere, or not at all."""
        self._fallbacks(model, step, reason).inc()

    def continued(self, model: str, source: str) -> None:
        """An answer with tokens goes on elsewhere, from `source`: "live_kv" or "prefill"."""
        self._continuations(model, source).inc()

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
        """A request was answered in full; `longest` are the tokens of the longest answer, where
        there are several."""
        tokens = longest or usage.completion_tokens
        self._ttft(model).observe(ttft_s)
        self._e2e(model).observe(e2e_s)
        if tokens > 1:
            gap_s = (e2e_s - ttft_s) / (tokens - 1)
            self._tpot(model).observe(gap_s)
        self._queue(model).observe(receipt.queue_s)
        self._prefill(model).observe(receipt.prefill_s)
        self._decode(model).observe(receipt.decode_s)
        if receipt.transport:
            self._transfer(model).observe(receipt.transfer_s)
            self._exposed(model).observe(receipt.exposed_transfer_s)
            self._transfer_bytes(model).inc(receipt.transfer_bytes)
        self._prompt_tokens(model).inc(usage.prompt_tokens)
        self._cached_tokens(model).inc(usage.cached_tokens)
        self._generated_tokens(model).inc(usage.completion_tokens)

    def predicted(self, model: str, what: str, ratio: float) -> None:
        """What was predicted, over what came."""
        self._predictions(model, what).observe(ratio)

    def canary(self, model: str, outcome: str) -> None:
        """A pair of workers was tried by a request of the router's own."""
        self._canaries(model, outcome).inc()

    def worker_canary(self, model: str, outcome: str) -> None:
        """A worker that got no work was tried by a request of the router's own."""
        self._worker_canaries(model, outcome).inc()

    def flipped(self, model: str, role: str, outcome: str, seconds: float) -> None:
        """A worker was to become a `role` worker."""
        self._flips(model, role, outcome).observe(seconds)

    def render(self) -> bytes:
        """The text that Prometheus reads, of type CONTENT_TYPE."""
        return generate_latest(self.registry)
