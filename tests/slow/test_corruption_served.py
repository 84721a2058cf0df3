"""Damaged KV, and a worker that changes its role, in a whole service: the router, two prefill
workers that damage what they send when they are told to, and a decode worker. Every answer is the
one that an undamaged engine gives."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
import pytest_asyncio

from pdserve import rpc
from pdserve.client import Client
from pdserve.config import HealthConfig, RolesConfig, RouterConfig
from pdserve.types import Role, SamplingParams
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.admin_pb2_grpc import AdminStub
from router.main import RouterServer
from router.placement.values import MemberState
from tests.e2e.service import Service
from tests.e2e.test_handoff_exact import prompt
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from pdserve.types import Receipt
    from tests.e2e.engines import EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")
SAMPLING = SamplingParams(
    temperature=0.9, seed=11, presence_penalty=0.5, max_tokens=24, ignore_eos=True
)
_SEEDS = itertools.count(1)
WORKERS = ("prefill-0", "prefill-1", "decode-0")
SEATS = 8
ELASTIC = RouterConfig(
    http_port=0,
    grpc_port=0,
    stop_grace_s=0.0,
    policy="least_loaded",
    health=HealthConfig(probe_s=0.0),
)
QUICK = RolesConfig(auto=True, window_s=1.0, cooldown_s=1.0, min_load=0.3)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def local() -> AsyncIterator[tuple[str, Client]]:
    """Another router, which leaves prefill to decode workers."""
    config = RouterConfig(
        http_port=0,
        grpc_port=0,
        stop_grace_s=0.0,
        policy="always_aggregated",
        health=HealthConfig(probe_s=0.0),
    )
    router = RouterServer(config)
    address = (await router.start()).grpc
    async with Client(address) as client:
        yield address, client
    await router.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def elastic() -> AsyncIterator[tuple[str, list[RouterServer]]]:
    """A third router, which one test starts again, to move workers by load."""
    routers = [RouterServer(ELASTIC)]
    yield (await routers[0].start()).grpc, routers
    for router in routers:
        await router.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(
    tiny_model: Path,
    local: tuple[str, Client],
    elastic: tuple[str, list[RouterServer]],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Service]:
    directory = tmp_path_factory.mktemp("orders")
    config = RouterConfig(
        http_port=0,
        grpc_port=0,
        stop_grace_s=0.0,
        policy="least_loaded",
        # A probe would use up an order.
        health=HealthConfig(eject_pair_s=3600.0, probe_s=0.0),
    )
    async with Service.start(config, tiny_model) as service:
        service.others = [local[0], elastic[0]]
        service.orders = {name: directory / name for name in WORKERS[:2]}
        service.order("", *service.orders)
        for name in WORKERS:
            await service.add(name, seats=SEATS)
        await service.until_ready()
        yield service


@pytest_asyncio.fixture(loop_scope="session")
async def service(running: Service) -> AsyncIterator[Service]:
    """Every test leaves the workers empty, and told to damage nothing."""
    yield running
    running.order("", *running.orders)
    await running.until_empty()


async def ejected(service: Service, decode: str) -> list[str]:
    """Return the prefill workers whose pair with `decode` is ejected."""
    pairs = (await service.listed()).ejected_pairs
    return [x.prefill_worker for x in pairs if x.decode_worker == decode]


async def ask(service: Service, engine: EngineProcess, *, client: Client | None = None) -> Receipt:
    """One request that no cache knows, compared with what the engine answers."""
    ids = prompt(500, next(_SEEDS) + 900)
    expected = await engine.run(ids, SAMPLING)
    tokens, text, receipt = [], "", None
    async for delta in (client or service.client).generate(ids, SAMPLING):
        tokens += delta.token_ids
        text += delta.text
        receipt = delta.receipt or receipt
    assert (tuple(tokens), text) == (expected.token_ids, expected.text)
    assert receipt is not None
    return receipt


async def test_prefill_on_the_decode_worker_gives_the_same_tokens(
    service: Service, local: tuple[str, Client], aggregated: EngineProcess
) -> None:
    """And workers tell what their steps cost, of both ways."""
    for client, source in ((local[1], "decode"), (service.client, "prefill")):
        receipt = await ask(service, aggregated, client=client)
        assert (receipt.first_token_source, receipt.fallbacks) == (source, ())
        assert bool(receipt.transfer_bytes) == (source == "prefill")
    steps = w.StepCosts()
    async with asyncio.timeout(WAIT_S):
        while not (steps.decode_steps and steps.prefill_steps):
            await ask(service, aggregated, client=local[1])
            listed = (await service.listed()).workers
            (steps,) = (x.steps for x in listed if x.info.worker_id == "decode-0")
    assert steps.prefill_end >= 256
    assert steps.chunk_tokens == 256
    assert 0 < sum(steps.coefficients) < WAIT_S


async def flip(service: Service, role: w.Role.ValueType) -> a.ChangeRoleResponse:
    """Of the second prefill worker."""
    request = a.ChangeRoleRequest(worker_id="prefill-1", role=role, drain_timeout_s=WAIT_S)
    async with rpc.open_channel(service.grpc) as channel:
        return await AdminStub(channel).ChangeRole(request, timeout=2 * WAIT_S)


async def test_a_worker_changes_its_role_while_requests_run_and_loses_none(
    service: Service, aggregated: EngineProcess
) -> None:
    is_over, workers, answered = False, set(), asyncio.Event()

    async def keep_asking() -> None:
        while not is_over:
            receipt = await ask(service, aggregated)
            assert set(receipt.fallbacks) <= {"live_kv:moved"}
            workers.add((receipt.prefill_worker, receipt.decode_worker))
            answered.set()

    asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
    for role, pair in (
        (w.ROLE_DECODE, ("prefill-0", "prefill-1")),
        (w.ROLE_PREFILL, ("prefill-1", "decode-0")),
    ):
        done = await flip(service, role)
        assert not done.failure
        assert done.probe_s > 0
        workers.clear()
        async with asyncio.timeout(WAIT_S):
            while pair not in workers and not any(task.done() for task in asking):
                answered.clear()
                await answered.wait()
    is_over = True
    await asyncio.gather(*asking)


async def test_a_probe_whose_kv_is_damaged_restores_the_role_and_ejects_the_pair(
    service: Service, aggregated: EngineProcess
) -> None:
    service.order("flip", "prefill-0")
    done = await flip(service, w.ROLE_DECODE)
    assert "digest mismatch" in done.failure, done.failure
    service.order("", "prefill-0")
    assert await ejected(service, "prefill-1") == ["prefill-0"]
    roles = {entry.info.worker_id: entry.info.role for entry in (await service.listed()).workers}
    assert roles["prefill-1"] == w.ROLE_PREFILL
    assert {(await ask(service, aggregated)).prefill_worker for _ in range(4)} >= {"prefill-1"}


# In this order: a pair that one test has ejected is still ejected in the next.


async def test_one_flipped_bit_costs_a_repeat_and_nothing_else(
    service: Service, aggregated: EngineProcess
) -> None:
    service.order("flip once", *service.orders)
    receipt = await ask(service, aggregated)
    assert receipt.fallbacks == ()
    assert receipt.first_token_source == "prefill"
    assert (await service.statuses())["decode-0"].kv.totals["digest_mismatches"] == 1
    assert await ejected(service, "decode-0") == []


async def test_a_pair_that_damages_each_time_is_replaced_and_kept_apart(
    service: Service, aggregated: EngineProcess
) -> None:
    service.order("flip", "prefill-0")
    # Two idle prefill workers take turns, so that one of two requests meets the bad pair.
    receipts = [await ask(service, aggregated) for _ in range(2)]
    fallbacks = [receipt.fallbacks for receipt in receipts if receipt.fallbacks]
    assert fallbacks == [("other_prefill:transfer_corrupted",)]
    assert all(receipt.transport == "shm" for receipt in receipts)
    assert await ejected(service, "decode-0") == ["prefill-0"]
    for _ in range(3):
        receipt = await ask(service, aggregated)
        assert (receipt.prefill_worker, receipt.fallbacks) == ("prefill-1", ())


async def test_without_a_whole_pair_the_decode_worker_computes(
    service: Service, aggregated: EngineProcess
) -> None:
    service.order("flip", "prefill-1")
    receipt = await ask(service, aggregated)
    assert receipt.fallbacks == ("aggregated:transfer_corrupted",)
    assert receipt.decode_worker == "decode-0"
    assert set(await ejected(service, "decode-0")) == {"prefill-0", "prefill-1"}
    receipt = await ask(service, aggregated)
    assert (receipt.prefill_worker, receipt.decode_worker) == ("decode-0", "decode-0")
    assert (receipt.fallbacks, receipt.transport) == ((), "")


# The last one: it leaves workers in other roles.


@asynccontextmanager
async def kept_busy(one: Callable[[], Awaitable[None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """SEATS clients, each of whom does that again and again."""
    is_over = False

    async def keep_on() -> None:
        while not is_over:
            await one()

    tasks = [asyncio.create_task(keep_on()) for _ in range(SEATS)]
    try:
        yield tasks
    finally:
        is_over = True
        await asyncio.gather(*tasks)


async def until_split(
    router: RouterServer, prefill: int, decode: int, tasks: Sequence[asyncio.Task[None]] = ()
) -> None:
    """Until so many of each role are ready; none of `tasks` may end before."""
    async with asyncio.timeout(WAIT_S):
        while True:
            members = router.fleet.pool.members.values()
            ready = Counter(m.info.role for m in members if m.state is MemberState.READY)
            if (ready[Role.PREFILL], ready[Role.DECODE]) == (prefill, decode):
                return
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.05)


async def tokens_of(client: Client, ids: list[int], sampling: SamplingParams) -> tuple[int, ...]:
    """Of an answer that no fallback was needed for."""
    tokens, receipt = [], None
    async for delta in client.generate(ids, sampling):
        tokens += delta.token_ids
        receipt = delta.receipt or receipt
    assert receipt is not None
    assert receipt.fallbacks == ()
    return tuple(tokens)


async def test_a_router_moves_workers_after_the_load_and_loses_nothing(
    service: Service, elastic: tuple[str, list[RouterServer]], aggregated: EngineProcess
) -> None:
    address, routers = elastic
    await routers.pop().stop()
    router = RouterServer(
        msgspec.structs.replace(ELASTIC, grpc_port=int(address.rpartition(":")[2]), roles=QUICK)
    )
    await router.start()
    routers.append(router)
    long, short = replace(SAMPLING, max_tokens=48), replace(SAMPLING, max_tokens=2)
    prompts = [prompt(40, next(_SEEDS) + 900) for _ in range(4)]
    answers = [(await aggregated.run(ids, long)).token_ids for ids in prompts]
    turns = itertools.count()

    async def ask_for_an_answer() -> None:
        turn = next(turns) % len(prompts)
        assert await tokens_of(client, prompts[turn], long) == answers[turn]

    async def ask_for_a_prompt() -> None:
        assert len(await tokens_of(client, prompt(500, next(_SEEDS) + 900), short)) == 2

    async with Client(address) as client:
        await until_split(router, 2, 1)
        for ask_for_one, split in ((ask_for_an_answer, (1, 2)), (ask_for_a_prompt, (2, 1))):
            async with kept_busy(ask_for_one) as tasks:
                await until_split(router, *split, tasks)
    for role in ("decode", "prefill"):
        labels = {"model": "tiny", "role": role, "outcome": "done"}
        registry = router.metrics.registry
        assert registry.get_sample_value("pdserve_role_change_seconds_count", labels) == 1
