"""The metrics of routers and workers: one table of their names, and their collectors.

`docs/metrics.md` is generated from the table (`make docs`), and so are the dashboards and alert
rules of `deploy/dashboards/`. Names follow Prometheus' conventions: base units, `_total` for
counters. The table also gives the name in OpenTelemetry's conventions for generative AI, if the
same metric exists there.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from pdserve.types import KvReport, WorkerInfo

    Labelled = tuple[WorkerInfo, KvReport]
    Row = tuple[Sequence[str], float]

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_GAPS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5),
)
_RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricSpec(NamedTuple):
    """A metric. `name` omits the prefix "pdserve_" and a counter's suffix "_total"."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    otel: str = ""

    @property
    def shown(self) -> str:
        """The full name in Prometheus."""
        return f"pdserve_{self.name}" + ("_total" if self.kind is Kind.COUNTER else "")


def _counter(name: str, labels: str, text: str) -> MetricSpec:
    return MetricSpec(name, Kind.COUNTER, text, tuple(labels.split()))


def _gauge(name: str, labels: str, text: str) -> MetricSpec:
    return MetricSpec(name, Kind.GAUGE, text, tuple(labels.split()))


def _histogram(
    name: str, labels: str, text: str, bounds: tuple[float, ...] = _SECONDS, otel: str = ""
) -> MetricSpec:
    return MetricSpec(name, Kind.HISTOGRAM, text, tuple(labels.split()), bounds, otel)


_KV = "model role worker"
_ACCOUNT = "model role kind reason"
_GEN_AI = "gen_ai.server."

