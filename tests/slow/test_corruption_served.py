"""Damaged KV, and a worker that changes its role, in a whole service: the router, two prefill
workers that damage what they send when they are told to, and a decode worker. Every answer is the
one that an undamaged engine gives."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from pdserve import rpc
from pdserve.client import Client
from pdserve.config import HealthConfig, RouterConfig
from pdserve.types import SamplingParams
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.admin_pb2_grpc import AdminStub
from router.main import RouterServer
from tests.e2e.pair import prompt
from tests.e2e.service import Service
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from pdserve.types import Receipt
    from tests.e2e.engines import EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")
SAMPLING = SamplingParams(
    temperature=0.9, seed=11, presence_penalty=0.5, max_tokens=24, ignore_eos=True
)
_SEEDS = itertools.count(1)
WORKERS = ("prefill-0", "prefill-1", "decode-0")


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
async def running(
    tiny_model: Path,
    local: tuple[str, Client],
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
        service.others = [local[0]]
        service.orders = {name: directory / name for name in WORKERS[:2]}
        service.order("", *service.orders)
        for name in WORKERS:
            await service.add(name)
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


async def change_role(service: Service, role: w.Role.ValueType) -> a.ChangeRoleResponse:
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
        done = await change_role(service, role)
        assert not done.failure
        assert done.probe_s > 0
        workers.clear()
        async with asyncio.timeout(WAIT_S):
            while pair not in workers and not any(task.done() for task in asking):
                answered.clear()
                await answered.wait()
    is_over = True
    await asyncio.gather(*asking)


# In this order: a pair that one test has ejected is still ejected in the next.


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
