"""The HTTP listener of a worker: /debug/kv, /metrics, /healthz and /ready."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry

from pdserve.errors import PermissionDenied
from pdserve.observe.metrics import ExpertCollector, KvCollector, render, watch_tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from prometheus_client.registry import Collector

    from pdserve.security.browsers import BrowserGuard
    from pdserve.types import KvReport, WorkerInfo
    from workers.intake import Intake
    from workers.service import WorkerService


def debug_handler(
    service: WorkerService,
    intake: Intake,
    describe: Callable[[], WorkerInfo],
    collectors: Iterable[Collector],
    unready: Callable[[], str],
    browsers: BrowserGuard,
) -> Callable[[web.BaseRequest], Awaitable[web.Response]]:
    """Return the handler of the pages. They read state and change nothing. `collectors` add
    metrics to those of KV. `unready` returns why the worker gets no requests, or an empty text."""

    def experts() -> list[tuple[WorkerInfo, int]]:
        tokens = service.account.busy.expert_tokens
        return [(describe(), tokens)] if tokens else []

    def reports() -> list[tuple[WorkerInfo, KvReport]]:
        state = service.kv_state()
        return [] if state is None else [(describe(), state.report())]

    registry = CollectorRegistry()
    registry.register(KvCollector(reports))
    registry.register(ExpertCollector(experts))
    for collector in collectors:
        registry.register(collector)
    watch_tasks(registry)

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
        page = pages.get(request.path)
        if page is None or request.method != "GET":
            text = f"there is no page {request.method} {request.path}"
            return web.json_response({"error": text, "paths": [*pages]}, status=404)
        return page(request)

    return handle


def _kv_state(service: WorkerService, info: WorkerInfo) -> dict[str, object]:
    """Return the state of KV transfers; `ranks` is empty for a worker that moves no KV."""
    state, ledger, ranks = service.kv_state(), service.ledger(), []
    report = None if state is None else state.report()
    for snapshot in () if state is None else state.ranks:
        plain = asdict(snapshot)
        # Its age: a reader knows nothing of our clock.
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