# By heading of docs/metrics.md: how to aggregate the metrics, and the metrics.
TABLE: dict[str, tuple[str, tuple[MetricSpec, ...]]] = {
    "Requests": (
        "From each router, for its own requests: sum over routers.",
        (
            _counter(
                "requests",
                "model outcome",
                "Admitted requests by how they ended; also those whose client left the queue.",
            ),
            _counter("refusals", "model code reason", "Requests refused before any work."),
            _counter(
                "api_responses",
                "route status code",
                "Answers of the HTTP and gRPC APIs: HTTP's status or gRPC's, and the error's code. "
                "499: the client left.",
            ),
            _counter("fallbacks", "model step reason", "Retries of requests."),
            _counter(
                "model_choices",
                "virtual_model model rule",
                "Models that virtual models chose; the rule is default, override, escalated or the "
                "name of one. A request counts again if its first model was busy.",
            ),
            _counter(
                "escalations",
                "virtual_model model reason",
                "Answers of a model that did not pass their check: logprob, json, tool_call, "
                "too_long, timeout, or the code of an error.",
            ),
            _counter(
                "continuations", "model from", "Answers that continued elsewhere, by origin of KV."
            ),
            _counter(
                "slo_requests",
                "model slo met",
                "Answered requests by target, met or not; by TTFT also those whose client left.",
            ),
            _counter("prompt_tokens", "model", "Prompt tokens of answered requests."),
            _counter("cached_tokens", "model", "Cached prompt tokens of answered requests."),
            _counter("generation_tokens", "model", "Tokens generated for answered requests."),
            _histogram(
                "time_to_first_token_seconds",
                "model",
                "From arrival to the first token.",
                otel=_GEN_AI + "time_to_first_token",
            ),
            _histogram(
                "time_per_output_token_seconds",
                "model",
                "Mean time between tokens of an answer.",
                _GAPS,
                _GEN_AI + "time_per_output_token",
            ),
            _histogram(
                "e2e_request_seconds",
                "model",
                "From arrival to the last token.",
                otel=_GEN_AI + "request.duration",
            ),
            _histogram(
                "inter_token_latency_seconds", "model", "Time between a worker's steps.", _GAPS
            ),
            _histogram("request_queue_seconds", "model", "Waiting in router and worker."),
            _histogram("request_prefill_seconds", "model", "Prefill."),
            _histogram("request_decode_seconds", "model", "Decode."),
            _histogram(
                "kv_transfer_seconds", "model", "KV transfer, from subscription to last byte."
            ),
            _histogram("kv_transfer_exposed_seconds", "model", "KV transfer after prefill ended."),
            _counter("kv_transfer_bytes", "model", "KV bytes moved for answered requests."),
            _histogram(
                "predicted_ttft_ratio", "model", "Predicted TTFT over actual TTFT.", _RATIOS
            ),
            _counter("parser_restarts", "", "Parser processes that died or hung on answers."),
            _counter(
                "body_process_failures",
                "",
                "Processes for large bodies that died or timed out.",
            ),
            _histogram(
                "render_seconds",
                "model",
                "Fetching and rendering the images of a prompt, before it is queued.",
            ),
            _counter(
                "fetched_images",
                "model",
                "Images whose embeddings prefill workers got from encode workers.",
            ),
            _counter(
                "guard_verdicts",
                "guard place verdict",
                "Verdicts of router.guards on prompts, and on answers or their sentences: pass, "
                "redact, refuse, log, or failed.",
            ),
            _counter(
                "capsules",
                "reason result",
                "Incident capsules, by the reason for them: kept, failed (the disk), dropped (the "
                "disk is too slow), or elsewhere (the data may not be stored in this region).",
            ),
            _histogram("guard_seconds", "guard place", "Time of a verdict of these guards."),
            _counter("memory_refusals", "", "Requests refused because memory was nearly full."),
            _gauge("memory_used_bytes", "", "Memory of the router and its processes."),
            _gauge("memory_limit_bytes", "", "Limit of memory_used_bytes; 0: none."),
            _counter(
                "responses_not_stored", "code", "Answers that were sent but could not be stored."
            ),
            _gauge("sessions", "", "Conversations remembered (router.session_idle_s)."),
            _counter("session_turns", "model", "Answers to requests that name a session."),
            _counter(
                "recomputed_tokens",
                "model",
                "Prompt tokens that a session's last turn had, and that were not cached.",
            ),
            _counter(
                "kv_fetches",
                "model result",
                "Copies of cached KV before prefill: fetched, gone (evicted), late or failed.",
            ),
            _counter("kv_fetched_tokens", "model", "Tokens copied so, and not computed."),
            _counter("kv_fetched_blocks", "model", "KV blocks that moved for them."),
            _histogram("kv_fetch_seconds", "model", "Time of such a copy."),
            _gauge("requests_running", "", "Requests admitted."),
            _gauge("requests_queued", "", "Requests waiting for admission."),
        ),
    ),
    "Regions": (
        (
            "From each router. A forwarded request counts at the router that its client called, "
            "and at the one that served it: there with all that it cost."
        ),
        (
            _counter(
                "forwarded_requests",
                "model region reason",
                "Requests sent to another region, and why they left this one.",
            ),
            _counter(
                "forward_failures",
                "model region code",
                "Those that the other region refused, or that failed there.",
            ),
            _counter("peer_requests", "model region", "Requests served for another region."),
            _histogram(
                "forwarded_ttft_seconds",
                "model region",
                "From arrival to the first token of a forwarded request.",
            ),
            _gauge("peer_open", "region", "1: the region takes requests; 0: it does not."),
            _gauge("peer_delay_seconds", "region", "Round trip of the link to a region."),
            _gauge("router_draining", "", "1: new requests go to other regions."),
        ),
    ),
    "Revisions": (
        (
            "From each router, for requests of models with weights (`pdserve weights`), by the "
            "revision of their first workers. Sum requests over routers."
        ),
        (
            _gauge("revision_share", "model revision", "Share of new requests, 0 to 1."),
            _counter(
                "revision_requests",
                "model revision result",
                "Requests: `ended`, `failed` by a fault of the service, `retried` (attempts that "
                "failed); answers: `ttft`, `ttft_met`, `tpot`, `tpot_met`.",
            ),
        ),
    ),
    "Weights": (
        "From each router, for the updates that it made (`pdserve checkpoint`).",
        (
            _counter(
                "weights_updates",
                "model result",
                "Updates of a model's weights: `done`, or `failed` without a change.",
            ),
            _gauge("weights_update", "model", "Number of the update whose weights are served."),
            _gauge(
                "weights_laggards", "model", "Workers without these weights, which serve nothing."
            ),
        ),
    ),
    "Tenants": (
        "From each router, for its own requests: sum over routers.",
        (
            _counter("tenant_answers", "tenant", "Requests answered in full."),
            _counter("tenant_tokens", "tenant kind", "Tokens of answered requests."),
            _counter("tenant_refusals", "tenant code reason", "Requests refused before any work."),
            _counter("tenant_cost", "tenant", "Cost of answered requests, without waste."),
            _gauge(
                "tenant_requests_open",
                "tenant",
                "Requests waiting and running; each of `n` answers counts.",
            ),
        ),
    ),
    "Cost and energy": (
        (
            "From each router: sum over routers. Each second of a worker has one `kind`: `prefill` "
            "or `decode` for an answer, `waste` with a `reason` for work that no answer needs or "
            "that was repeated, or `idle`. A killed worker's time since its last lease renewal "
            "(three per `router.lease_s`) is not counted. Costs need `router.prices`, joules need "
            "an energy meter."
        ),
        (
            _counter("engine_seconds", _ACCOUNT, "Time of workers."),
            _counter("cost", _ACCOUNT, "Price of that time, in the currency of `router.prices`."),
            _counter("energy_joules", _ACCOUNT, "Energy in that time."),
            _counter("cost_saved", "model by", "Price of prefill that was not needed."),
        ),
    ),
    "Workers": (
        (
            "From each router. Every router reports every worker: take the maximum over routers, "
            "not the sum. Each probe and role change is counted by one router: sum over routers."
        ),
        (
            _gauge(
                "workers",
                "model role state",
                "Workers by state, lost ones included.",
            ),
            _gauge("worker_num_running_reqs", _KV, "Requests that a worker's engine computes."),
            _gauge("worker_num_waiting_reqs", _KV, "Requests that wait in a worker's engine."),
            _counter("worker_busy_seconds", _KV, "Duration of a worker's engine steps."),
            _gauge("worker_kv_cache_usage", _KV, "Used share of a worker's KV cache, 0 to 1."),
            _counter(
                "worker_preemptions",
                _KV,
                "Requests that lost their KV to others, and are computed again: the KV cache is "
                "too small for the load.",
            ),
            _counter("worker_draft_tokens", _KV, "Tokens that speculation proposed."),
            _counter("worker_accepted_draft_tokens", _KV, "Those that the model accepted."),
            _gauge("worker_session_blocks", _KV, "KV blocks retained for sessions."),
            _counter(
                "worker_retentions_ended",
                f"{_KV} reason",
                "Retentions that ended: the next turn used the blocks (returned), the time was "
                "over (expired), others were newer (budget), or requests needed all blocks "
                "(pressure).",
            ),
            _gauge("role_load", "model role", "Average load; 1 is full."),
            _gauge("role_workers_wanted", "model role", "Workers that the current load needs."),
            _gauge("prefix_blocks", "", "KV blocks in the index of cached prefixes."),
            _gauge(
                "kv_ejected_pairs",
                "",
                "Pairs of workers that are not used because their KV transfers failed.",
            ),
            _counter(
                "audits",
                "model result",
                "Audited answers: same, different, or skipped because the answer, its weights or "
                "the load did not allow it.",
            ),
            _gauge(
                "audit_suspects",
                "model",
                "Workers and pairs of workers with a different answer in the last day.",
            ),
            _counter("pair_probes", "model outcome", "Active health checks of pairs of workers."),
            _counter("worker_probes", "model outcome", "Active health checks of single workers."),
            _histogram(
                "role_change_seconds", "model role outcome", "From request to first placement."
            ),
        ),
    ),
    "KV transfers": (
        (
            "From each router for all workers, and from each worker for itself. Counters start at "
            "0 when the worker starts."
        ),
        (
            _gauge("worker_kv_pinned_blocks", _KV, "Blocks pinned: in flight or leased."),
            _gauge("worker_kv_in_flight_blocks", _KV, "Blocks that a transfer is filling."),
            _gauge("worker_kv_leased_blocks", _KV, "Blocks held until a consumer fetches them."),
            _gauge("worker_kv_transfers", _KV, "Transfers that hold blocks."),
            _gauge(
                "worker_kv_quarantined_slots",
                _KV,
                "Memory out of use because a peer may still write to it.",
            ),
            _gauge("worker_kv_transport_bytes", _KV, "Memory of transports besides the KV cache."),
            _gauge("worker_kv_links", _KV + " transport", "Links that are up."),
            _counter("worker_kv_pushed_bytes", _KV, "Bytes sent."),
            _counter("worker_kv_pushed_blocks", _KV, "Blocks sent."),
            _counter("worker_kv_push_seconds", _KV, "Time spent sending."),
            _counter("worker_kv_received_bytes", _KV, "Bytes received."),
            _counter("worker_kv_digest_seconds", _KV, "Time spent on digests of sent blocks."),
            _counter("worker_kv_failures", _KV, "Transfers that failed."),
            _counter(
                "worker_kv_downgrades",
                _KV,
                "Links that use a slower transport than they could: see `pdserve status`.",
            ),
            _counter(
                "worker_kv_dropped_links",
                _KV,
                "Connections without a valid handshake, or that broke the protocol.",
            ),
            _counter("worker_kv_expired_leases", _KV, "Leases of blocks that no consumer fetched."),
            _counter("worker_kv_refused_subscriptions", _KV, "Subscriptions that were refused."),
            _counter("worker_kv_receive_timeouts", _KV, "Transfers that did not arrive in time."),
            _counter("worker_kv_digest_mismatches", _KV, "Blocks that arrived damaged."),
            _counter("worker_kv_nccl_made", _KV, "NCCL communicators created."),
            _counter("worker_kv_nccl_evicted", _KV, "NCCL communicators closed to make room."),
            _counter("worker_kv_nccl_aborted", _KV, "NCCL communicators closed by a failure."),
        ),
    ),
    "Experts": (
        "From each rank of a data-parallel group, for itself, with expert parallelism on a CPU.",
        (
            _counter(
                "worker_expert_tokens",
                _KV,
                "How often an expert of this rank has computed a token, of any rank. Ranks have "
                "equal rates if their experts are loaded evenly. None with tensor parallelism.",
            ),
        ),
    ),
    "GPUs": (
        "From each worker, for its GPUs.",
        (
            _gauge("gpu_temperature_celsius", "gpu", "Temperature."),
            _gauge("gpu_memory_used_bytes", "gpu", "Memory in use."),
            _gauge("gpu_memory_bytes", "gpu", "Total memory."),
            _gauge("gpu_utilization_ratio", "gpu", "Share of time in which a kernel ran."),
            _gauge("gpu_power_watts", "gpu", "Power."),
            _counter("gpu_energy_joules", "gpu", "Energy since the driver started."),
            _gauge("gpu_clock_hertz", "gpu", "Clock of the multiprocessors."),
            _counter("gpu_ecc_errors", "gpu", "Uncorrected memory errors, including contained."),
            _gauge("gpu_xid", "gpu", "The last Xid error since the worker started; 0: none."),
            _gauge("gpu_throttled", "gpu reason", "1 while the clock is throttled."),
            _gauge(
                "gpu_faulty", "gpu reason", "1 while the worker gets no work because of the GPU."
            ),
        ),
    ),
    "Processes": (
        "From each router and each worker.",
        (
            _gauge("asyncio_tasks", "", "Open tasks of the event loop."),
            _gauge(
                "tls_not_after_seconds",
                "key",
                "Expiry of a certificate that new connections use, in seconds since 1970, by the "
                "configuration key of its file.",
            ),
            _counter(
                "tls_file_errors",
                "key",
                "Changed TLS files that were rejected because of an error: see the log.",
            ),
        ),
    ),
    "Event loop": (
        "From each router.",
        (
            _histogram(
                "event_loop_lag_seconds",
                "",
                "Delay of the event loop, sampled ten times per second. Tokens and health checks "
                "are delayed as long.",
            ),
        ),
    ),
}
METRICS = {spec.name: spec for _, specs in TABLE.values() for spec in specs}


