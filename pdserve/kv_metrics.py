"""The KV plane of workers as Prometheus metrics. The router shows those of all its workers, a
worker its own, under the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from pdserve.task_metrics import watch_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from pdserve.types import KvReport, WorkerInfo

    Labelled = tuple[WorkerInfo, KvReport]

CONTENT_TYPE = CONTENT_TYPE_LATEST

_PREFIX = "pdserve_worker_kv_"
_LABELS = ("model", "role", "worker")
_GAUGES: tuple[tuple[str, str, Callable[[KvReport], float]], ...] = (
    (
        "pinned_blocks",
        "Blocks pinned for transfers: in flight and leased.",
        lambda report: report.ledger.pinned_blocks,
    ),
    (
        "in_flight_blocks",
        "Blocks granted to a source and not yet filled.",
        lambda report: report.ledger.in_flight_blocks,
    ),
    (
        "leased_blocks",
        "Blocks held for a target that has not taken them.",
        lambda report: report.ledger.leased_blocks,
    ),
    ("transfers", "Transfers that hold blocks.", lambda report: report.ledger.transfers),
    (
        "quarantined_slots",
        "Ways into this worker's memory, and staging, given up and not known to be idle.",
        lambda report: report.quarantined_slots,
    ),
    (
        "transport_bytes",
        "Memory that transports hold beside the KV cache: staging and NCCL communicators.",
        lambda report: report.held_bytes,
    ),
)


class KvCollector(Collector):
    """Reads `reports` each time that it is collected."""

    def __init__(self, reports: Callable[[], Iterable[Labelled]]) -> None:
        self._reports = reports

    def describe(self) -> Iterator[Metric]:
        """Nothing that a registry must check for: which totals there are is the workers' to say."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        rows = [
            ((info.model.name, info.role.value, info.worker_id), report)
            for info, report in self._reports()
        ]
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for labels, report in rows:
                gauge.add_metric(labels, read(report))
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


class KvMetrics:
    """`KvCollector` with a registry of its own, for a worker's process; its tasks too."""

    def __init__(self, reports: Callable[[], Iterable[Labelled]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(KvCollector(reports))
        watch_tasks(self._registry)

    def render(self) -> bytes:
        """The text that Prometheus reads, of type CONTENT_TYPE."""
        return generate_latest(self._registry)


def _metric_name(total: str) -> str:
    # Prometheus writes units out.
    return _PREFIX + (f"{total[:-2]}_seconds" if total.endswith("_s") else total)
