"""Idempotency keys hold at all routers that share a PostgreSQL server."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import pytest

from tests.support.postgres import needs_postgres, running_postgres
from tests.support.processes import (
    RouterProcess,
    router_process,
    until_workers,
    worker_process,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = needs_postgres
BODY = {"prompt": "a", "max_tokens": 100, "stream": True, "ignore_eos": True}


class Service(NamedTuple):
    """Two routers of one worker, and a client."""

    first: RouterProcess
    second: RouterProcess
    session: aiohttp.ClientSession

    def ask(self, router: RouterProcess) -> aiohttp.client._RequestContextManager:
        url = f"{router.http}/v1/completions"
        return self.session.post(url, json=BODY, headers={"idempotency-key": "k"})

    async def answer(self, router: RouterProcess) -> tuple[bytes, str | None]:
        async with self.ask(router) as response:
            assert response.status == 200
            return await response.read(), response.headers.get("idempotent-replayed")


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        url = stack.enter_context(running_postgres()).new_database()
        options = {"store.database": url, "store.files": str(tmp_path)}
        first, second = (
            await enter(router_process(**options)),
            await enter(router_process(**options)),
        )
        routers = f"[{first.grpc}, {second.grpc}]"
        await enter(worker_process(role="decode", routers=routers, engine_args="{step_s: 0.02}"))
        for router in (first, second):
            await until_workers(router.grpc, 1)
        yield Service(first, second, await enter(aiohttp.ClientSession()))


async def test_another_router_replays_the_answer_that_is_under_way(service: Service) -> None:
    async with service.ask(service.first) as response:
        begun = await response.content.readuntil(b"\n\n")
        elsewhere = asyncio.create_task(service.answer(service.second))
        text = begun + await response.read()
    assert text.endswith(b"data: [DONE]\n\n")
    assert await elsewhere == (text, "true")


async def test_another_router_generates_what_a_killed_one_left(service: Service) -> None:
    async with service.ask(service.first) as response:
        await response.content.readuntil(b"\n\n")
        await service.first.kill()
    text, replayed = await service.answer(service.second)
    assert (text.endswith(b"data: [DONE]\n\n"), replayed) == (True, None)
    assert await service.answer(service.second) == (text, "true")
