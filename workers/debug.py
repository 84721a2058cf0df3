"""The HTTP face of a worker, for people and Prometheus: /debug/kv, /metrics and /healthz.

It reads what there is to read and changes nothing; the engine does not notice.
"""

from __future__ import annotations

import json
import logging
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

    Answer = tuple[int, str, bytes]  # status, content type, body

logger = logging.getLogger(__name__)

_JSON = "application/json"


class DebugApp:
    """Handlers of the debug pages."""

    def __init__(self, worker: WorkerService, describe: Callable[[], WorkerInfo]) -> None:
        self._worker = worker
        self._describe = describe
        self._registry = CollectorRegistry()
        self._registry.register(KvCollector(self._reports))
        watch_tasks(self._registry)
        self._routes: dict[str, Callable[[], Answer]] = {
            "/debug/kv": self._kv,
            "/metrics": self._render,
            "/healthz": self._health,
        }

    async def handle(self, request: web.BaseRequest) -> web.Response:
        status, content_type, body = self._answer(request.method, request.path)
        headers = {"content-type": content_type}
        if status == 405:
            headers["allow"] = "GET"
        return web.Response(body=body, status=status, headers=headers)

    def _answer(self, method: str, path: str) -> Answer:
        route = self._routes.get(path)
        if route is None:
            return _json(404, {"error": f"there is nothing at {path}", "paths": [*self._routes]})
        if method != "GET":
            return _json(405, {"error": f"{path} takes GET only"})
        return route()

    def _health(self) -> Answer:
        if self._worker.failed.done():
            return _json(503, {"status": "failed"})
        return _json(200, {"status": "draining" if self._worker.is_draining else "ok"})

    def _render(self) -> Answer:
        return 200, CONTENT_TYPE, generate_latest(self._registry)

    def _reports(self) -> Iterator[Labelled]:
        report = self._worker.kv_report()
        if report is not None:
            yield self._describe(), report

    def _kv(self) -> Answer:
        """`ranks` is empty for a worker that moves no KV."""
        info, state, report = self._describe(), self._worker.kv_state(), self._worker.kv_report()
        ledger = self._worker.ledger() if state is None else state.ledger
        return _json(
            200,
            {
                "worker_id": info.worker_id,
                "instance_id": info.instance_id,
                "role": info.role,
                "kv": None if info.kv is None else asdict(info.kv),
                "ledger": {"pinned_blocks": ledger.pinned_blocks, **asdict(ledger)},
                "quarantined_slots": 0 if report is None else report.quarantined_slots,
                "totals": {} if report is None else report.totals,
                "ranks": [] if state is None else [_rank(x) for x in state.ranks],
            },
        )


def _rank(snapshot: KvSnapshot) -> dict[str, Any]:
    # How old it is says more to a reader than a time on a clock that nobody sees.
    plain = asdict(replace(snapshot, taken_at=time.monotonic() - snapshot.taken_at))
    return {"seen_s_ago": plain.pop("taken_at"), **plain}


def _json(status: int, value: object) -> Answer:
    return status, _JSON, json.dumps(value, indent=2).encode() + b"\n"
