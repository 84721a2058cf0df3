"""The HTTP listener of a worker: /debug/kv, /metrics and /healthz."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from pdserve.metrics import CONTENT_TYPE, KvCollector, watch_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_transfer.snapshot import KvSnapshot
    from pdserve.metrics import Labelled
    from pdserve.types import WorkerInfo
    from workers.service import WorkerService

    Handler = Callable[[], web.Response]


class DebugApp:
    """Handlers of the pages. They read state and change nothing."""

    def __init__(self, service: WorkerService, describe: Callable[[], WorkerInfo]) -> None:
        self._service = service
        self._describe = describe
        self._registry = CollectorRegistry()
        self._registry.register(KvCollector(self._reports))
        watch_tasks(self._registry)
        self._pages: dict[str, Handler] = {
            "/debug/kv": self._kv,
            "/metrics": self._metrics,
            "/healthz": self._health,
        }

    async def handle(self, request: web.BaseRequest) -> web.Response:
        page = self._pages.get(request.path)
        if page is None:
            text = f"there is no page {request.path}"
            return web.json_response({"error": text, "paths": [*self._pages]}, status=404)
        if request.method != "GET":
            text, allow = f"{request.path} takes GET only", {"allow": "GET"}
            return web.json_response({"error": text}, status=405, headers=allow)
        return page()

    def _health(self) -> web.Response:
        if self._service.failed.done():
            return web.json_response({"status": "failed"}, status=503)
        return web.json_response({"status": "draining" if self._service.is_draining else "ok"})

    def _metrics(self) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"content-type": CONTENT_TYPE})

    def _reports(self) -> Iterator[Labelled]:
        report = self._service.kv_report()
        if report is not None:
            yield self._describe(), report

    def _kv(self) -> web.Response:
        """The state of KV transfers; `ranks` is empty for a worker that moves no KV."""
        info, state, report = self._describe(), self._service.kv_state(), self._service.kv_report()
        ledger = self._service.ledger() if state is None else state.ledger
        values = {
            "worker_id": info.worker_id,
            "instance_id": info.instance_id,
            "role": info.role,
            "kv": None if info.kv is None else asdict(info.kv),
            "ledger": {"pinned_blocks": ledger.pinned_blocks, **asdict(ledger)},
            "quarantined_slots": 0 if report is None else report.quarantined_slots,
            "totals": {} if report is None else report.totals,
            "ranks": [] if state is None else [_rank(x) for x in state.ranks],
        }
        return web.json_response(values)


def _rank(snapshot: KvSnapshot) -> dict[str, Any]:
    # Its age: a reader knows nothing of our clock.
    plain = asdict(replace(snapshot, taken_at=time.monotonic() - snapshot.taken_at))
    return {"seen_s_ago": plain.pop("taken_at"), **plain}
