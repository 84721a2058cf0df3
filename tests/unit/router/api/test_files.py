"""Uploads and downloads of /v1/files end, however slow their client is."""

from __future__ import annotations

import asyncio
import io
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import aiohttp
import pytest
from aiohttp import web

from pdserve.config import StoreConfig
from pdserve.errors import PdserveError
from pdserve.net.http_server import MIN_BYTES_PER_S, WRITE_TIMEOUT_S, HttpServer, bind
from router.api.batch.http import MAX_UPLOADS_OF_TENANT, UPLOAD_PAUSE_S, BatchApi
from router.api.http import Paths
from router.api.http_request import TENANT
from router.api.route_table import LINES, ROUTES, Handlers
from router.store.store import open_store
from tests.support.timeouts import WAIT_S, skip, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PART = b'--b\r\ncontent-disposition: form-data; name=file; filename="f"\r\n\r\n'
HEAD = (
    b"POST /v1/files HTTP/1.1\r\nhost: h\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    b"content-length: 100000\r\n\r\n"
)


class Service(NamedTuple):
    """`address` of the API, and a client of it."""

    api: BatchApi
    server: HttpServer
    address: tuple[str, int]
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return "http://{}:{}/v1/files".format(*self.address)

    async def upload(self, data: bytes, tenant: str = "a") -> aiohttp.ClientResponse:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", io.BytesIO(data), filename="f")
        return await self.session.post(self.url, data=form, headers={"tenant": tenant})


@pytest.fixture
async def service(tmp_path: Path, pause_s: float) -> AsyncIterator[Service]:
    async with (
        open_store(StoreConfig(database=str(tmp_path / "store")), "router") as store,
        served(
            BatchApi(
                store.files,
                store.batches,
                max_file_bytes=64 << 20,
                endpoints=LINES,
                upload_pause_s=pause_s,
            )
        ) as service,
    ):
        yield service


@pytest.fixture
def pause_s() -> float:
    return UPLOAD_PAUSE_S


@asynccontextmanager
async def served(api: BatchApi) -> AsyncIterator[Service]:
    handlers = Handlers(*[cast("Any", None)] * len(Handlers._fields))._replace(batches=api)
    paths = Paths({(x.method, x.path): x for x in ROUTES})

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        request[TENANT] = request.headers.get("tenant", "a")
        methods, names = paths.find(request.path)
        try:
            return await methods[request.method].handler(handlers)(request, *names)
        except PdserveError as error:
            return web.Response(status=error.http_status, text=error.message)

    sock = bind("127.0.0.1", 0)
    address = sock.getsockname()
    server = HttpServer(handle, sock)
    await server.start()
    async with asyncio.timeout(WAIT_S), aiohttp.ClientSession() as session:
        yield Service(api, server, address, session)
    await server.stop()


@pytest.mark.parametrize("pause_s", [0.1])
async def test_an_upload_must_keep_a_least_rate(service: Service) -> None:
    """Each byte comes soon after the one before."""
    reader, writer = await asyncio.open_connection(*service.address)
    writer.write(HEAD + PART)
    answer = asyncio.create_task(reader.readuntil(b"a second"))
    while not answer.done():
        writer.write(b"x")
        await asyncio.wait([answer], timeout=0.01)
    assert b" 504 " in await answer
    writer.close()
    assert not service.api._uploads.total()


async def test_a_tenant_has_a_limited_number_of_open_uploads(service: Service) -> None:
    limit = MAX_UPLOADS_OF_TENANT
    writers = [(await asyncio.open_connection(*service.address))[1] for _ in range(limit)]
    for writer in writers:
        writer.write(HEAD + PART)
    await wait_until(lambda: service.api._uploads["a"] == limit)
    refused = await service.upload(b"{}")
    assert refused.status == 429
    assert f"{limit} uploads are open, the limit is {limit} of a tenant" in await refused.text()
    assert (await service.upload(b"{}", tenant="b")).status == 200
    for writer in writers:
        writer.transport.abort()
    await wait_until(lambda: not service.api._uploads["a"])
    assert (await service.upload(b"{}")).status == 200


async def test_a_download_that_is_not_read_is_aborted(service: Service) -> None:
    size = 32 << 20
    file_id = (await (await service.upload(bytes(size))).json())["id"]
    path = f"{service.url}/{file_id}/content"
    async with service.session.get(path) as response:
        assert len(await response.read()) == size
    async with service.session.get(path, headers={"range": "bytes=0-3"}) as response:
        assert (response.status, await response.read()) == (206, bytes(4))
    await service.session.close()
    with socket.create_connection(service.address) as sock:
        sock.sendall(f"GET /v1/files/{file_id}/content HTTP/1.1\r\nhost: h\r\n\r\n".encode())
        assert await asyncio.to_thread(sock.recv, 8) == b"HTTP/1.1"
        skip(WRITE_TIMEOUT_S + size / MIN_BYTES_PER_S + 1)
        await wait_until(lambda: not service.server.open_connections)
