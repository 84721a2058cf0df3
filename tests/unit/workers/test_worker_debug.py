"""The HTTP listener of a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY, Gauge

from pdserve.net import rpc
from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from tests.support.fake_router import MODEL, PLAIN, WAIT_S, FakeRegistry, FakeRouter, running_worker
from workers.fake.engine import FakeEngine

if TYPE_CHECKING:
    from workers.server import WorkerServer


async def get(server: WorkerServer, path: str, method: str = "GET") -> tuple[int, Any]:
    address = server.info.debug_address
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{address}{path}") as response,
    ):
        is_json = response.content_type == "application/json"
        return response.status, await (response.json() if is_json else response.text())


async def test_a_pinned_block_is_shown_until_it_is_given_up() -> None:
    async with running_worker(Role.PREFILL) as server, FakeRouter(server) as router:
        await router.submit(1, PLAIN, prefill=w.PrefillPhase(transfer_id="t-7"))
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
        labels = f'model="{server.info.model.name}",role="prefill",worker="prefill-0"'
        _, text = await get(server, "/metrics")
        for kind, blocks in (("pinned", 1), ("leased", 1), ("in_flight", 0)):
            name = f"pdserve_worker_kv_{kind}_blocks"
            assert f"{name}{{{labels}}} {blocks:.1f}" in text.splitlines()
        await router.cancel(1)
        await router.until_empty()
        _, shown = await get(server, "/debug/kv")
        assert shown["ledger"]["pinned_blocks"] == 0


async def test_a_worker_without_kv_reports_it() -> None:
    async with running_worker(engine=FakeEngine(MODEL)) as server:
        status, shown = await get(server, "/debug/kv")
        assert (status, shown["kv"], shown["ranks"]) == (200, None, [])
        _, text = await get(server, "/metrics")
        (tasks,) = [x for x in text.splitlines() if not x.startswith("#")]
        assert tasks.startswith("pdserve_asyncio_tasks ")


async def test_metrics_of_vllm_have_its_names_and_the_names_of_adapters() -> None:
    loras = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
    gauges = [
        Gauge("vllm:num_requests_running", "", ("model_name", "engine")),
        Gauge("vllm:lora_requests_info", "", loras),
        Gauge("another_library", ""),
    ]
    try:
        gauges[0].labels("m", "0").set(2)
        for at, running in enumerate(("sql@a1,law@b1", "sql@a2,law@b1")):
            gauges[1].labels("4", "", running).set(at)
        async with running_worker(engine=FakeEngine(MODEL)) as server:
            _, text = await get(server, "/metrics")
    finally:
        for gauge in gauges:
            REGISTRY.unregister(gauge)
    adapters = 'max_lora="4",running_lora_adapters="sql,law",waiting_lora_adapters=""'
    assert [x for x in text.splitlines() if not x.startswith(("#", "pdserve_"))] == [
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0',
        f"vllm:lora_requests_info{{{adapters}}} 1.0",
    ]


async def test_health_and_readiness_follow_drain_and_death() -> None:
    async with running_worker(Role.PREFILL) as server:
        assert await get(server, "/healthz") == (200, {"status": "ok"})
        assert await get(server, "/ready") == (200, {"status": "ready"})
        await server.readiness.drain(WAIT_S)
        assert await get(server, "/healthz") == (200, {"status": "draining"})
        assert (await get(server, "/ready"))[0] == 503
        server.service._on_failure(RuntimeError("the test says so"))
        assert await get(server, "/healthz") == (503, {"status": "failed"})


async def test_a_worker_without_a_router_lives_and_is_not_ready() -> None:
    registry = FakeRegistry(lease_s=0.03)
    async with running_worker(registry=registry) as server:
        registry.failure = True
        while server.routers.is_connected:
            await server.routers.changed()
        assert await get(server, "/healthz") == (200, {"status": "ok"})
        status, shown = await get(server, "/ready")
        assert (status, shown["reason"]) == (503, "no router knows this worker")
        async with rpc.open_channel(server.info.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        registry.failure = False


@pytest.mark.parametrize(("method", "path"), [("GET", "/debug"), ("POST", "/debug/kv")])
async def test_nothing_else_is_served(method: str, path: str) -> None:
    async with running_worker() as server:
        status, answer = await get(server, path, method)
        assert status == 404
        assert path in answer["error"]