class Histogram:
    """Counts of values by bucket, and their sum. `bounds` are inclusive upper bounds; a last bucket
    has all larger values. Each bucket keeps its last traced value as an exemplar."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, count: int = 1, trace_id: str = "") -> None:
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += count
        self.total += value * count
        if trace_id:
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())


def family(name: str, rows: Iterable[Row]) -> Metric:
    """Return a counter or a gauge of the table with its `rows` of (label values, value). Raises
    KeyError for a metric that is not in the table."""
    spec = METRICS[name]
    kind = CounterMetricFamily if spec.kind is Kind.COUNTER else GaugeMetricFamily
    shown = kind(f"pdserve_{name}", spec.text, labels=spec.labels)
    for labels, value in rows:
        shown.add_metric(labels, value)
    return shown


def histogram_family(name: str, rows: Iterable[tuple[Sequence[str], Histogram]]) -> Metric:
    """Return a histogram of the table with its `rows` of (label values, histogram). Raises KeyError
    for a metric that is not in the table."""
    spec = METRICS[name]
    shown = HistogramMetricFamily(f"pdserve_{name}", spec.text, labels=spec.labels)
    limits = [*map(str, spec.bounds), "+Inf"]
    for labels, histogram in rows:
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        below = 0
        for i, (limit, count) in enumerate(zip(limits, histogram.counts, strict=True)):
            below += count
            exemplar = histogram.exemplars.get(i)
            buckets.append((limit, below) if exemplar is None else (limit, below, exemplar))
        shown.add_metric(labels, buckets, histogram.total)
    return shown


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the body for Prometheus and its content type. `accept` is the request's header. Only
    OpenMetrics has exemplars."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class KvCollector(Collector):
    """Exports the current KV reports of workers at each scrape."""

    def __init__(self, reports: Callable[[], Iterable[Labelled]]) -> None:
        self._reports = reports

    def describe(self) -> Iterator[Metric]:
        """Return nothing: the metrics depend on the workers' reports, so a registry cannot check
        their names in advance."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        reports = [
            ((info.model.name, info.role.value, info.worker_id), report)
            for info, report in self._reports()
        ]
        for name, path in _KV_GAUGES.items():
            value = attrgetter(path)
            yield family(f"worker_kv_{name}", [(labels, value(kv)) for labels, kv in reports])
        yield family(
            "worker_kv_links",
            [
                ((*labels, transport), count)
                for labels, kv in reports
                for transport, count in sorted(kv.links.items())
            ],
        )
        for total in sorted({name for _, kv in reports for name in kv.totals}):
            # Prometheus' names have the unit in full.
            name = (
                f"worker_kv_{total[:-2]}_seconds" if total.endswith("_s") else f"worker_kv_{total}"
            )
            # A worker of another version may report a total that is not in this table.
            if name in METRICS:
                rows = [(labels, kv.totals[total]) for labels, kv in reports if total in kv.totals]
                yield family(name, rows)


