"""Capabilities as the router makes them, and keys as it keeps them."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import grpc.aio
import pytest

from pdserve import rpc, wire
from pdserve.capability import (
    KEY_BYTES,
    CapabilityKey,
    CapabilityRefused,
    WorkerStart,
    verify,
)
from pdserve.errors import InvalidRequest
from pdserve.types import FinishReason, Role
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub, add_RegistryServicer_to_server
from router.fleet import Fleet
from router.member import Member
from router.registry import Registry
from router.submission import CLOCK_SKEW_S, MAX_CAPABILITY_S, SubmissionBuilder
from tests.fakes import ScriptedWorker, running_stack, worker_info
from tests.unit.router.asking import read, request

KEY = CapabilityKey(b"k" * KEY_BYTES)
P, D = WorkerStart("p", "e1"), WorkerStart("d", "e2")


def expiry(deadline: float | None) -> int:
    """When a capability expires that is made at second 1000 of the wall clock."""
    source = Member(worker_info("p", Role.PREFILL), 0.0, kv_key=KEY)
    target = Member(worker_info("d", Role.DECODE), 0.0)
    command = SubmissionBuilder(request(), deadline).decode("t", source, target)
    return int(command.submit.decode.capability.split(".")[2])


async def test_the_decode_worker_gets_the_right_to_its_transfer_alone() -> None:
    prefill, decode = (
        ScriptedWorker("p", Role.PREFILL),
        ScriptedWorker("d", Role.DECODE, instance_id="e2"),
    )
    prefill.kv_key, decode.kv_key = KEY, CapabilityKey.generate()
    async with running_stack(prefill, decode) as stack:
        seen: set[str] = set()
        for _ in range(2):
            async with stack.coordinator.generate(request()) as answer:
                to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
                phase = to_decode.decode
                now = time.time()
                verify(
                    KEY,
                    phase.capability,
                    transfer_id=phase.transfer_id,
                    source=P,
                    target=D,
                    now=now,
                )
                with pytest.raises(CapabilityRefused):
                    verify(KEY, phase.capability, transfer_id="t", source=P, target=D, now=now)
                assert phase.capability.encode() not in to_prefill.SerializeToString()
                seen.add(phase.capability)
                prefill.send(to_prefill, 7, finish=FinishReason.LENGTH)
                decode.send(to_decode, 8, finish=FinishReason.STOP)
                await read(answer)
        assert len(seen) == 2


async def test_a_source_without_a_key_asks_for_no_capability() -> None:
    prefill, decode = (
        ScriptedWorker("p", Role.PREFILL),
        ScriptedWorker("d", Role.DECODE, instance_id="e2"),
    )
    decode.kv_key = KEY
    async with (
        running_stack(prefill, decode) as stack,
        stack.coordinator.generate(request()) as answer,
    ):
        to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
        assert not to_decode.decode.capability
        prefill.send(to_prefill, 7, finish=FinishReason.LENGTH)
        decode.send(to_decode, 8, finish=FinishReason.STOP)
        await read(answer)


def test_a_capability_lives_as_long_as_its_request_and_ten_minutes_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.submission.time.time", lambda: 1000.0)
    now = time.monotonic()
    assert expiry(None) == 1000 + MAX_CAPABILITY_S
    assert expiry(now + 1e6) == 1000 + MAX_CAPABILITY_S
    assert expiry(now - 1.0) == 1000 + CLOCK_SKEW_S
    assert 1000 + CLOCK_SKEW_S < expiry(now + 60.0) <= 1060 + CLOCK_SKEW_S


async def test_whoever_may_list_the_workers_does_not_see_a_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    worker = ScriptedWorker("p", Role.PREFILL)
    key = CapabilityKey.generate()
    fleet = Fleet(router_id="router-1", lease_s=5.0)
    async with AsyncExitStack() as exits:
        await exits.enter_async_context(worker.serving())
        server = rpc.make_server()
        add_RegistryServicer_to_server(Registry(fleet), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        exits.push_async_callback(server.stop, None)
        await exits.enter_async_context(fleet)
        stub = RegistryStub(await exits.enter_async_context(rpc.open_channel(address)))
        await stub.Register(wire.registration_to_pb(worker.info, key))
        listed = await stub.ListWorkers(w.ListWorkersRequest())
        assert [entry.info.worker_id for entry in listed.workers] == ["p"]
        assert fleet.pool.members["p"].kv_key == key
        assert key.reveal() not in listed.SerializeToString()

        message = wire.registration_to_pb(worker.info, None)
        message.kv_key = key.reveal()[:-1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Register(message)
        error = rpc.error_from_rpc(caught.value)
        assert isinstance(error, InvalidRequest)
        assert error.field == "kv_key"
        shown = [repr(fleet.pool), repr(listed), str(caught.value), error.message, caplog.text]
    for text in shown:
        assert key.reveal().hex() not in text
        assert repr(key.reveal())[2:-2] not in text
