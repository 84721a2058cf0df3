"""The router as a whole, without workers: what it starts, what it reports, how it stops."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from msgspec.structs import replace

from pdserve.client import Client
from pdserve.config import (
    GrpcConfig,
    HttpConfig,
    ParsersConfig,
    RouterConfig,
    StoreConfig,
    overlay,
    parse,
)
from pdserve.errors import ConfigError, Overloaded, ParserFailed, Unavailable
from pdserve.net import rpc
from pdserve.net.http_server import bind
from pdserve.types import Parsing
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import RegistryStub
from router.api.open import MAX_BODY_BYTES
from router.api.open_requests import OpenRequest, OpenRequests
from router.attempt.answer import Discard
from router.main import RouterServer
from tests.support.router_stack import request
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from router.main import RouterAddresses

SERVING = health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def running(config: RouterConfig) -> AsyncIterator[RouterAddresses]:
    server = RouterServer(config)
    try:
        yield await server.start()
    finally:
        await server.stop(0.0)


ANY_PORT = RouterConfig(http=HttpConfig(port=0), grpc=GrpcConfig(port=0))


async def test_both_apis_listen_where_the_router_says() -> None:
    async with (
        running(ANY_PORT) as addresses,
        aiohttp.ClientSession(f"http://{addresses.http}") as http,
        Client(addresses.grpc) as client,
        rpc.open_channel(addresses.grpc) as channel,
    ):
        async with http.get("/health") as response:
            assert response.status == 200
        async with http.get("/ready") as response:
            assert response.status == 503
        async with http.get("/v1/models") as response:
            assert await response.json() == {"object": "list", "data": []}
        async with http.get("/metrics") as response:
            assert "pdserve_requests_running" in await response.text()
        assert await client.list_models() == []
        with pytest.raises(Unavailable):
            _ = [delta async for delta in client.generate("hi")]
        workers = await RegistryStub(channel).ListWorkers(worker_pb2.ListWorkersRequest())
        assert not workers.workers


async def test_requests_are_refused_at_the_limit_of_memory() -> None:
    async with (
        running(
            RouterConfig(http=HttpConfig(port=0), grpc=GrpcConfig(port=0), memory_limit_mib=1)
        ) as addresses,
        aiohttp.ClientSession(f"http://{addresses.http}") as http,
        Client(addresses.grpc) as client,
    ):
        async with http.post("/v1/completions", json={"prompt": "a"}) as response:
            assert (response.status, response.headers["retry-after"]) == (429, "5")
            assert "the limit is 1 MiB" in await response.text()
        with pytest.raises(Overloaded):
            _ = [delta async for delta in client.generate("hi")]
        async with http.get("/health") as response:
            assert response.status == 200
        async with http.get("/metrics") as response:
            text = await response.text()
    assert "pdserve_memory_limit_bytes 1.048576e+06" in text
    assert "pdserve_memory_refusals_total 2.0" in text


async def test_grpc_health_and_reflection_are_served() -> None:
    async with running(ANY_PORT) as addresses, rpc.open_channel(addresses.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "pdserve.v1.Generation", "pdserve.v1.Registry"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        message = await call.read()
        names = {service.name for service in message.list_services_response.service}
        assert {"pdserve.v1.Generation", "pdserve.v1.Registry"} <= names


async def test_message_over_the_limit_is_refused_and_hurts_no_other() -> None:
    async with running(ANY_PORT) as addresses, Client(addresses.grpc) as client:
        async with rpc.open_channel(addresses.grpc) as channel:
            call = channel.unary_stream("/pdserve.v1.Generation/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [message async for message in call(bytes(MAX_BODY_BYTES + 1))]
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await client.list_models() == []


@pytest.mark.parametrize("key", ["http.port", "grpc.port", "http.shared_port"])
async def test_address_in_use_is_an_error_naming_the_key(key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = overlay({"http": {"port": 0}, "grpc": {"port": 0}}, {key: port})
        server = RouterServer(parse(RouterConfig, config))
        with pytest.raises(ConfigError) as caught:
            await server.start()
        assert caught.value.field == key
        await server.stop()


async def test_routers_of_one_machine_share_a_port_and_one_that_stops_leaves_it_to_others() -> None:
    with bind("127.0.0.1", 0, is_shared=True) as held:  # nobody else gets it meanwhile
        port = held.getsockname()[1]
        config = RouterConfig(http=HttpConfig(port=0, shared_port=port), grpc=GrpcConfig(port=0))
        servers = [RouterServer(config) for _ in range(2)]
        writers: list[asyncio.StreamWriter] = []

        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return await reader.readline()

        def open_at(server: RouterServer) -> int:
            assert server._http is not None
            return server._http.server.open_connections

        async with asyncio.timeout(WAIT_S):
            try:
                addresses = [await server.start() for server in servers]
                assert len({x.http for x in addresses}) == 2  # each has its own beside it
                # All go to one with a chance of 2^-63.
                assert {await ask() for _ in range(64)} == {b"HTTP/1.1 200 OK\r\n"}
                assert all(map(open_at, servers))
                await servers[0].stop(0.0)
                assert {await ask() for _ in range(8)} == {b"HTTP/1.1 200 OK\r\n"}
            finally:
                for writer in writers:
                    writer.transport.abort()
                for server in servers:
                    await server.stop(0.0)


async def test_small_packets_are_not_held_back() -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        accepted.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    sock = bind("127.0.0.1", 0)
    async with await asyncio.start_server(accept, sock=sock):
        _, writer = await asyncio.open_connection(*sock.getsockname())
        assert await accepted
        writer.close()
        await writer.wait_closed()


async def test_a_request_ends_with_the_first_error_or_with_a_cancellation_from_elsewhere() -> None:
    requests = OpenRequests()
    opened: asyncio.Queue[OpenRequest] = asyncio.Queue()

    async def work() -> None:
        with requests.enter() as request:
            opened.put_nowait(request)
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    request = await opened.get()
    request.end(Unavailable("first"))
    request.end(Unavailable("second"))
    with pytest.raises(Unavailable, match="first"):
        await task
    task = asyncio.create_task(work())
    await opened.get()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_parser_process_is_the_configured_command(tmp_path: Path) -> None:
    ran, code = tmp_path / "ran", "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
    config = replace(
        ANY_PORT, parsers=ParsersConfig(command=(sys.executable, "-c", code, str(ran)))
    )
    server = RouterServer(config)
    parsed = request(parsing=Parsing("", {}, "p", "r", "{}", "{}"))
    try:
        await server.start()
        with pytest.raises(ParserFailed):
            await server.requests.server.serve(parsed, Discard())
    finally:
        await server.stop(0.0)
    assert ran.exists()


async def test_a_router_starts_while_its_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:1"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
    ):
        monkeypatch.setenv(name, value)
    config = replace(
        ANY_PORT,
        store=StoreConfig(database="postgresql://nobody@127.0.0.1:1/none", files="s3://bucket"),
    )
    async with (
        running(config) as addresses,
        aiohttp.ClientSession(f"http://{addresses.http}") as http,
    ):
        async with http.get("/v1/models") as response:
            assert response.status == 200
        for path in ("/v1/files", "/v1/batches", "/v1/responses/resp-1"):
            async with http.get(path) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "store_unavailable"
