"""The HTTP face of a worker: what it shows, and that it can be left out."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from tests.unit.workers.router_side import (
    MODEL,
    PLAIN,
    WAIT_S,
    RouterSide,
    a_worker,
)
from workers.fake.engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workers.server import WorkerServer

PREFILL = {"prefill": w.PrefillPhase(transfer_id="t-7")}


async def get(server: WorkerServer, path: str, method: str = "GET") -> tuple[int, Any]:
    address = server.info.debug_address
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{address}{path}") as response,
    ):
        is_json = response.content_type == "application/json"
        return response.status, await (response.json() if is_json else response.text())


def metric(text: str, name: str, labels: Mapping[str, str]) -> float:
    """The one sample with these labels."""
    wanted = "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}"
    (line,) = [x for x in text.splitlines() if x.startswith(f"{name}{wanted} ")]
    return float(line.rpartition(" ")[2])


async def test_a_held_transfer_is_shown_until_it_is_given_up() -> None:
    async with a_worker(Role.PREFILL) as server, RouterSide(server) as router:
        await router.submit(1, PLAIN, **PREFILL)
        await router.finish(1)
        status, shown = await get(server, "/debug/kv")
        assert status == 200
        assert (shown["worker_id"], shown["instance_id"]) == ("prefill-0", "prefill-instance")
        assert shown["ledger"] == {
            "pinned_blocks": 1,
            "in_flight_blocks": 0,
            "leased_blocks": 1,
            "transfers": 1,
            "engine_requests": 1,
        }
        (rank,) = shown["ranks"]
        (transfer,) = rank["transfers"]
        assert (transfer["transfer_id"], transfer["state"]) == ("t-7", "leased")
        assert (transfer["side"], transfer["blocks"]) == ("producer", 1)

        labels = {"model": server.info.model.name, "role": "prefill", "worker": "prefill-0"}
        _, text = await get(server, "/metrics")
        assert metric(text, "pdserve_worker_kv_pinned_blocks", labels) == 1
        assert metric(text, "pdserve_worker_kv_leased_blocks", labels) == 1
        assert metric(text, "pdserve_worker_kv_in_flight_blocks", labels) == 0

        await router.cancel(1)
        await router.until_empty()
        _, shown = await get(server, "/debug/kv")
        assert shown["ledger"]["pinned_blocks"] == 0
        assert shown["ranks"][0]["transfers"] == []


async def test_a_worker_without_kv_says_so() -> None:
    async with a_worker(engine=FakeEngine(MODEL)) as server:
        status, shown = await get(server, "/debug/kv")
        assert (status, shown["kv"], shown["ranks"]) == (200, None, [])
        _, text = await get(server, "/metrics")
        (tasks,) = [x for x in text.splitlines() if not x.startswith("#")]
        assert tasks.startswith("pdserve_asyncio_tasks ")


async def test_health_follows_drain_and_death() -> None:
    async with a_worker(Role.PREFILL) as server:
        assert await get(server, "/healthz") == (200, {"status": "ok"})
        await server.drain(WAIT_S)
        assert await get(server, "/healthz") == (200, {"status": "draining"})
        server.service._on_failure(RuntimeError("the test says so"))
        assert await get(server, "/healthz") == (503, {"status": "failed"})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/debug", 404), ("POST", "/debug/kv", 405), ("PUT", "/", 404)],
)
async def test_nothing_else_is_served(method: str, path: str, status: int) -> None:
    async with a_worker() as server:
        got, answer = await get(server, path, method)
        assert got == status
        assert path in answer["error"]


async def test_the_face_is_gone_when_the_worker_has_stopped() -> None:
    async with a_worker() as server:
        host, _, port = server.info.debug_address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5.0)
