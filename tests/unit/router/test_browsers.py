"""What a page in a browser gets from a router without keys: nothing, unless it is of our origin."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import aiohttp
import pytest

from pdserve.config import GrpcConfig, HttpConfig, RouterConfig, TenantConfig, WorkerConfig
from pdserve.errors import PermissionDenied
from pdserve.security.browsers import BrowserGuard
from pdserve.security.keys import hash_key
from router.main import RouterServer
from workers.server import WorkerServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

JSON = {"content-type": "application/json"}
# Every path that reads or changes something, with what a page could send there.
REQUESTS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/file-1/content"),
    ("DELETE", "/v1/files/file-1"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("POST", "/v1/batches/batch-1/cancel"),
    ("GET", "/v1/responses/resp-1"),
    ("DELETE", "/v1/responses/resp-1"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/console"),
    ("GET", "/console/events"),
    ("OPTIONS", "/v1/completions"),
]


@pytest.fixture
async def url() -> AsyncIterator[str]:
    server = RouterServer(RouterConfig(http=HttpConfig(port=0), grpc=GrpcConfig(port=0)))
    addresses = await server.start()
    yield f"http://{addresses.http}"
    await server.stop(0.0)


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
async def test_no_request_of_a_foreign_page_is_answered(url: str, headers: dict[str, str]) -> None:
    async with aiohttp.ClientSession() as http:
        for method, path in REQUESTS:
            async with http.request(
                method, url + path, headers={**JSON, **headers}, data=b"{}"
            ) as response:
                found = await response.json()
            assert response.status == 403, (path, found)


async def test_a_body_that_a_page_may_send_unasked_is_refused(url: str) -> None:
    body = json.dumps({"model": "pdserve-demo", "prompt": "x"}).encode()
    posts = [path for method, path in REQUESTS if method == "POST" and "cancel" not in path]
    async with aiohttp.ClientSession(skip_auto_headers=["content-type"]) as http:
        for path in posts:
            for kind in ({}, {"content-type": "text/plain;charset=UTF-8"}):
                async with http.post(url + path, data=body, headers=kind) as response:
                    # A form of a page is a simple request too, but has an Origin.
                    assert response.status == (400 if path == "/v1/files" else 415), path
        kind = {"content-type": "Application/JSON; charset=utf-8"}
        async with http.post(f"{url}/tokenize", data=body, headers=kind) as response:
            assert (await response.json())["error"]["code"] == "unavailable"  # no worker


async def test_the_server_does_not_disclose_its_version(url: str) -> None:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as response:
        assert response.headers["server"] == "pdserve"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "10.1.2.3",
        "[::1]:8000",
        "localhost.:1",
        socket.gethostname().upper(),
        "box.example:80",
        None,
    ],
)
def test_hosts_that_are_ours(host: str | None) -> None:
    guard = BrowserGuard(allowed_hosts=["box.example"])
    guard.check(host, None)
    guard.check(host, None if host is None else f"http://{host}")  # the console's page


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "evil@localhost.x", "[", "", "1.2.3"]
)
def test_hosts_that_are_not(host: str) -> None:
    with pytest.raises(PermissionDenied, match="allowed_hosts"):
        BrowserGuard().check(host, None)
    BrowserGuard(allowed_hosts=["*"]).check(host, None)


def test_origins_are_those_of_cors() -> None:
    guard = BrowserGuard(["https://chat.example"])
    guard.check("localhost", "https://chat.example")
    for origin in ("null", "https://chat.example.evil", "http://localhost:81"):
        with pytest.raises(PermissionDenied, match="cors_origins"):
            guard.check("localhost:80", origin)
    BrowserGuard(["*"]).check("localhost", "null")


async def test_with_keys_any_host_is_served() -> None:
    """A foreign page has no key, and browsers add none."""
    tenants = (TenantConfig(name="a", keys=(hash_key("pd-a"),)),)
    server = RouterServer(
        RouterConfig(http=HttpConfig(port=0), grpc=GrpcConfig(port=0), tenants=tenants)
    )
    addresses = await server.start()
    headers = {"host": "api.example", "authorization": "Bearer pd-a"}
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://{addresses.http}/v1/models", headers=headers) as response,
    ):
        assert response.status == 200
    await server.stop(0.0)


async def test_a_worker_s_pages_are_for_this_machine_s_names() -> None:
    worker = WorkerServer(WorkerConfig(worker_id="w", engine="fake", routers=("127.0.0.1:1",)))
    info = await worker.start()
    async with aiohttp.ClientSession() as http:
        for path in ("/debug/kv", "/metrics", "/healthz"):
            for host, status in (("evil.example", 403), ("localhost", 200)):
                url = f"http://{info.debug_address}{path}"
                async with http.get(url, headers={"host": host}) as response:
                    assert response.status == status, path
    await worker.stop()
