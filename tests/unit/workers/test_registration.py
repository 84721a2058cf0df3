"""A worker stays known to its routers, through what routers do."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from pdserve import wire
from pdserve.types import ModelInfo, Role, WorkerInfo
from pdserve.v1 import worker_pb2 as w
from tests.unit.workers.router_side import WAIT_S, FakeRegistry
from workers import registration
from workers.discovery import Discovery
from workers.registration import RegistrationRefused, Registrations

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MODEL = ModelInfo(name="m", path="", max_model_len=64, vocab_size=64, dtype="none")
INFO = WorkerInfo("d0", "e1", Role.DECODE, MODEL, "127.0.0.1:1", None, 16, 8, 4)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def begin(stack: AsyncExitStack, state: w.RenewRequest, *addresses: str) -> Registrations:
    registrations = Registrations(addresses)
    stack.push_async_callback(registrations.stop)
    registrations.start(INFO, lambda: state)
    return registrations


async def test_it_registers_with_every_router_and_leaves_every_router(
    stack: AsyncExitStack,
) -> None:
    routers = [FakeRegistry(), FakeRegistry()]
    addresses = [await stack.enter_async_context(x.serving()) for x in routers]
    registrations = await begin(stack, w.RenewRequest(), *addresses)
    await registrations.registered()
    assert [wire.worker_from_pb(x.registered[0]) for x in routers] == [INFO, INFO]
    await registrations.stop()
    assert [x.left for x in routers] == [["d0"], ["d0"]]


async def test_it_renews_with_its_state(stack: AsyncExitStack) -> None:
    router, state = FakeRegistry(lease_s=0.03), w.RenewRequest()
    await begin(stack, state, await stack.enter_async_context(router.serving()))
    await router.until(lambda: router.renewals)
    assert not router.renewals[0].HasField("load")
    assert not router.renewals[0].HasField("kv")
    state.load.num_running_reqs = 3
    state.kv.held_bytes = 7
    await router.until(lambda: router.renewals[-1].HasField("kv"))
    assert router.renewals[-1].load.num_running_reqs == 3
    assert (router.renewals[-1].worker_id, router.renewals[-1].instance_id) == ("d0", "e1")


async def test_a_change_is_reported_at_once(stack: AsyncExitStack) -> None:
    router, state = FakeRegistry(lease_s=3000.0), w.RenewRequest()
    address = await stack.enter_async_context(router.serving())
    registrations = await begin(stack, state, address)
    await registrations.registered()
    state.draining = True
    registrations.renew()
    await router.until(lambda: router.renewals)
    assert router.renewals[0].draining


async def test_routers_are_told_once_they_have_answered_or_are_away(stack: AsyncExitStack) -> None:
    routers = [FakeRegistry(lease_s=3000.0), FakeRegistry(lease_s=3000.0)]
    state = w.RenewRequest()
    addresses = [await stack.enter_async_context(routers[0].serving())]
    async with routers[1].serving() as leaves:
        registrations = await begin(stack, state, *addresses, leaves)
        await registrations.registered()
    routers[0].answers.clear()
    state.draining = True
    telling = asyncio.create_task(registrations.renewed())
    await routers[0].until(lambda: routers[0].renewals)
    assert routers[0].renewals[0].draining
    assert not telling.done()
    routers[0].answers.set()
    async with asyncio.timeout(WAIT_S):
        await telling
        await registrations.renewed()
    assert (len(routers[0].renewals), routers[1].renewals) == (2, [])


async def test_a_refusal_is_fatal_and_has_the_reason(stack: AsyncExitStack) -> None:
    router = FakeRegistry(refusal="another model is served here")
    address = await stack.enter_async_context(router.serving())
    registrations = await begin(stack, w.RenewRequest(), address)
    async with asyncio.timeout(WAIT_S):
        error = await asyncio.shield(registrations.refused)
    assert isinstance(error, RegistrationRefused)
    assert "another model is served here" in error.message
    assert address in error.message
    await registrations.stop()
    assert not router.left


async def test_routers_of_a_file_come_and_go(
    stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is no longer listed keeps the worker while it answers, and is forgotten then."""
    monkeypatch.setattr(registration, "_LOOK_UP_EVERY_S", 0.01)
    listed, first, second = tmp_path / "routers", FakeRegistry(lease_s=0.03), FakeRegistry()
    listed.write_text("")
    registrations = await begin(stack, w.RenewRequest(), f"file:{listed}")
    ready = asyncio.create_task(registrations.registered())
    async with first.serving() as address:
        listed.write_text(f"{address}\n")
        await ready
        listed.write_text(await stack.enter_async_context(second.serving()))
        await second.until(lambda: second.registered)
        before = len(first.renewals)
        await first.until(lambda: len(first.renewals) > before + 1)
    async with asyncio.timeout(WAIT_S):
        while len(registrations._all) > 1:  # noqa: ASYNC110 - found by looking
            await asyncio.sleep(0.01)
    listed.unlink()  # what was found last stays
    before = len(second.renewals)
    registrations.renew()
    await second.until(lambda: len(second.renewals) > before)


async def test_a_name_gives_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | OSError] = [
        ["10.0.0.2", "10.0.0.1", "fd00::1"],
        socket.gaierror(socket.EAI_AGAIN, "try again"),
        socket.gaierror(socket.EAI_NONAME, "not known"),
    ]

    async def look_up(name: str, port: int, **_: object) -> list[object]:
        assert (name, port) == ("routers", 8001)
        if isinstance(found := answers.pop(0), OSError):
            raise found
        return [(0, 0, 0, "", (host, port)) for host in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up, raising=False)
    discovery = Discovery(("a:1", "dns:routers:8001"))
    every = ["a:1", "10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"]
    assert await discovery.addresses() == every
    assert await discovery.addresses() == every
    assert await discovery.addresses() == ["a:1"]
