"""The router's Prometheus metrics.

A request is observed once, at its end. Workers are counted when metrics are read.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from pdserve.metrics import Histogram, KvCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from pdserve.errors import PdserveError
    from pdserve.metrics import Labelled
    from pdserve.types import Receipt, Usage
    from router.admission import AdmissionController
    from router.fleet.registry import Fleet
    from router.prefix import PrefixWatcher

    Row = tuple[tuple[str, ...], float]

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_GAPS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5),
)
_RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)

# Name without "pdserve_", what it is, labels, and the buckets of a histogram. Others are counters.
_METRICS: tuple[tuple[str, str, str, tuple[float, ...]], ...] = (
    ("requests", "Requests by how they ended.", "model outcome", ()),
    ("refusals", "Requests refused before any work.", "model code reason", ()),
    ("fallbacks", "Retries of requests.", "model step reason", ()),
    ("continuations", "Answers that continued elsewhere, by origin of KV.", "model from", ()),
    ("prompt_tokens", "Prompt tokens of answered requests.", "model", ()),
    ("cached_tokens", "Prompt tokens of answered requests that were cached.", "model", ()),
    ("generation_tokens", "Tokens generated for answered requests.", "model", ()),
    ("kv_transfer_bytes", "KV bytes moved.", "model", ()),
    ("pair_probes", "Active health checks of pairs of workers.", "model outcome", ()),
    ("worker_probes", "Active health checks of single workers.", "model outcome", ()),
    ("tenant_answers", "Requests answered in full.", "tenant", ()),
    ("tenant_tokens", "Tokens of answered requests.", "tenant kind", ()),
    ("tenant_refusals", "Requests refused before any work.", "tenant code reason", ()),
    ("time_to_first_token_seconds", "From arrival to the first token.", "model", _SECONDS),
    ("time_per_output_token_seconds", "Mean gap between tokens.", "model", _GAPS),
    ("inter_token_latency_seconds", "Time between a worker's steps.", "model", _GAPS),
    ("e2e_request_seconds", "From arrival to the last token.", "model", _SECONDS),
    ("request_queue_seconds", "Waiting in router and worker.", "model", _SECONDS),
    ("request_prefill_seconds", "Prefill.", "model", _SECONDS),
    ("request_decode_seconds", "Decode.", "model", _SECONDS),
    ("kv_transfer_seconds", "KV transfer, from subscription to last byte.", "model", _SECONDS),
    ("kv_transfer_exposed_seconds", "KV transfer after prefill ended.", "model", _SECONDS),
    ("role_change_seconds", "From request to first placement.", "model role outcome", _SECONDS),
    ("predicted_ttft_ratio", "Predicted TTFT over actual TTFT.", "model", _RATIOS),
)
_BOUNDS = {name: bounds for name, _, _, bounds in _METRICS}

_LOADS = (
    ("num_running_reqs", "Requests that a worker's engine computes."),
    ("num_waiting_reqs", "Requests that wait in a worker's engine."),
    ("kv_cache_usage", "Used share of a worker's KV cache, from 0 to 1."),
)


class RouterMetrics(Collector):
    """All metrics of one router. Counters and histograms are plain numbers: they cost a request a
    tenth of those of prometheus_client."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counts = {name: defaultdict[tuple[str, ...], float](float) for name in _BOUNDS}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {
            name: {} for name in _BOUNDS
        }
        # Name, text and labels of what is read elsewhere, with its rows. A `_total` is a counter.
        self._readings: list[tuple[str, str, str, Callable[[], Iterable[Row]]]] = []
        self.registry.register(self)

    def render(self) -> bytes:
        """Return what Prometheus reads."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        for name, text, labels, bounds in _METRICS:
            if not bounds:
                yield _family(CounterMetricFamily, name, text, labels, self._counts[name].items())
                continue
            observed = HistogramMetricFamily(f"pdserve_{name}", text, labels=labels.split())
            limits = [*map(str, bounds), "+Inf"]
            for values, histogram in self._histograms[name].items():
                buckets = list(zip(limits, accumulate(histogram.counts), strict=True))
                observed.add_metric(values, buckets, histogram.total)
            yield observed
        for name, text, labels, rows in self._readings:
            is_counter = name.endswith("_total")
            kind = CounterMetricFamily if is_counter else GaugeMetricFamily
            yield _family(kind, name, text, labels, rows())

    def watch(
        self,
        fleet: Fleet,
        admission: AdmissionController,
        watcher: PrefixWatcher | None,
        role_loads: Callable[[], Iterable[Row]],
        roles_wanted: Callable[[], Iterable[Row]],
    ) -> None:
        """Report their state whenever the metrics are read."""

        def show(name: str, text: str, labels: str, rows: Callable[[], Iterable[Row]]) -> None:
            self._readings.append((name, text, labels, rows))

        def show_one(name: str, text: str, value: Callable[[], float]) -> None:
            show(name, text, "", lambda: [((), value())])

        def open_requests() -> Iterable[Row]:
            tenants = admission.tenants
            return [((x,), tenants.concurrent(x)) for x in tenants.names()]

        show("workers", "Registered workers.", "model role state", partial(_workers, fleet))
        for field, text in _LOADS:
            show(f"worker_{field}", text, "model role worker", partial(_loads, fleet, field))
        show("role_load", "Average load; 1 is full.", "model role", role_loads)
        show("role_workers_wanted", "Workers that the load asks for.", "model role", roles_wanted)
        show("tenant_requests_open", "Requests waiting and running.", "tenant", open_requests)
        show_one("requests_running", "Requests admitted.", lambda: admission.running)
        show_one("requests_queued", "Requests waiting for admission.", lambda: admission.queued)
        text = "Pairs of workers that are not used because KV between them failed."
        show_one("kv_ejected_pairs", text, lambda: len(fleet.outliers.ejected(fleet.now())))
        self.registry.register(KvCollector(lambda: _kv_reports(fleet)))
        if watcher is not None:
            index = watcher.index
            show_one("prefix_blocks", "KV blocks in the index.", lambda: len(index))

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        self._counts[name][labels] += by

    def observe(self, name: str, value: float, *labels: str) -> None:
        self.histogram(name, *labels).observe(value)

    def histogram(self, name: str, *labels: str) -> Histogram:
        known = self._histograms[name]
        found = known.get(labels)
        if found is None:
            found = known[labels] = Histogram(_BOUNDS[name])
        return found

    def refused(self, model: str, tenant: str, error: PdserveError) -> None:
        """A request ended before anything was sent to a worker."""
        self.count("refusals", model, error.code, error.reason)
        if tenant:
            self.count("tenant_refusals", tenant, error.code, error.reason)

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
    ) -> None:
        """A request was answered in full. The client had `resumed` tokens before; `longest` is the
        length of the longest answer."""
        self.observe("time_to_first_token_seconds", ttft_s, model)
        self.observe("e2e_request_seconds", e2e_s, model)
        if longest > 1:
            gap_s = (e2e_s - ttft_s) / (longest - 1)
            self.observe("time_per_output_token_seconds", gap_s, model)
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
        self.count("generation_tokens", model, by=usage.completion_tokens - resumed)
        if tenant:
            self.count("tenant_answers", tenant)
            self.count("tenant_tokens", tenant, "prompt", by=usage.prompt_tokens)
            self.count("tenant_tokens", tenant, "generated", by=usage.completion_tokens)


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    labels: str,
    rows: Iterable[Row],
) -> Metric:
    family = kind(f"pdserve_{name}", text, labels=labels.split())
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _workers(fleet: Fleet) -> Iterable[Row]:
    members = fleet.members.values()
    counts = Tally((m.info.model.name, m.info.role.value, m.state.value) for m in members)
    return sorted(counts.items())


def _loads(fleet: Fleet, field: str) -> Iterator[Row]:
    for m in fleet.members.values():
        if m.load is not None and not m.lost:
            yield (m.info.model.name, m.info.role.value, m.worker_id), getattr(m.load, field)


def _kv_reports(fleet: Fleet) -> Iterator[Labelled]:
    for member in fleet.members.values():
        if member.kv is not None and not member.lost:
            yield member.info, member.kv
