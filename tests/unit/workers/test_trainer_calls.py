"""Trainers' calls that a worker passes on to a router, here a server that notes what it gets."""

from __future__ import annotations

from contextlib import asynccontextmanager
from io import BytesIO
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web

from pdserve.config import WorkerConfig, parse
from pdserve.errors import ConfigError
from pdserve.net.http_server import HttpServer, bind
from pdserve.trainer_calls import READY_CALLS, UPDATE_CALLS
from router.api.route_table import ROUTES, Credential
from router.api.weights import REFUSED_PATHS
from workers.link.trainer_calls import TrainerCalls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


@asynccontextmanager
async def served(
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    listening = bind("127.0.0.1", 0)
    server = HttpServer(handle, listening)
    await server.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        await server.stop()


@asynccontextmanager
async def passed_on(router: str) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    config = parse(
        WorkerConfig, {"model": "demo", "weights_directories": ["/w"], "trainer_calls": router}
    )
    async with (
        TrainerCalls(config) as calls,
        served(calls.answer) as worker,
        aiohttp.ClientSession() as session,
    ):
        yield session, worker


async def test_a_call_and_its_answer_are_passed_on_with_the_credential() -> None:
    seen: list[tuple[str, str, bytes, dict[str, str]]] = []

    async def router(request: web.BaseRequest) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen.append((request.method, request.path_qs, await request.read(), headers))
        return web.Response(status=403, text="no", headers={"retry-after": "2", "x-own": "1"})

    async with served(router) as url, passed_on(url) as (session, worker):
        given = {"authorization": "Bearer k", "cookie": "a=b", "content-type": "application/json"}
        async with session.post(f"{worker}/pause?mode=keep", data=b"{}", headers=given) as reply:
            answered = reply.status, await reply.text(), reply.headers["retry-after"]
            assert "x-own" not in reply.headers
    assert answered == (403, "no", "2")
    ((method, path, body, headers),) = seen
    assert (method, path, body) == ("POST", "/pause?mode=keep", b"{}")
    assert (headers["authorization"], headers["content-type"]) == ("Bearer k", "application/json")
    assert "cookie" not in headers


async def test_a_body_that_is_too_large_is_refused_by_the_worker() -> None:
    async def router(_: web.BaseRequest) -> web.Response:
        raise AssertionError("it was passed on")

    large = BytesIO(bytes((1 << 20) + 1))
    async with (
        served(router) as url,
        passed_on(url) as (session, worker),
        session.post(f"{worker}/update_weights", data=large) as reply,
    ):
        error = (await reply.json())["error"]
        assert (reply.status, error["code"]) == (413, "request_too_large")


async def test_without_a_router_the_error_names_its_address() -> None:
    unused = bind("127.0.0.1", 0)  # nobody listens
    url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    async with passed_on(url) as (session, worker), session.post(f"{worker}/resume") as reply:
        assert reply.status == 503
        assert f"{url} (worker.trainer_calls)" in (await reply.json())["error"]["message"]
    unused.close()


def test_calls_that_are_passed_on_are_those_of_the_router() -> None:
    of_weights = {
        (x.method, x.path)
        for x in ROUTES
        if x.credential is Credential.ADMIN and "weights" in x.handler.__code__.co_names
    }
    refused = {("POST", x) for x in REFUSED_PATHS}
    assert of_weights - refused == {*UPDATE_CALLS, ("GET", "/v1/rl/workers")}
    assert set(READY_CALLS) <= {(x.method, x.path) for x in ROUTES}


@pytest.mark.parametrize("missing", ["weights_directories", "debug"])
def test_calls_are_passed_on_only_where_weights_may_change(missing: str) -> None:
    values = {"model": "demo", "trainer_calls": "http://router:8000"}
    values |= {"weights_directories": ["/w"], "debug": {"host": "127.0.0.1"}}
    values[missing] = {"host": ""} if missing == "debug" else []
    with pytest.raises(ConfigError, match=r"needs weights_directories and debug\.host"):
        parse(WorkerConfig, values)
