"""A worker stays known to its routers, through what routers do."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import pytest

from pdserve import wire
from pdserve.config import AccessConfig
from pdserve.net.discovery import Discovery
from pdserve.net.rpc import PLAIN, Dialer
from pdserve.security.tls import dialer
from pdserve.types import EngineLimits, KvLedger, KvReport, ModelInfo, Role, WorkerInfo, WorkerLoad
from tests.support.fake_router import WAIT_S, FakeRegistry
from workers.link.registration import RegistrationRefused, Registrations, RegistrationTiming
from workers.link.router_link import OpenLinks
from workers.link.worker_state import WorkerState
from workers.metering.worker_account import BusyTime, WorkerAccount

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MODEL = ModelInfo(name="m", path="", max_model_len=64, vocab_size=64, dtype="none")
INFO = WorkerInfo(
    "d0",
    instance_id="e1",
    role=Role.DECODE,
    model=MODEL,
    address="127.0.0.1:1",
    kv=None,
    block_size=16,
    total_blocks=8,
    limits=EngineLimits(4),
)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@dataclass
class Worker:
    """A worker whose state the test replaces."""

    state: WorkerState = field(default_factory=WorkerState)
    dialer: Dialer = PLAIN


async def begin(
    stack: AsyncExitStack, worker: Worker, *addresses: str, **timing: float
) -> Registrations:
    timing = {"look_up_s": 0.01, "max_pause_s": 0.1, **timing}
    registrations = Registrations(
        addresses, OpenLinks(), dialer=worker.dialer, timing=RegistrationTiming(**timing)
    )
    stack.push_async_callback(registrations.stop)
    registrations.start(INFO, lambda: worker.state, WorkerAccount(BusyTime(), 0.0))
    return registrations


async def test_it_registers_with_every_router_and_leaves_every_router(
    stack: AsyncExitStack,
) -> None:
    routers = [FakeRegistry(), FakeRegistry()]
    addresses = [await stack.enter_async_context(x.serving()) for x in routers]
    registrations = await begin(stack, Worker(), *addresses)
    await registrations.registered()
    assert [wire.worker_from_pb(x.registered[0]) for x in routers] == [INFO, INFO]
    await registrations.stop()
    assert [x.left for x in routers] == [["d0"], ["d0"]]


async def test_it_renews_with_its_state(stack: AsyncExitStack) -> None:
    router, worker = FakeRegistry(lease_s=0.03), Worker()
    await begin(stack, worker, await stack.enter_async_context(router.serving()))
    await router.until(lambda: router.renewals)
    assert not router.renewals[0].HasField("load")
    assert not router.renewals[0].HasField("kv")
    worker.state = WorkerState(load=WorkerLoad(0, 3, 0.0, 9), kv=KvReport(KvLedger(), held_bytes=7))
    await router.until(lambda: router.renewals[-1].HasField("kv"))
    assert router.renewals[-1].load.num_running_reqs == 3
    assert (router.renewals[-1].worker_id, router.renewals[-1].instance_id) == ("d0", "e1")


async def test_a_change_is_reported_at_once(stack: AsyncExitStack) -> None:
    router, worker = FakeRegistry(lease_s=3000.0), Worker()
    address = await stack.enter_async_context(router.serving())
    registrations = await begin(stack, worker, address)
    await registrations.registered()
    worker.state = WorkerState(is_draining=True)
    registrations.renew()
    await router.until(lambda: router.renewals)
    assert router.renewals[0].draining


async def test_renewed_waits_for_each_reachable_router(stack: AsyncExitStack) -> None:
    routers = [FakeRegistry(lease_s=3000.0), FakeRegistry(lease_s=3000.0)]
    worker = Worker()
    addresses = [await stack.enter_async_context(routers[0].serving())]
    async with routers[1].serving() as leaves:
        registrations = await begin(stack, worker, *addresses, leaves)
        await registrations.registered()
    routers[0].answers.clear()
    worker.state = WorkerState(is_draining=True)
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
    registrations = await begin(stack, Worker(), address)
    async with asyncio.timeout(WAIT_S):
        error = await asyncio.shield(registrations.failed)
    assert isinstance(error, RegistrationRefused)
    assert "another model is served here" in error.message
    assert address in error.message
    await registrations.stop()
    assert not router.left


async def test_a_refused_token_is_tried_again_for_a_while(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    """The token was replaced, and the router has not read it yet."""
    (tmp_path / "token").write_text("n" * 40)
    worker = Worker(dialer=dialer(AccessConfig(worker_token_file=str(tmp_path / "token"))))
    router = FakeRegistry(refusal="requires role worker", status=grpc.StatusCode.PERMISSION_DENIED)
    address = await stack.enter_async_context(router.serving())
    registrations = await begin(stack, worker, address)
    await router.until(lambda: router.refused > 1)
    assert not registrations.failed.done()
    router.refusal = ""
    await registrations.registered()
    router.refusal = "requires role worker"
    hopeless = await begin(stack, worker, address, refused_token_s=0.0)
    async with asyncio.timeout(WAIT_S):
        assert isinstance(await asyncio.shield(hopeless.failed), RegistrationRefused)


async def test_a_refusal_ends_nothing_once_another_router_has_accepted(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    accepts, refuses = FakeRegistry(), FakeRegistry(refusal="another model is served here")
    address = await stack.enter_async_context(accepts.serving())
    listed = tmp_path / "routers"
    listed.write_text(address)
    registrations = await begin(stack, Worker(), f"file:{listed}")
    await registrations.registered()
    listed.write_text(f"{address}\n{await stack.enter_async_context(refuses.serving())}")
    await refuses.until(lambda: refuses.refused > 1)
    assert not registrations.failed.done()
    refuses.refusal = ""
    await refuses.until(lambda: refuses.registered)


async def test_routers_of_a_file_come_and_go(stack: AsyncExitStack, tmp_path: Path) -> None:
    """An unlisted router keeps the worker while it answers, and is then forgotten."""
    listed, first, second = tmp_path / "routers", FakeRegistry(lease_s=0.03), FakeRegistry()
    registrations = await begin(stack, Worker(), f"file:{listed}")
    ready = asyncio.create_task(registrations.registered())
    async with first.serving() as address:
        listed.write_text(f"# the routers\n\n{address}  # first\n")
        await ready
        assert registrations.is_connected
        listed.write_text(await stack.enter_async_context(second.serving()))
        await second.until(lambda: second.registered)
        before = len(first.renewals)
        await first.until(lambda: len(first.renewals) > before + 1)
    async with asyncio.timeout(WAIT_S):
        while len(registrations._all) > 1:
            await registrations.changed()
    for unusable in ("routers:8001\nno address", None):  # what was found last stays
        listed.unlink() if unusable is None else listed.write_text(unusable)
        before = len(second.renewals)
        registrations.renew()
        await second.until(lambda before=before: len(second.renewals) > before)
    assert not registrations.failed.done()


async def test_a_router_that_stays_unlisted_is_left(stack: AsyncExitStack, tmp_path: Path) -> None:
    listed, router = tmp_path / "routers", FakeRegistry(lease_s=3000.0)
    listed.write_text(await stack.enter_async_context(router.serving()))
    registrations = await begin(stack, Worker(), f"file:{listed}", leave_after_s=0.0)
    await registrations.registered()
    listed.write_text("")
    await router.until(lambda: router.left)
    assert not registrations.is_connected


async def test_registration_does_not_wait_for_a_forgotten_router(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    listed, here = tmp_path / "routers", FakeRegistry()
    async with FakeRegistry().serving() as away:
        pass
    address = await stack.enter_async_context(here.serving())
    listed.write_text(f"{away}\n{address}\n")
    registrations = await begin(stack, Worker(), f"file:{listed}")
    registered = asyncio.create_task(registrations.registered())
    await here.until(lambda: here.registered)
    assert not registered.done()
    listed.write_text(address)
    async with asyncio.timeout(WAIT_S):
        await registered


async def test_a_line_without_an_address_is_refused_at_start(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    listed = tmp_path / "routers"
    listed.write_text("a:1\nrouters\n")
    registrations = await begin(stack, Worker(), f"file:{listed}")
    async with asyncio.timeout(WAIT_S):
        error = await asyncio.shield(registrations.failed)
    assert str(error) == f"worker.routers: {listed}, line 2: 'routers' is not host:port"


async def test_a_name_gives_all_its_addresses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    again = socket.gaierror(socket.EAI_AGAIN, "try again")
    answers: list[list[str] | Exception] = [
        ["10.0.0.2", "10.0.0.1", "fd00::1"],
        *(again, again, TimeoutError()),
        UnicodeError("label too long"),
        socket.gaierror(socket.EAI_NONAME, "not known"),
    ]

    async def look_up(name: str, port: int, **_: object) -> list[object]:
        assert (name, port) == ("routers", 8001)
        if isinstance(found := answers.pop(0), Exception):
            raise found
        return [(0, 0, 0, "", (host, port)) for host in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up, raising=False)
    discovery = Discovery(("a:1", "dns:routers:8001"))
    every = ["a:1", "10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"]
    for _ in range(5):
        assert await discovery.addresses() == every
    assert await discovery.addresses() == ["a:1"]
    reasons = [x.getMessage().partition("8001: ")[2] for x in caplog.records]
    assert reasons == [str(again), "TimeoutError", "label too long", "found again"]
