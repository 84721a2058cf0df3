"""The HTTP listener of a worker: /debug/kv, /metrics, /healthz and /ready, and trainers' calls."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.registry import Collector

from pdserve.errors import PermissionDenied
from pdserve.observe.metrics import ExpertCollector, KvCollector, render, watch_tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from prometheus_client.core import Metric
    from prometheus_client.samples import Sample

    from pdserve.security.browsers import BrowserGuard
    from pdserve.types import KvReport, WorkerInfo
    from workers.control.worker_intake import WorkerIntake
    from workers.link.trainer_calls import TrainerCalls
    from workers.service import WorkerService


def debug_handler(
    service: WorkerService,
    intake: WorkerIntake,
    describe: Callable[[], WorkerInfo],
    collectors: Iterable[Collector],
    unready: Callable[[], str],
    browsers: BrowserGuard,
    trainers: TrainerCalls | None = None,
) -> Callable[[web.BaseRequest], Awaitable[web.Response]]:
    """Return the handler of the pages. They read state and change nothing. `collectors`: further
    metrics beside KV's. `unready` returns why the worker gets no requests, or "". `trainers`
    answers trainers' calls, if they are accepted."""

    registry = _registry(service, describe, collectors)

    def health(_: web.BaseRequest) -> web.Response:
        if service.failed.done():
            return web.json_response({"status": "failed"}, status=503)
        return web.json_response({"status": "draining" if intake.is_draining else "ok"})

    def ready(_: web.BaseRequest) -> web.Response:
        reason = unready()
        status = {"status": "not ready", "reason": reason} if reason else {"status": "ready"}
        return web.json_response(status, status=503 if reason else 200)

    def metrics(request: web.BaseRequest) -> web.Response:
        body, content_type = render(registry, request.headers.get("accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})

    pages = {
        "/debug/kv": lambda _: web.json_response(_kv_state(service, describe())),
        "/metrics": metrics,
        "/healthz": health,
        "/ready": ready,
    }

    async def handle(request: web.BaseRequest) -> web.Response:
        try:
            browsers.check(request.headers.get("host"), request.headers.get("origin"))
        except PermissionDenied as error:
            return web.json_response({"error": error.message}, status=403)
        if trainers is not None and trainers.takes(request):
            return await trainers.answer(request)
        page = pages.get(request.path)
        if page is None or request.method != "GET":
            text = f"there is no page {request.method} {request.path}"
            return web.json_response({"error": text, "paths": [*pages]}, status=404)
        return page(request)

    return handle


def _registry(
    service: WorkerService, describe: Callable[[], WorkerInfo], collectors: Iterable[Collector]
) -> CollectorRegistry:
    """Return the metrics of this worker, with those of `collectors`."""

    def experts() -> list[tuple[WorkerInfo, int]]:
        tokens = service.account.busy.expert_tokens
        return [(describe(), tokens)] if tokens else []

    def reports() -> list[tuple[WorkerInfo, KvReport]]:
        state = service.kv_state()
        return [] if state is None else [(describe(), state.report())]

    registry = CollectorRegistry()
    registry.register(KvCollector(reports))
    registry.register(ExpertCollector(experts))
    for collector in (*collectors, _VllmMetrics()):
        registry.register(collector)
    watch_tasks(registry)
    return registry


class _VllmMetrics(Collector):
    """Exports vLLM's metrics from the process' default registry, if vLLM is the engine."""

    def describe(self) -> Iterator[Metric]:
        """Return nothing: vLLM registers its metrics when the engine starts."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        for metric in REGISTRY.collect():
            if metric.name == "vllm:lora_requests_info":
                metric.samples = _by_adapter_name(metric.samples)
            if metric.name.startswith("vllm:"):
                yield metric


def _by_adapter_name(samples: Iterable[Sample]) -> list[Sample]:
    """Return `samples`, whose labels list adapter keys, with adapter names, which pickers compare
    with `model` of a request. Of two samples with equal names the latest is kept."""
    found: dict[tuple[str, ...], Sample] = {}
    for sample in sorted(samples, key=lambda x: x.value):
        labels = {
            label: ",".join(key.rpartition("@")[0] for key in keys.split(","))
            if label.endswith("_adapters")
            else keys
            for label, keys in sample.labels.items()
        }
        found[tuple(labels.values())] = sample._replace(labels=labels)
    return list(found.values())


def _kv_state(service: WorkerService, info: WorkerInfo) -> dict[str, object]:
    """Return the state of KV transfers; `ranks` is empty for a worker that moves no KV."""
    state, ledger, ranks = service.kv_state(), service.ledger(), []
    report = None if state is None else state.report()
    for snapshot in () if state is None else state.ranks:
        plain = asdict(snapshot)
        # An age, because a reader does not know our clock.
        ranks.append({"seen_s_ago": time.monotonic() - plain.pop("taken_at"), **plain})
    return {
        "worker_id": info.worker_id,
        "instance_id": info.instance_id,
        "role": info.role,
        "kv": None if info.kv is None else asdict(info.kv),
        "ledger": {"pinned_blocks": ledger.pinned_blocks, **asdict(ledger)},
        "quarantined_slots": 0 if report is None else report.quarantined_slots,
        "totals": {} if report is None else report.totals,
        "ranks": ranks,
    }
