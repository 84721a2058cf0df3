"""The Registry service over a real server: joining, renewing, leaving, leases, listing."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc.aio
import pytest

from pdserve import rpc, wire
from pdserve.errors import InvalidRequest, Unavailable, WorkerFailed
from pdserve.types import FinishReason, GenerateRequest, Role, SamplingParams, WorkerLoad
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub, add_RegistryServicer_to_server
from router.coordinator import Coordinator
from router.fleet import Fleet
from router.registry import Registry
from tests.fakes import MODEL, ScriptedWorker, Stack, worker_info

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.v1.worker_pb2_grpc import RegistryAsyncStub

LOAD = WorkerLoad(1, 2, 0.5, 50)


class Clock:
    """Stands at 0 until it `runs`."""

    def __init__(self) -> None:
        self._ran_at: float | None = None

    def runs(self) -> None:
        self._ran_at = time.monotonic()

    def __call__(self) -> float:
        return 0.0 if self._ran_at is None else time.monotonic() - self._ran_at


@asynccontextmanager
async def registry(fleet: Fleet) -> AsyncIterator[RegistryAsyncStub]:
    server = rpc.make_server()
    add_RegistryServicer_to_server(Registry(fleet), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with fleet, rpc.open_channel(f"127.0.0.1:{port}") as channel:
        yield RegistryStub(channel)
    await server.stop(None)


def register(worker: ScriptedWorker) -> w.RegisterRequest:
    return w.RegisterRequest(worker=wire.worker_to_pb(worker.info))


async def test_a_worker_joins_renews_is_listed_and_leaves() -> None:
    worker = ScriptedWorker("p", Role.PREFILL)
    fleet = Fleet(router_id="router-1", lease_s=5.0, clock=Clock())
    async with worker.serving(), registry(fleet) as stub:
        stack = Stack(fleet, Coordinator(fleet))
        assert (await stub.Register(register(worker))).lease_s == 5.0
        await stack.until_state(worker, "ready")
        (entry,) = (await stub.ListWorkers(w.ListWorkersRequest())).workers
        assert not entry.HasField("load"), "an unknown load is not zeros"
        assert (entry.state, entry.lease_remaining_s) == ("ready", 5.0)
        assert wire.worker_from_pb(entry.info) == worker.info

        renew = w.RenewRequest(
            worker_id="p", instance_id="e1", load=wire.load_to_pb(LOAD), draining=True
        )
        assert (await stub.Renew(renew)).lease_s == 5.0
        (entry,) = (await stub.ListWorkers(w.ListWorkersRequest())).workers
        assert (wire.load_from_pb(entry.load), entry.state) == (LOAD, "draining")

        await stub.Deregister(w.DeregisterRequest(worker_id="p", instance_id="e1"))
        (entry,) = (await stub.ListWorkers(w.ListWorkersRequest())).workers
        assert (entry.state, entry.lease_remaining_s) == ("lost", 0.0)


async def test_figures_that_are_none_are_refused_by_name() -> None:
    worker = ScriptedWorker("p", Role.PREFILL)
    fleet = Fleet(router_id="router-1", lease_s=5.0, clock=Clock())
    async with worker.serving(), registry(fleet) as stub:
        await stub.Register(register(worker))
        bad = w.KvReport(totals={"not a name": 1.0})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Renew(w.RenewRequest(worker_id="p", instance_id="e1", kv=bad))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fleet.pool.members["p"].kv is None


async def test_work_placed_is_listed() -> None:
    prefill, decode = ScriptedWorker("p", Role.PREFILL), ScriptedWorker("d", Role.DECODE)
    fleet = Fleet(router_id="router-1", lease_s=5.0, clock=Clock())
    async with prefill.serving(), decode.serving(), registry(fleet) as stub:
        stack = Stack(fleet, Coordinator(fleet))
        await stack.join(prefill, decode)
        request = GenerateRequest("r", "demo", (1,) * 40, SamplingParams(max_tokens=8))
        async with stack.coordinator.generate(request):
            entries = (await stub.ListWorkers(w.ListWorkersRequest())).workers
            assert [(e.outstanding_requests, e.outstanding_tokens) for e in entries] == [
                (1, 40),
                (1, 48),
            ]
        entries = (await stub.ListWorkers(w.ListWorkersRequest())).workers
        assert [(e.outstanding_requests, e.outstanding_tokens) for e in entries] == [(0, 0)] * 2


@pytest.mark.parametrize(
    ("worker", "field", "message"),
    [
        (worker_info("x", Role.DECODE, kv=None), "worker.kv", "needs a kv endpoint"),
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
    ],
)
async def test_a_worker_that_does_not_fit_is_told_why(
    worker: object, field: str, message: str
) -> None:
    fleet = Fleet(router_id="router-1", lease_s=5.0)
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
        assert list(fleet.pool.members) == ["p"]


async def test_a_renewal_of_an_unknown_worker_says_register_again() -> None:
    async with registry(Fleet(router_id="router-1", lease_s=5.0)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Renew(w.RenewRequest(worker_id="p", instance_id="e1"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert isinstance(rpc.error_from_rpc(caught.value), Unavailable)


async def test_a_lease_that_runs_out_fails_the_streams_of_its_worker() -> None:
    clock = Clock()
    worker = ScriptedWorker("a", Role.AGGREGATED)
    fleet = Fleet(router_id="router-1", lease_s=0.5, clock=clock)
    async with worker.serving(), registry(fleet):
        stack = Stack(fleet, Coordinator(fleet))
        await stack.join(worker)
        request = GenerateRequest("r", "demo", (1,) * 40, SamplingParams(max_tokens=8))
        async with stack.coordinator.generate(request) as answer:
            submit = await worker.submitted()
            worker.send(submit, 7)
            assert (await anext(answer)).token_ids == (7,)
            clock.runs()
            await stack.until_state(worker, "lost")
            with pytest.raises(Unavailable, match="no worker is ready for model demo"):
                await anext(answer)
        stack.assert_no_leaks()


async def test_a_worker_that_starts_again_takes_new_work_and_its_old_streams_fail() -> None:
    worker = ScriptedWorker("a", Role.AGGREGATED)
    fleet = Fleet(router_id="router-1", lease_s=5.0, clock=Clock())
    async with worker.serving(), registry(fleet) as stub:
        stack = Stack(fleet, Coordinator(fleet))
        await stack.join(worker)
        request = GenerateRequest("r", "demo", (1,) * 40, SamplingParams(max_tokens=8))
        async with stack.coordinator.generate(request) as answer:
            await worker.submitted()
            worker.info = replace(worker.info, instance_id="e2")
            await stub.Register(register(worker))
            with pytest.raises((Unavailable, WorkerFailed)):
                await anext(answer)
        await stack.until_state(worker, "ready")
        async with stack.coordinator.generate(request) as answer:
            worker.send(await worker.submitted(), 7, finish=FinishReason.STOP)
            assert (await anext(answer)).token_ids == (7,)
        stack.assert_no_leaks()
