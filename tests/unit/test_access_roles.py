"""Who may call what: each gRPC method, over real connections, by certificate and by token."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import pytest

from pdserve.client import Client
from pdserve.config import (
    AccessConfig,
    GrpcConfig,
    HttpConfig,
    HttpTlsConfig,
    RouterAccessConfig,
    RouterConfig,
    TlsConfig,
    WorkerConfig,
)
from pdserve.errors import PermissionDenied
from pdserve.net import framing, rpc
from pdserve.net.rpc import Dialer
from pdserve.security.keys import hash_key
from pdserve.security.roles import Party, allowed
from pdserve.security.tls import dialer, server_context, tls_dialer
from pdserve.types import SamplingParams, WorkerInfo
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import generation_pb2, peer_pb2, worker_pb2
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.admin_pb2_grpc import AdminStub
from pdserve.v1.generation_pb2_grpc import GenerationStub
from pdserve.v1.worker_pb2_grpc import RegistryStub, WorkerStub
from router.fleet.worker_link import connect_over_tcp
from router.main import RouterServer
from tests.support.pki import Ca
from tests.support.timeouts import WAIT_S, wait_until
from workers.link.registration import RegistrationRefused, Registrations, RegistrationTiming
from workers.server import WorkerServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable
    from pathlib import Path

    from tests.support.pki import CertificateFiles

DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
OK = grpc.StatusCode.OK
ADMIN_KEY, TOKEN = "pd-an-admin-of-tests", "a-token-that-only-tests-have-got-1"


def test_every_served_method_has_a_permitted_role() -> None:
    for module in (a, generation_pb2, peer_pb2, worker_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                who = allowed(f"/{service.full_name}/{method.name}")
                assert who is None or who, method.full_name
    assert allowed("/pdserve.v1.Generation/Generate") is None
    assert allowed("/pdserve.v1.Worker/SetRole") == {Party.ROUTER}
    assert allowed("/somebody.Else/Entirely") == frozenset()


@asynccontextmanager
async def stack(
    router: RouterAccessConfig, worker: AccessConfig
) -> AsyncIterator[tuple[RouterServer, str, str, WorkerServer]]:
    """Start a router and a registered aggregated worker. Yield them with their addresses."""
    async with AsyncExitStack() as exits:
        server = RouterServer(
            RouterConfig(
                http=HttpConfig(port=0), grpc=GrpcConfig(port=0), stop_grace_s=0.0, access=router
            )
        )
        addresses = await server.start()
        exits.push_async_callback(server.stop)
        config = WorkerConfig(
            worker_id="w", engine="fake", routers=(addresses.grpc,), access=worker
        )
        worker_server = WorkerServer(config)
        await worker_server.start()
        exits.push_async_callback(worker_server.stop)
        await asyncio.wait_for(worker_server.registered(), WAIT_S)
        yield server, addresses.grpc, addresses.http, worker_server


@asynccontextmanager
async def again(access: RouterAccessConfig, grpc_: str) -> AsyncIterator[RouterServer]:
    """Start a router at the gRPC address of a stopped one."""
    port = int(grpc_.rpartition(":")[2])
    server = RouterServer(
        RouterConfig(
            http=HttpConfig(port=0), grpc=GrpcConfig(port=port), stop_grace_s=0.0, access=access
        )
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def last(messages: AsyncIterable[Any]) -> None:
    async for _ in messages:
        pass


async def may(caller: Dialer, router: str, info: WorkerInfo) -> set[str]:
    """Return the methods that admit a caller, regardless of their answer to an empty request."""
    async with (
        caller.open_channel(router) as channel,
        caller.open_channel(info.address) as other,
    ):
        registry, admin, at_worker = RegistryStub(channel), AdminStub(channel), WorkerStub(other)
        values: dict[str, Any] = {"metadata": caller.metadata, "timeout": WAIT_S}
        calls: dict[str, Awaitable[Any]] = {
            "ListModels": GenerationStub(channel).ListModels(
                generation_pb2.ListModelsRequest(), **values
            ),
            "Register": registry.Register(w.RegisterRequest(), **values),
            "Renew": registry.Renew(w.RenewRequest(), **values),
            "Deregister": registry.Deregister(w.DeregisterRequest(), **values),
            "ListWorkers": registry.ListWorkers(w.ListWorkersRequest(), **values),
            "Explain": admin.Explain(a.ExplainRequest(request_id="?"), **values),
            "ChangeRole": admin.ChangeRole(a.ChangeRoleRequest(), **values),
            "GetStatus": at_worker.GetStatus(w.GetStatusRequest(), **values),
            "Drain": at_worker.Drain(w.DrainRequest(timeout_s=-1), **values),
            "SetRole": at_worker.SetRole(w.SetRoleRequest(), **values),
            "SettleRole": at_worker.SettleRole(w.SettleRoleRequest(), **values),
        }
        codes = {name: await code_of(call) for name, call in calls.items()}
    assert not {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN} & set(codes.values()), codes
    into = {name for name, code in codes.items() if code not in (DENIED, UNKNOWN)}
    return into | ({"Session"} if await opens_session(caller, info) else set())


async def opens_session(caller: Dialer, info: WorkerInfo) -> bool:
    """Return True if the worker accepts a session of this caller."""
    host, _, port = info.session_address.rpartition(":")
    hello = w.Hello(router_id="r", instance_id=info.instance_id, token="\n".join(caller.tokens))
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=caller.context)
    except OSError:
        return False
    try:
        writer.write(framing.pack(w.Command(hello=hello)))
        size = int.from_bytes(await reader.readexactly(4), "big")
        frame = w.StepFrame.FromString(await reader.readexactly(size))
    except (OSError, asyncio.IncompleteReadError):
        return False
    finally:
        writer.close()
    return not frame.HasField("closed")


async def code_of(call: Awaitable[Any]) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return OK


WORKERS = {"ListModels", "Register", "Renew", "Deregister", "ListWorkers"}
ROUTERS = {"ListModels", "Session", "GetStatus", "Drain", "SetRole", "SettleRole"}
ADMINS = {"ListModels", "ListWorkers", "Explain", "ChangeRole", "GetStatus", "Drain"}


async def test_a_certificate_permits_only_the_calls_of_its_role(tmp_path: Path) -> None:
    ca = Ca(tmp_path)
    files = {name: ca.issue(name, role=name) for name in ("router", "worker", "admin")}
    files["client"] = ca.issue("client")
    tls = {
        name: TlsConfig(cert_file=x.cert, key_file=x.key, ca_file=ca.path)
        for name, x in files.items()
    }
    dialers = {
        name: tls_dialer(ca_file=ca.path, cert_file=x.cert, key_file=x.key)
        for name, x in files.items()
    }
    foreign = Ca(tmp_path, "other").issue("intruder", role="admin")
    http = HttpTlsConfig(cert_file=files["router"].cert, key_file=files["router"].key)
    access = RouterAccessConfig(tls=tls["router"], http_tls=http)
    async with stack(access, AccessConfig(tls=tls["worker"])) as (_, router, url, worker):
        info = worker.info
        assert await may(dialers["client"], router, info) == {"ListModels"}
        assert await may(dialers["worker"], router, info) == WORKERS
        assert await may(dialers["router"], router, info) == ROUTERS
        assert await may(dialers["admin"], router, info) == ADMINS
        # Nobody speaks to either without a certificate of the CA.
        for stranger in (
            rpc.PLAIN,
            tls_dialer(ca_file=ca.path),
            tls_dialer(ca_file=ca.path, cert_file=foreign.cert, key_file=foreign.key),
        ):
            assert not await opens_session(stranger, info)
            for to in (router, info.address):
                async with stranger.open_channel(to) as channel:
                    call = GenerationStub(channel).ListModels(
                        generation_pb2.ListModelsRequest(), timeout=WAIT_S
                    )
                    assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
        async with Client(router, dialer=dialers["client"]) as client:
            sampling = SamplingParams(max_tokens=3, ignore_eos=True)
            deltas = [x async for x in client.generate([1, 2, 3], sampling)]
            assert sum(len(x.token_ids) for x in deltas) == 3
        trusting = ssl.create_default_context(cafile=ca.path)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"https://{url}/v1/models", ssl=trusting) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{url}/v1/models")


async def test_certificates_that_are_renewed_are_used_without_a_restart(tmp_path: Path) -> None:
    """Use a new CA, so that no connection is made with a former certificate."""

    def issue() -> dict[str, CertificateFiles]:
        ca = Ca(tmp_path)
        return {name: ca.issue(name, role=name) for name in ("router", "worker", "admin")}

    def trusting() -> ssl.SSLContext:
        return ssl.create_default_context(cafile=ca)

    files, ca = issue(), str(tmp_path / "ca.pem")
    tls = {
        name: TlsConfig(cert_file=x.cert, key_file=x.key, ca_file=ca) for name, x in files.items()
    }
    http = HttpTlsConfig(cert_file=files["router"].cert, key_file=files["router"].key)
    access = RouterAccessConfig(tls=tls["router"], http_tls=http)
    dialers = {name: dialer(AccessConfig(tls=x)) for name, x in tls.items()}
    async with stack(access, AccessConfig(tls=tls["worker"])) as (router, grpc_, url, worker):
        before = trusting()
        issue()
        info = worker.info
        assert await may(dialers["worker"], grpc_, info) == WORKERS
        assert await may(dialers["router"], grpc_, info) == ROUTERS
        async with aiohttp.ClientSession() as session:
            async with session.get(f"https://{url}/health", ssl=trusting()) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"https://{url}/health", ssl=before)
        # The router calls the worker; then it starts again, and both connect to one another.
        async with dialers["admin"].open_channel(grpc_) as channel:
            drain = a.DrainWorkerRequest(worker_id="w", force=True)
            assert await code_of(last(AdminStub(channel).DrainWorker(drain))) is OK
        await router.stop()
        async with again(access, grpc_) as restarted:
            members = restarted.fleet.members
            await wait_until(lambda: "w" in members and members["w"].attached)


async def test_without_certificates_a_shared_token_does_the_same(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    values: dict[str, Any] = {
        "worker_token_file": str(file),
        "admin_keys": (hash_key(ADMIN_KEY),),
    }
    async with stack(RouterAccessConfig(**values), AccessConfig(**values)) as found:
        _, router, _, worker = found
        info = worker.info
        assert await may(rpc.PLAIN, router, info) == {"ListModels"}
        assert await may(Dialer(token="a-guess"), router, info) == {"ListModels"}
        assert await may(Dialer(token=TOKEN), router, info) == WORKERS | ROUTERS
        assert await may(Dialer(token=ADMIN_KEY), router, info) == ADMINS
        other = tmp_path / "other"
        other.write_text(TOKEN[::-1])
        intruder = WorkerServer(
            WorkerConfig(
                worker_id="intruder",
                engine="fake",
                routers=(router,),
                access=AccessConfig(worker_token_file=str(other)),
            )
        )
        intruder.routers = Registrations(
            (router,),
            intruder.links,
            dialer=dialer(AccessConfig(worker_token_file=str(other))),
            timing=RegistrationTiming(refused_token_s=0.0),
        )
        await intruder.start()
        refused = await asyncio.wait_for(intruder.routers.failed, WAIT_S)
        assert isinstance(refused, RegistrationRefused)
        assert "requires role worker" in str(refused)
        assert TOKEN[::-1] not in str(refused)
        await intruder.stop()


async def test_a_token_is_replaced_without_a_restart(tmp_path: Path) -> None:
    file, mine, new = tmp_path / "token", tmp_path / "mine", "n" * 40
    file.write_text(TOKEN)
    mine.write_text(TOKEN)
    access, worker_access = (
        kind(worker_token_file=str(file)) for kind in (RouterAccessConfig, AccessConfig)
    )
    late = dialer(AccessConfig(worker_token_file=str(mine)))  # reads the change later
    async with stack(access, worker_access) as (router, grpc_, _, worker):
        file.write_text(new)
        for caller in (late, Dialer(token=new)):
            assert await may(caller, grpc_, worker.info) == WORKERS | ROUTERS
        mine.write_text(new)
        assert await may(late, grpc_, worker.info) == WORKERS | ROUTERS
        await router.stop()
        async with again(access, grpc_) as restarted:
            members = restarted.fleet.members
            await wait_until(lambda: "w" in members and members["w"].attached)
            assert await may(Dialer(token=TOKEN), grpc_, worker.info) == ROUTERS


@pytest.mark.parametrize("role", ["worker", "router", ""])
async def test_a_router_opens_sessions_with_workers_alone(tmp_path: Path, role: str) -> None:
    """Otherwise any certificate of the CA with the right name would do, such as a client's."""
    ca = Ca(tmp_path)
    theirs, ours = ca.issue("theirs", role=role), ca.issue("ours", role="router")
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            heard.set_result(await reader.read(1))
        except OSError:
            heard.set_result(b"")
        writer.close()

    def tls(files: CertificateFiles) -> TlsConfig:
        return TlsConfig(cert_file=files.cert, key_file=files.key, ca_file=ca.path)

    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=server_context(tls(theirs)))
    info: Any = SimpleNamespace(session_address=_address(server))
    connect = connect_over_tcp(dialer(AccessConfig(tls=tls(ours))))
    async with asyncio.timeout(WAIT_S), server:
        if role == "worker":
            await connect(info, Speaker)
            assert await heard == b"h"
            return
        with pytest.raises(PermissionDenied, match="does not have the role worker"):
            await connect(info, Speaker)
        assert await heard == b""


class Speaker(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"h")


def _address(server: asyncio.Server) -> str:
    host, port = server.sockets[0].getsockname()
    return f"{host}:{port}"
