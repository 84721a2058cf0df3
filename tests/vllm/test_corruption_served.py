"""Damaged KV, and a worker that changes its role, in a whole service: the router, two prefill
workers that damage what they send when they are told to, and a decode worker. Every answer is the
one that an undamaged engine gives."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import pytest
import pytest_asyncio

from pdserve import rpc
from pdserve.client import Client
from pdserve.config import RouterConfig
from pdserve.types import SamplingParams
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.admin_pb2_grpc import AdminStub
from pdserve.v1.worker_pb2_grpc import RegistryStub, WorkerStub
from router.main import RouterServer
from tests.patience import WAIT_S
from tests.vllm.test_handoff_exact import prompt

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator

    from pdserve.types import Receipt
    from tests.vllm.engines import EngineProcess

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).parents[2]
SAMPLING = SamplingParams(
    temperature=0.9, seed=11, presence_penalty=0.5, max_tokens=24, ignore_eos=True
)
# `pdserve worker` with tests/vllm/corrupt.py loaded first.
_DAMAGING = "import tests.vllm.corrupt; from pdserve.cli import main; main()"
_SEEDS = itertools.count(1)
_LOOK_S = 0.05


@dataclass(slots=True)
class Service:
    """Two routers in this process and their workers in theirs: `local` asks the one that leaves
    prefill to decode workers."""

    grpc: str
    client: Client
    local_grpc: str
    local: Client
    registry: RegistryStub
    orders: dict[str, Path] = field(default_factory=dict)

    def order(self, text: str, *workers: str) -> None:
        """Tells prefill workers what to do with what they send from now on."""
        for worker in workers:
            self.orders[worker].write_text(text, encoding="ascii")

    async def listed(self) -> w.ListWorkersResponse:
        return await self.registry.ListWorkers(w.ListWorkersRequest(), timeout=WAIT_S)

    async def quarantined(self) -> list[tuple[str, str]]:
        return [(q.prefill_worker, q.decode_worker) for q in (await self.listed()).quarantined]

    async def until_ready(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                states = [entry.state for entry in (await self.listed()).workers]
                if states.count("ready") == count:
                    return
                await asyncio.sleep(_LOOK_S)

    async def statuses(self) -> dict[str, w.WorkerStatus]:
        found = {}
        for entry in (await self.listed()).workers:
            async with grpc.aio.insecure_channel(entry.info.address) as channel:
                found[entry.info.worker_id] = await WorkerStub(channel).GetStatus(
                    w.GetStatusRequest(), timeout=WAIT_S
                )
        return found

    async def until_empty(self) -> None:
        """No block is pinned and no request held on any worker."""
        async with asyncio.timeout(WAIT_S):
            while True:
                ledgers = [status.ledger for status in (await self.statuses()).values()]
                if not any(x.pinned_blocks or x.transfers or x.engine_requests for x in ledgers):
                    return
                await asyncio.sleep(_LOOK_S)

    async def mismatches(self) -> float:
        return (await self.statuses())["decode-0"].kv.totals["digest_mismatches"]


async def _start(name: str, role: str, model: Path, service: Service) -> Process:
    options = {
        "worker.worker_id": name,
        "worker.role": role,
        "worker.model": model,
        "worker.model_name": "tiny",
        "worker.routers": f"[{service.grpc}, {service.local_grpc}]",
        "worker.engine_args": (
            "{dtype: float32, kv_cache_memory_bytes: 67108864, max_num_batched_tokens: 256}"
        ),
    }
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = ["-m", "pdserve"]
    if name in service.orders:
        env["PDSERVE_TEST_CORRUPT"] = str(service.orders[name])
        command = ["-c", _DAMAGING]
    settings = [x for key, value in options.items() for x in ("--set", f"{key}={value}")]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *command, "worker", *settings),
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT)},
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Service]:
    directory = tmp_path_factory.mktemp("orders")
    async with AsyncExitStack() as stack:
        router = RouterServer(
            RouterConfig(
                http_port=0,
                grpc_port=0,
                quarantine_s=3600.0,
                stop_grace_s=0.0,
                policy="least_loaded",
            )
        )
        addresses = await router.start()
        stack.push_async_callback(router.stop)
        client = await stack.enter_async_context(Client(addresses.grpc))
        channel = await stack.enter_async_context(rpc.open_channel(addresses.grpc))
        other = RouterServer(
            RouterConfig(http_port=0, grpc_port=0, stop_grace_s=0.0, policy="always_local")
        )
        local_grpc = (await other.start()).grpc
        stack.push_async_callback(other.stop)
        local = await stack.enter_async_context(Client(local_grpc))
        service = Service(addresses.grpc, client, local_grpc, local, RegistryStub(channel))
        service.orders = {name: directory / name for name in ("prefill-0", "prefill-1")}
        service.order("", *service.orders)
        names = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}
        for name, role in names.items():
            process = await _start(name, role, tiny_model, service)
            stack.push_async_callback(_end, process)
        await service.until_ready(len(names))
        yield service


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), WAIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise


@pytest_asyncio.fixture(loop_scope="session")
async def service(running: Service) -> AsyncIterator[Service]:
    """Every test leaves the workers empty, and told to damage nothing."""
    yield running
    running.order("", *running.orders)
    await running.until_empty()


async def ask(service: Service, engine: EngineProcess, *, local: bool = False) -> Receipt:
    """One request that no cache knows, compared with what the engine answers."""
    ids = prompt(500, next(_SEEDS) + 900)
    expected = await engine.run(ids, SAMPLING)
    tokens, text, receipt = [], "", None
    client = service.local if local else service.client
    async for delta in client.generate(ids, SAMPLING):
        tokens += delta.token_ids
        text += delta.text
        receipt = delta.receipt or receipt
    assert (tuple(tokens), text) == (expected.token_ids, expected.text)
    assert receipt is not None
    return receipt


async def test_prefill_on_the_decode_worker_gives_the_same_tokens(
    service: Service, aggregated: EngineProcess
) -> None:
    """And workers tell what their steps cost, of both ways."""
    for local, source in ((True, "decode"), (False, "prefill")):
        receipt = await ask(service, aggregated, local=local)
        assert (receipt.first_token_source, receipt.fallbacks) == (source, ())
        assert bool(receipt.transfer_bytes) == (source == "prefill")
    steps = w.StepCosts()
    async with asyncio.timeout(WAIT_S):
        while not (steps.decode_steps and steps.prefill_steps):
            await ask(service, aggregated, local=True)
            listed = (await service.listed()).workers
            (steps,) = (x.steps for x in listed if x.info.worker_id == "decode-0")
    assert steps.prefill_end >= 256
    assert steps.chunk_tokens == 256
    assert 0 < sum(steps.coefficients) < WAIT_S


async def flip(service: Service, role: w.Role.ValueType) -> a.FlipRoleResponse:
    """Of the second prefill worker."""
    request = a.FlipRoleRequest(worker_id="prefill-1", role=role, drain_timeout_s=WAIT_S)
    async with rpc.open_channel(service.grpc) as channel:
        return await AdminStub(channel).FlipRole(request, timeout=2 * WAIT_S)


async def test_a_worker_changes_its_role_while_requests_run_and_loses_none(
    service: Service, aggregated: EngineProcess
) -> None:
    is_over, workers, answered = False, set(), asyncio.Event()

    async def keep_asking() -> None:
        while not is_over:
            receipt = await ask(service, aggregated)
            assert receipt.fallbacks == ()
            workers.add((receipt.prefill_worker, receipt.decode_worker))
            answered.set()

    asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
    for role, pair in (
        (w.ROLE_DECODE, ("prefill-0", "prefill-1")),
        (w.ROLE_PREFILL, ("prefill-1", "decode-0")),
    ):
        done = await flip(service, role)
        assert (done.failure, done.moved_streams) == ("", 0)
        assert done.canary_s > 0
        workers.clear()
        async with asyncio.timeout(WAIT_S):
            while pair not in workers and not any(task.done() for task in asking):
                answered.clear()
                await answered.wait()
    is_over = True
    await asyncio.gather(*asking)


async def test_a_canary_whose_kv_comes_damaged_leaves_the_worker_what_it_was(
    service: Service, aggregated: EngineProcess
) -> None:
    service.order("flip", "prefill-0")
    done = await flip(service, w.ROLE_DECODE)
    assert "damaged" in done.failure, done.failure
    service.order("", "prefill-0")
    assert await service.quarantined() == []
    roles = {entry.info.worker_id: entry.info.role for entry in (await service.listed()).workers}
    assert roles["prefill-1"] == w.ROLE_PREFILL
    assert {(await ask(service, aggregated)).prefill_worker for _ in range(4)} >= {"prefill-1"}


# In this order: what one test has quarantined, the next finds so.


async def test_one_flipped_bit_costs_a_repeat_and_nothing_else(
    service: Service, aggregated: EngineProcess
) -> None:
    service.order("flip once", *service.orders)
    receipt = await ask(service, aggregated)
    assert receipt.fallbacks == ()
    assert receipt.first_token_source == "prefill"
    assert await service.mismatches() == 1
    assert await service.quarantined() == []


async def test_a_pair_that_damages_each_time_is_replaced_and_kept_apart(
    service: Service, aggregated: EngineProcess
) -> None:
    service.order("flip", "prefill-0")
    # Two idle prefill workers take turns, so that one of two requests meets the bad pair.
    receipts = [await ask(service, aggregated) for _ in range(2)]
    fallbacks = [receipt.fallbacks for receipt in receipts if receipt.fallbacks]
    assert fallbacks == [("other_prefill:transfer_corrupted",)]
    assert all(receipt.transport == "shm" for receipt in receipts)
    assert await service.quarantined() == [("prefill-0", "decode-0")]
    for _ in range(3):
        receipt = await ask(service, aggregated)
        assert (receipt.prefill_worker, receipt.fallbacks) == ("prefill-1", ())


async def test_without_a_whole_pair_the_decode_worker_computes(
    service: Service, aggregated: EngineProcess
) -> None:
    service.order("flip", "prefill-1")
    receipt = await ask(service, aggregated)
    assert receipt.fallbacks == ("one_worker:transfer_corrupted",)
    assert receipt.decode_worker == "decode-0"
    pairs = {("prefill-0", "decode-0"), ("prefill-1", "decode-0")}
    assert set(await service.quarantined()) == pairs
    receipt = await ask(service, aggregated)
    assert (receipt.prefill_worker, receipt.decode_worker) == ("decode-0", "decode-0")
    assert (receipt.fallbacks, receipt.transport) == ((), "")
