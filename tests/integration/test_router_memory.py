"""A router keeps nothing of ended requests and lost workers, or a bounded amount. The bounds are
set low. The tests count objects before and after hundreds of requests with all kinds of ends,
and after deaths of workers."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pdserve.config import HealthConfig
from pdserve.errors import PdserveError
from pdserve.types import Role, SamplingParams
from router.api.answer_sinks import EventStream, WholeBody
from router.attempt.attempt import Attempt
from router.attempt.open_answer import OpenAnswer
from router.attempt.streams import WorkerStream
from router.fleet.open import FleetLimits
from router.main import RouterLimits
from router.request_path import PathLimits
from tests.support.cluster import LEASE_S, Cluster
from tests.support.timeouts import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

MODEL = "pdserve-demo"
REQUESTS = 112
AT_ONCE = 16
LIVES = 6
KEPT = 2
TIMES = 6
CONTAINERS = ("builtins.dict", "builtins.list", "builtins.set", "builtins.tuple")
OURS = ("router.", "pdserve.", "_asyncio.", "asyncio.locks.", "asyncio.queues.")


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    limits = RouterLimits(
        fleet=FleetLimits(forget_after_s=0.0, prefix_blocks=64),
        path=PathLimits(refit_s=0.0, max_pairs=KEPT, records_kept=KEPT, decisions_kept=KEPT),
    )
    router: dict[str, Any] = {
        "policy": "slo_aware",
        "health": HealthConfig(stall_s=LEASE_S),
        "capsules": {"recent": KEPT},
    }
    engine_args: dict[str, object] = {"prefix_cache": True, "total_blocks": 512}
    async with Cluster(
        prefill=2, decode=2, engine_args=engine_args, router=router, limits=limits
    ) as made:
        yield made


def objects() -> Counter[str]:
    gc.collect()
    kinds = map(type, gc.get_objects())
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


async def over_grpc(cluster: Cluster, rng: random.Random, number: int) -> None:
    """Send one request over gRPC, and cancel some."""
    prompt = [rng.randrange(20, 400) for _ in range(rng.randrange(20, 100))]
    sampling = SamplingParams(max_tokens=rng.randrange(1, 12), ignore_eos=True, n=1 + number % 2)
    asking = asyncio.create_task(cluster.ask(prompt, sampling))
    if number % 3 == 0:
        await asyncio.wait((asking,), timeout=rng.choice((0.0, 0.001, 0.005, 0.02)))
        asking.cancel()
    with suppress(PdserveError, asyncio.CancelledError):
        await asking


async def over_http(session: aiohttp.ClientSession, number: int) -> None:
    """Send one request over HTTP: streamed or whole, stored, invalid, for an unknown model, or
    cancelled."""
    body: dict[str, Any] = {"model": MODEL, "prompt": [number] * 40, "max_tokens": 6}
    more: tuple[dict[str, Any], ...] = ({}, {"stream": True}, {"model": f"m{number}"}, {"x": 1})
    headers = {"X-Request-Id": f"name-{number}"} if number % 5 == 0 else {}
    body |= more[number % len(more)]
    async with session.post("/v1/completions", json=body, headers=headers) as answer:
        if number % 7:
            await answer.read()


async def ask(cluster: Cluster, rng: random.Random, first: int) -> None:
    async with aiohttp.ClientSession(f"http://{cluster.http}") as session:
        for start in range(first, first + REQUESTS, AT_ONCE):
            numbers = range(start, start + AT_ONCE)
            await asyncio.gather(
                *(over_http(session, n // 2) for n in numbers if n % 2),
                *(over_grpc(cluster, rng, n // 2) for n in numbers if not n % 2),
            )
        async with session.get("/metrics") as answer:
            assert "m1" not in await answer.text()  # a model's name that a client made up
    await cluster.until_empty()


async def live_and_die(cluster: Cluster, first: int) -> None:
    """Register workers under former names and under new ones."""
    whole = SamplingParams(max_tokens=2, ignore_eos=True)
    for number in range(first, first + LIVES):
        names = [f"{role}-{2 + number % 2 * number}" for role in (Role.PREFILL, Role.DECODE)]
        for name in names:
            await cluster.add(name)
        await cluster.until_ready()
        await asyncio.gather(*(cluster.ask([20 + i] * 24, whole) for i in range(8)))
        for name in names:
            await cluster.kill(name)
    members = cluster.router.fleet.members
    await wait_until(lambda: members.keys() == cluster.workers.keys())
    await cluster.ask([20] * 24, whole)
    await cluster.until_empty()


async def assert_nothing_kept(
    use: Callable[[int], Awaitable[None]], most: int, kinds: tuple[str, ...]
) -> None:
    """Some time leaves no more than so many more objects of each kind. What leaks does so every
    time; the first times also make what is made once."""
    kept: dict[str, int] = {}
    for time in range(TIMES):
        before = objects()
        await use(time)
        more = objects() - before
        kept = {x: n for x, n in more.items() if x.startswith(kinds) and n > most}
        if not kept:
            return
    pytest.fail(f"kept: {kept}")


async def test_nothing_is_kept_of_requests_that_are_over(cluster: Cluster) -> None:
    rng = random.Random(1)

    async def use(time: int) -> None:
        await ask(cluster, rng, time * REQUESTS)

    await assert_nothing_kept(use, REQUESTS // 10, (*CONTAINERS, *OURS))


async def test_nothing_is_kept_of_workers_that_are_gone(cluster: Cluster) -> None:
    async def use(time: int) -> None:
        await live_and_die(cluster, time * LIVES)

    # The cluster keeps what it started; the router, of which this is, has lost twice as many.
    await assert_nothing_kept(use, LIVES, ("router.",))


async def test_an_ended_request_is_freed_without_garbage_collection() -> None:
    """Cycles of objects would wait for a collection, which stops a busy router for 0.4 s."""
    limits = {
        "queue": {"max_running_requests": 1, "max_queued_requests": 1},
        "capsules": {"recent": 0},  # evidence has the streams of a bounded number of requests
    }
    async with Cluster(prefill=1, decode=1, router=limits) as cluster:
        await ask_at_once(cluster)
        gc.collect()
        gc.freeze()  # what other tests left is not counted
        gc.disable()
        try:
            statuses = await ask_at_once(cluster)
            await cluster.until_empty()
            kinds = (Attempt, WorkerStream, OpenAnswer, EventStream, WholeBody)
            left = Counter(type(x).__name__ for x in gc.get_objects() if type(x) in kinds)
        finally:
            gc.enable()
    assert statuses == {200, 429}
    assert not left


async def ask_at_once(cluster: Cluster) -> set[int]:
    """Ask more than may wait, streamed and not. Return the statuses."""

    async def one(number: int) -> int:
        body = {"model": MODEL, "prompt": [20 + number] * 40, "max_tokens": 6}
        body |= ({}, {"stream": True}, {"n": 2})[number % 3]
        async with session.post("/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status

    async with aiohttp.ClientSession(f"http://{cluster.http}") as session:
        alone = [await one(number) for number in range(6)]
        return {*alone, *await asyncio.gather(*(one(number) for number in range(9)))}
