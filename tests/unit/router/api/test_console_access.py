"""Who may see the console and act with it, and that nothing in its page can become a script."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pdserve.config import GrpcConfig, HttpConfig, RouterAccessConfig, RouterConfig, TenantConfig
from pdserve.security.keys import hash_key
from router.api.console.http import MAX_VIEWERS
from router.main import RouterServer
from tests.support.commands import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PAGE = ROOT / "router/api/console/page"
KEY, OTHER = "pd-an-admin-of-tests", "pd-a-client-of-tests"


@asynccontextmanager
async def browsing(
    host: str = "127.0.0.1", cors_origins: tuple[str, ...] = (), **values: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    http = HttpConfig(host=host, port=0, cors_origins=cors_origins)
    server = RouterServer(RouterConfig(http=http, grpc=GrpcConfig(port=0), **values))
    try:
        addresses = await server.start()
        port = addresses.http.rpartition(":")[2]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            yield http
    finally:
        await server.stop(0.0)


def guarded(tmp_path: Path) -> dict[str, Any]:
    token = tmp_path / "token"
    token.write_text("a-token-that-only-tests-have-got-1")
    access = RouterAccessConfig(admin_keys=(hash_key(KEY),), worker_token_file=str(token))
    return {"access": access, "tenants": (TenantConfig(name="acme", keys=(hash_key(OTHER),)),)}


async def hello(http: aiohttp.ClientSession, key: str = "") -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with http.get("/console/events", headers=headers) as response:
        if response.status != 200:
            return {"status": response.status, **(await response.json())["error"]}
        line = await response.content.readline()
        found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))["hello"]
        return found


async def test_without_keys_it_is_read_only() -> None:
    async with browsing() as http:
        found = await hello(http)
        assert (found["read_only"], found["needs_key"]) == (True, False)
        for path in ("drain", "undrain", "role"):
            async with http.post(f"/console/{path}", json={"worker_id": "decode-0"}) as response:
                assert response.status == 403
                assert "read-only" in (await response.json())["error"]["message"]


async def test_without_keys_it_is_for_this_machine_only() -> None:
    async with browsing(host="0.0.0.0") as http:
        for path in ("/console", "/console/app.js", "/console/events"):
            async with http.get(path) as response:
                assert response.status == 403
                assert "router.access.admin_keys" in (await response.json())["error"]["message"]


async def test_without_keys_no_other_name_leads_to_it() -> None:
    async with browsing() as http:
        for host, status in (("evil.example", 403), ("localhost:1", 200), ("[::1]", 200)):
            async with http.get("/console", headers={"host": host}) as response:
                assert response.status == status, host


async def test_with_keys_only_administrators_see_and_act(tmp_path: Path) -> None:
    async with browsing(host="0.0.0.0", **guarded(tmp_path)) as http:
        async with http.get("/console", headers={"host": "console.example"}) as response:
            assert response.status == 200  # the page asks for the key
        assert (await hello(http))["status"] == 401
        assert (await hello(http, OTHER))["status"] == 403
        found = await hello(http, KEY)
        assert (found["read_only"], found["needs_key"]) == (False, True)
        body = {"worker_id": "nobody"}
        for key, status in ((OTHER, 403), (KEY, 400)):
            headers = {"authorization": f"Bearer {key}"}
            async with http.post("/console/drain", json=body, headers=headers) as response:
                assert response.status == status


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("drain", {"worker_id": "nobody"}, "worker_id"),
        ("drain", {"worker_id": "nobody", "timeout_s": -1}, "timeout_s"),
        ("undrain", {"worker_id": "nobody", "force": True}, "force"),
        ("role", {"worker_id": "nobody", "role": "chef"}, "role"),
    ],
)
async def test_a_wrong_action_is_refused_by_field(
    path: str, body: dict[str, Any], field: str, tmp_path: Path
) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        browsing(**guarded(tmp_path)) as http,
        http.post(f"/console/{path}", json=body, headers=headers) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == field


async def test_another_origin_cannot_read_it() -> None:
    origin = {"origin": "https://elsewhere.example"}
    async with browsing(cors_origins=("*",)) as http:
        async with http.get("/v1/models", headers=origin) as response:
            assert response.headers["access-control-allow-origin"] == origin["origin"]
        async with http.get("/console/events", headers=origin) as response:
            assert "access-control-allow-origin" not in response.headers


async def test_scripts_and_styles_come_from_the_router_alone() -> None:
    async with browsing() as http:
        for path in sorted(PAGE.iterdir()):
            async with http.get(f"/console/{path.name}") as response:
                assert response.status == 200
                policy = response.headers["content-security-policy"]
        assert (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in policy
        )
        assert "unsafe" not in policy
        assert "http:" not in policy


def test_text_never_becomes_markup() -> None:
    page = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", page) == []
    for path in PAGE.glob("*.js"):
        text = path.read_text()
        found = re.findall(r"(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(", text)
        assert found == [], path.name
        assert "http://" not in text.replace("http://www.w3.org", ""), path.name


async def test_only_so_many_pages_are_served_at_a_time() -> None:
    async with browsing() as http, AsyncExitStack() as viewers:
        for _ in range(MAX_VIEWERS):
            response = await viewers.enter_async_context(http.get("/console/events"))
            await response.content.readline()
        assert (await hello(http))["status"] == 429


async def test_a_stopping_router_ends_the_stream() -> None:
    server = RouterServer(RouterConfig(http=HttpConfig(port=0), grpc=GrpcConfig(port=0)))
    addresses = await server.start()
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://{addresses.http}/console/events") as response,
    ):
        await response.content.readline()
        stopping = asyncio.create_task(server.stop())
        assert (await response.content.read()).endswith(b"\n\n")  # and not a broken chunk
        await stopping
