"""Prometheus metrics of KV planes and event loops, the same at routers and workers."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from pdserve.types import KvReport, WorkerInfo

    Labelled = tuple[WorkerInfo, KvReport]

CONTENT_TYPE = CONTENT_TYPE_LATEST

_PREFIX = "pdserve_worker_kv_"
_LABELS = ("model", "role", "worker")
_GAUGES = (
    ("pinned_blocks", "ledger.pinned_blocks", "Blocks pinned for transfers: in flight or leased."),
    ("in_flight_blocks", "ledger.in_flight_blocks", "Blocks that a transfer is filling."),
    (
        "leased_blocks",
        "ledger.leased_blocks",
        "Blocks kept for a consumer that has yet to take them.",
    ),
    ("transfers", "ledger.transfers", "Transfers that hold blocks."),
    ("quarantined_slots", "quarantined_slots", "Memory given up: a peer may still write to it."),
    ("transport_bytes", "held_bytes", "Memory of transports beside the KV cache."),
)


class Histogram:
    """Counts of values up to each of `bounds`, and beyond the last; and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


class KvCollector(Collector):
    """Shows the reports of workers as they are when metrics are read."""

    def __init__(self, reports: Callable[[], Iterable[Labelled]]) -> None:
        self._reports = reports

    def describe(self) -> Iterator[Metric]:
        """Workers decide which totals there are, so a registry has nothing to check."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        rows = [
            ((info.model.name, info.role.value, info.worker_id), report)
            for info, report in self._reports()
        ]
        for name, path, text in _GAUGES:
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for labels, report in rows:
                gauge.add_metric(labels, attrgetter(path)(report))
            yield gauge
        links = GaugeMetricFamily(
            _PREFIX + "links", "Links that are up.", labels=(*_LABELS, "transport")
        )
        for labels, report in rows:
            for transport, count in sorted(report.links.items()):
                links.add_metric((*labels, transport), count)
        yield links
        for total in sorted({name for _, report in rows for name in report.totals}):
            text = f"{total.replace('_', ' ')} since the worker started.".capitalize()
            counter = CounterMetricFamily(_metric_name(total), text, labels=_LABELS)
            for labels, report in rows:
                if total in report.totals:
                    counter.add_metric(labels, report.totals[total])
            yield counter


def watch_tasks(registry: CollectorRegistry) -> None:
    """Add a gauge of this event loop's open tasks, to find those that never end."""
    gauge = Gauge("pdserve_asyncio_tasks", "Open tasks of the event loop.", registry=registry)
    gauge.set_function(lambda: len(asyncio.all_tasks()))


def _metric_name(total: str) -> str:
    # Prometheus writes units out.
    return _PREFIX + (f"{total[:-2]}_seconds" if total.endswith("_s") else total)