class ExpertCollector(Collector):
    """Exports the expert loads of workers at each scrape."""

    def __init__(self, loads: Callable[[], Iterable[tuple[WorkerInfo, int]]]) -> None:
        self._loads = loads

    def describe(self) -> Iterator[Metric]:
        """Return nothing: a registry must not collect when this is registered."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        rows = [((x.model.name, x.role.value, x.worker_id), tokens) for x, tokens in self._loads()]
        if rows:
            yield family("worker_expert_tokens", rows)


_KV_GAUGES = {
    "pinned_blocks": "ledger.pinned_blocks",
    "in_flight_blocks": "ledger.in_flight_blocks",
    "leased_blocks": "ledger.leased_blocks",
    "transfers": "ledger.transfers",
    "quarantined_slots": "quarantined_slots",
    "transport_bytes": "held_bytes",
}


def watch_tasks(registry: CollectorRegistry) -> None:
    """Add a gauge of this event loop's open tasks, to detect leaked tasks."""
    spec = METRICS["asyncio_tasks"]
    gauge = Gauge(spec.shown, spec.text, registry=registry)
    gauge.set_function(lambda: len(asyncio.all_tasks()))


_INTRO = """\
# Metrics

Routers serve `/metrics` on the HTTP port, workers on their debug port. The format is Prometheus'
text format, or OpenMetrics if the request accepts it. With OpenMetrics and tracing, each histogram
bucket names the trace of a request (exemplars). Dashboards and alert rules are in
`deploy/dashboards/`. This file is generated by `make docs`.

A worker with vLLM also serves vLLM's own metrics (`vllm:num_requests_running` and the rest), with
vLLM's names and labels: [boards and recipes made for vLLM](migrate.md#boards-and-recipes-for-vllm).
"""


def as_markdown() -> str:
    """Return the text of docs/metrics.md."""
    parts = [_INTRO]
    for heading, (whose, specs) in TABLE.items():
        has_otel = any(spec.otel for spec in specs)
        titles = ["metric", "kind", "labels", "meaning", *(["OpenTelemetry"] if has_otel else [])]
        rows = [titles, ["---"] * len(titles)]
        for spec in specs:
            labels = " ".join(f"`{label}`" for label in spec.labels)
            row = [f"`{spec.shown}`", spec.kind, labels, spec.text]
            rows.append(row + ([f"`{spec.otel}`" if spec.otel else ""] if has_otel else []))
        table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        parts.append(f"## {heading}\n\n{whose}\n\n{table}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    path = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
    path.write_text(as_markdown(), encoding="utf-8")
