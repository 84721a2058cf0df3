"""The registry service over a real server: workers join, renew, leave and are listed."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from pdserve import wire
from pdserve.background import background
from pdserve.config import QueueConfig, RouterConfig, SloConfig
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.net import rpc
from pdserve.net.rpc import PLAIN
from pdserve.types import IDLE, Account, Role, WorkerLoad
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub, add_RegistryServicer_to_server
from router.api.admin import RegistryService
from router.control.adapters import ServedAdapters
from router.control.autoscaler import Autoscaler, Loads
from router.control.leases import WorkerLeases
from router.control.role_change import RoleChanger
from router.fleet.billing import Billing
from router.fleet.link_pool import LinkPool
from router.fleet.on_demand import OnDemandModels
from router.fleet.open import OpenedFleet
from router.fleet.registry import Fleet
from router.metrics import RouterMetrics
from router.request_path import build_request_path
from tests.support.router_stack import MODEL, Clock, ScriptedWorker, worker_info
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.v1.worker_pb2_grpc import RegistryAsyncStub

LOAD = WorkerLoad(1, 2, 0.5, 50)
LOADS = {"m": Loads(1, 2, 0.5, 1.5)}


@asynccontextmanager
async def registry(
    fleet: Fleet, on_demand: OnDemandModels | None = None, metrics: RouterMetrics | None = None
) -> AsyncIterator[RegistryAsyncStub]:
    metrics, config = metrics or RouterMetrics(SloConfig()), RouterConfig()
    server, link_pool = rpc.make_server(), LinkPool(fleet, router_id="router-1")
    workers = OpenedFleet(fleet, link_pool, Billing({}, metrics.count))
    path = replace(build_request_path(config, workers, metrics, {}), on_demand=on_demand)
    changer = RoleChanger(fleet, link_pool.links, PLAIN, metrics)
    autoscaler = Autoscaler(fleet, path.costs, path.admission, changer, config.roles)
    autoscaler.loads |= LOADS
    remarks = [("m", "no parser fits")]
    leases = WorkerLeases(workers, ServedAdapters(), path.generating)
    service = RegistryService(path, autoscaler, leases, lambda: remarks)
    add_RegistryServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with (
        link_pool,
        background("leases", leases.renew_over_links),
        rpc.open_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield RegistryStub(channel)
    await server.stop(None)


def register(worker: ScriptedWorker) -> w.RegisterRequest:
    return w.RegisterRequest(worker=wire.worker_to_pb(worker.info))


async def until_ready(fleet: Fleet) -> None:
    while fleet.members["p"].state != "ready":
        assert await fleet.capacity_change(until=asyncio.get_running_loop().time() + WAIT_S)


def renewal(number: int, worker_id: str = "p", **values: Any) -> w.StepFrame:
    values |= {"worker_id": worker_id, "instance_id": "e1", "number": number}
    return w.StepFrame(renewal=w.RenewRequest(**values))


async def test_a_worker_joins_renews_is_listed_and_leaves() -> None:
    worker = ScriptedWorker("p", Role.PREFILL)
    fleet = Fleet(lease_s=5.0, clock=lambda: 0.0)
    async with worker.serving(), registry(fleet) as stub:
        assert await stub.Register(register(worker)) == w.RegisterResponse(
            lease_s=5.0, router_id="router-1"
        )
        await until_ready(fleet)
        (entry,) = (await stub.ListWorkers(w.ListWorkersRequest())).workers
        assert not entry.HasField("load"), "an unknown load is not zeros"
        assert entry.state == "ready"
        assert wire.worker_from_pb(entry.info) == worker.info

        renew = w.RenewRequest(
            worker_id="p", instance_id="e1", load=wire.load_to_pb(LOAD), draining=True
        )
        assert (await stub.Renew(renew)).lease_s == 5.0
        (entry,) = (await stub.ListWorkers(w.ListWorkersRequest())).workers
        assert (wire.load_from_pb(entry.load), entry.state) == (LOAD, "draining")

        await stub.Deregister(w.DeregisterRequest(worker_id="p", instance_id="e1"))
        (entry,) = (await stub.ListWorkers(w.ListWorkersRequest())).workers
        assert entry.state == "left"


async def test_reported_time_is_counted_and_open_work_of_a_replaced_worker_is_waste() -> None:
    fleet, metrics = Fleet(), RouterMetrics(SloConfig())
    account = wire.account_to_pb(Account({IDLE: 5.0}, {}, open_s=3.0, busy_s=9.0))
    async with registry(fleet, metrics=metrics) as stub:
        for instance_id in ("e1", "e2"):
            info = worker_info("p", Role.PREFILL, instance_id=instance_id)
            await stub.Register(w.RegisterRequest(worker=wire.worker_to_pb(info)))
            await stub.Renew(
                w.RenewRequest(worker_id="p", instance_id=instance_id, account=account)
            )
        await stub.Deregister(w.DeregisterRequest(worker_id="p", instance_id="e2", account=account))
    counted = {
        line.partition("{")[2]
        for line in metrics.render()[0].decode().splitlines()
        if line.startswith("pdserve_engine_seconds_total{")
    }
    labels = 'kind="{}",model="demo",reason="{}",role="prefill"}} {}'
    assert counted == {labels.format("idle", "", 15.0), labels.format("waste", "worker_lost", 3.0)}


async def test_a_worker_renews_over_its_link() -> None:
    worker, clock = ScriptedWorker("p", Role.PREFILL), Clock()
    fleet = Fleet(lease_s=5.0, clock=clock)
    async with worker.serving(), registry(fleet) as stub, asyncio.timeout(WAIT_S):
        await stub.Register(register(worker))
        await until_ready(fleet)
        clock.now = 0.1
        worker.send_frame(renewal(1, load=wire.load_to_pb(LOAD), draining=True))
        assert await worker.renewed.get() == w.RenewResponse(lease_s=5.0, number=1)
        member = fleet.members["p"]
        assert (member.state, member.reported.load, member.lease_end) == ("draining", LOAD, 5.1)
        worker.send_frame(renewal(2, kv=w.KvReport(totals={"not a name": 1.0})))
        worker.send_frame(renewal(3))
        assert (await worker.renewed.get()).number == 3, "a bad one is not acknowledged"
        assert worker.hellos == 1
        worker.send_frame(renewal(4, worker_id="q"))
        await worker.ended.wait()


async def test_a_renewal_that_comes_twice_or_late_changes_nothing() -> None:
    """The worker has repeated it by a call, because its link was slow."""
    worker, metrics = ScriptedWorker("p", Role.PREFILL), RouterMetrics(SloConfig())
    fleet, account = Fleet(), wire.account_to_pb(Account({IDLE: 5.0}, {}, open_s=0.0, busy_s=9.0))
    late, frame = renewal(1, account=account), renewal(2, account=account, draining=True)
    async with worker.serving(), registry(fleet, metrics=metrics) as stub, asyncio.timeout(WAIT_S):
        await stub.Register(register(worker))
        await until_ready(fleet)
        await stub.Renew(frame.renewal)
        for each in (late, frame):
            worker.send_frame(each)
            assert (await worker.renewed.get()).number == each.renewal.number
        assert fleet.members["p"].state == "draining"
        text = metrics.render()[0].decode()
    assert 'kind="idle",model="demo",reason="",role="prefill"} 5.0' in text


async def test_the_needs_of_each_role_are_listed() -> None:
    async with registry(Fleet(lease_s=5.0)) as stub:
        needs = (await stub.ListWorkers(w.ListWorkersRequest())).needs
    found = {(x.model, wire.role_from_pb(x.role)): x.workers for x in needs}
    assert found == {("m", Role.PREFILL): 0.5, ("m", Role.DECODE): 1.5}


async def test_no_needs_are_listed_for_a_model_whose_first_workers_still_load() -> None:
    """Otherwise a scaler to zero would stop them."""
    fleet = Fleet(lease_s=5.0)
    on_demand = OnDemandModels(
        ("m",), fleet, {}, QueueConfig(timeout_s=WAIT_S, max_queued_requests=1)
    )
    async with registry(fleet, on_demand) as stub:
        listed = await stub.ListWorkers(w.ListWorkersRequest())
        assert not listed.needs
        assert [(x.model, x.text) for x in listed.tools] == [("m", "no parser fits")]


async def test_figures_that_are_none_are_refused_by_name() -> None:
    worker = ScriptedWorker("p", Role.PREFILL)
    fleet = Fleet(lease_s=5.0, clock=lambda: 0.0)
    async with worker.serving(), registry(fleet) as stub:
        await stub.Register(register(worker))
        bad = w.KvReport(totals={"not a name": 1.0})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Renew(w.RenewRequest(worker_id="p", instance_id="e1", kv=bad))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fleet.members["p"].reported.kv is None


@pytest.mark.parametrize(
    ("worker", "field", "message"),
    [
        (
            worker_info("x", Role.DECODE, model=replace(MODEL, vocab_size=7)),
            "worker.model.vocab_size",
            "vocab_size 7, but 512 on worker p",
        ),
        (
            worker_info("x", Role.DECODE, instance_id=""),
            "worker.instance_id",
            "worker.instance_id is missing",
        ),
        *(
            (
                worker_info("x", Role.DECODE, **{name: address}),
                f"worker.{name}",
                "which is not host:port",
            )
            for name in ("address", "session_address")
            for address in ("ipv4:1:1", "::1:80", "here", "here:0", "here:70000", ":80", "h:x")
        ),
    ],
)
async def test_a_worker_that_does_not_fit_gets_the_reason(
    worker: object, field: str, message: str
) -> None:
    fleet = Fleet(lease_s=5.0)
    async with registry(fleet) as stub:
        await stub.Register(
            w.RegisterRequest(worker=wire.worker_to_pb(worker_info("p", Role.PREFILL)))
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Register(w.RegisterRequest(worker=wire.worker_to_pb(worker)))  # type: ignore[arg-type]
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        error = rpc.error_from_rpc(caught.value)
        assert isinstance(error, InvalidRequest)
        assert error.field == field
        assert message in error.message
        assert list(fleet.members) == ["p"]


async def test_a_renewal_of_an_unknown_worker_asks_for_registration() -> None:
    async with registry(Fleet(lease_s=5.0)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Renew(w.RenewRequest(worker_id="p", instance_id="e1"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert isinstance(rpc.error_from_rpc(caught.value), Unavailable)
