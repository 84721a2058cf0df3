"""A network that breaks, between routers and workers on separate hosts: no token is wrong, no
request is lost while there is a path, and what was apart works together again.

With fake engines, host 0 has a router and host 1 the prefill worker, each of hosts 2 and 3 a decode
worker, and host 3 a second router. The pauses that clients see are printed (`pytest -rP`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import aiohttp
import grpc.aio
import pytest
import pytest_asyncio

from benchmarks.service import LoggedProcess
from pdserve.client import Client
from pdserve.net import rpc
from pdserve.types import SamplingParams
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub, WorkerStub
from tests.support.cluster import fake_answer
from tests.support.model_kinds import make_kind
from tests.support.network_namespaces import CUT, LinkQuality, Network, missing_requirement
from tests.support.processes import start_python
from tests.support.timeouts import START_S, WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from pdserve.process.forkserver import Process
    from pdserve.types import Receipt

WHY_NOT = missing_requirement()
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
ROUTERS, WORKERS = (0, 3), {"prefill-0": 1, "decode-0": 2, "decode-1": 3}
HTTP, GRPC = 8000, 8001
# As on a GPU, answers take seconds.
FAKE = {"engine": "fake", "engine_args": "{step_s: 0.02, prefill_s: 0.0005, transfer_s: 0.005}"}
VLLM = {
    "engine_args.dtype": "float32",
    "engine_args.kv_cache_memory_bytes": "67108864",
    "kv.transports": "[tcp]",
}
SHORT = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
FEW, LONG = replace(SHORT, max_tokens=24), replace(SHORT, max_tokens=150)
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class ForkedWorker:
    """A worker with vLLM, which its process need not import. Has the methods of LoggedProcess that
    this file needs."""

    process: Process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    async def stop(self) -> None:
        with suppress(ProcessLookupError):
            for number in (signal.SIGCONT, signal.SIGTERM):
                self.process.send_signal(number)
            try:
                await asyncio.wait_for(self.process.wait(), WAIT_S)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()


@dataclass(slots=True)
class Asked:
    """One open request. It has `begun` after some tokens of decode, or after the `first` one, which
    prefill makes."""

    prompt: list[int]
    sampling: SamplingParams
    first: bool = False
    token_ids: list[int] = field(default_factory=list)
    pause_s: float = 0.0
    receipt: Receipt | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, client: Client) -> None:
        heard = time.monotonic()
        async for delta in client.generate(self.prompt, self.sampling):
            now = time.monotonic()
            self.pause_s, heard = max(self.pause_s, now - heard), now
            self.token_ids += delta.token_ids
            self.receipt = delta.receipt
            if self.first or len(self.token_ids) > 10:
                self.begun.set()


class Service:
    """Routers, and workers by name, on their hosts. `clients` are at each router's host, and the
    last one is at host 1, and knows all routers."""

    def __init__(
        self,
        routers: tuple[int, ...],
        workers: dict[str, int],
        directory: Path,
        followers: dict[str, int] | None = None,
        split_by: str = "tensor_parallel_size",
        group: tuple[str, ...] = (),
    ) -> None:
        """A worker in `followers` has a second rank on that host, by the engine argument
        `split_by`. The workers in `group` are the ranks of a data-parallel group."""
        self.followers, self.split_by, self.group = followers or {}, split_by, group
        self.network = Network(1 + max(*routers, *workers.values(), *self.followers.values()))
        self.parts: dict[str, LoggedProcess | ForkedWorker] = {}
        self.clients: list[Client] = []
        self._routers, self._workers, self._directory = routers, workers, directory
        self._registries: list[RegistryStub] = []
        self._stack = AsyncExitStack()
        self._asked = 0

    @asynccontextmanager
    async def running(self, settings: dict[str, str]) -> AsyncIterator[Service]:
        """`settings` are those of all workers."""
        async with self._stack:
            self._stack.enter_context(self.network)
            await self._start(settings)
            yield self

    async def _start(self, settings: dict[str, str]) -> None:
        for host in self._routers:
            at = dict.fromkeys(("http.host", "grpc.host"), self.network.address(host))
            at |= {"policy": "least_loaded", "health.eject_s": "1"}
            await self._run(f"router-{host}", host, "router", at)
            address = await self._stack.enter_async_context(self.network.forward(host, GRPC))
            channel = await self._stack.enter_async_context(rpc.open_channel(address))
            self._registries.append(RegistryStub(channel))
            self.clients.append(await self._stack.enter_async_context(Client(address)))
        distant = [self.network.forward(host, GRPC, at=1) for host in self._routers]
        addresses = [await self._stack.enter_async_context(each) for each in distant]
        self.clients.append(await self._stack.enter_async_context(Client(addresses)))
        routers = ", ".join(f"{self.network.address(host)}:{GRPC}" for host in self._routers)
        for name, host in self._workers.items():
            address = self.network.address(host)
            at = {"worker_id": name, "role": name.partition("-")[0], "routers": f"[{routers}]"}
            at |= {"host": address, "kv.host": address, "kv.hold_s": "5"}
            if name in self.group:
                at |= self._rank(name)
            await self._run_parts(name, {**settings, **at})
        await self.until_whole()

    def _rank(self, name: str) -> dict[str, str]:
        first, rank = self.group[0], str(self.group.index(name))
        at = {"size": str(len(self.group)), "rank": rank, "group": first}
        at |= {"address": self.network.address(self._workers[first])}
        experts = {"engine_args.enable_expert_parallel": "true"}
        return experts | {f"data_parallel.{key}": value for key, value in at.items()}

    async def _run_parts(self, name: str, settings: dict[str, str]) -> None:
        first = self._workers[name]
        if name not in self.followers:
            await self._run(name, first, "worker", settings)
            return
        settings |= {"nodes.count": "2", "nodes.address": self.network.address(first)}
        settings |= {f"engine_args.{self.split_by}": "2"}
        for rank, host in enumerate((first, self.followers[name])):
            at = dict.fromkeys(("host", "kv.host"), self.network.address(host))
            part = {**settings, **at, "nodes.rank": str(rank)}
            await self._run(f"{name}-node-{rank}", host, "worker", part)

    async def _run(self, name: str, host: int, command: str, settings: dict[str, str]) -> None:
        words = [command]
        for key, value in settings.items():
            words += ["--set", f"{command}.{key}={value}"]
        # More threads than cores would wait for one another in loops.
        env, log = {"OMP_NUM_THREADS": "1"}, self._directory / f"{name}.log"
        if command == "worker" and "engine" not in settings:
            fds = [self.network.namespace(host)]
            forked = await start_python("tests.support.on_host", *words, env=env, log=log, fds=fds)
            worker = self.parts[name] = ForkedWorker(forked)
            self._stack.push_async_callback(worker.stop)
            return

        async def is_ready() -> bool:
            return command == "worker" or await self.network.listens(host, GRPC)

        child = self.parts[name] = LoggedProcess(name, log)
        self._stack.push_async_callback(child.stop)
        words = [sys.executable, "-m", "pdserve", *words]
        await child.start(self.network.command(host, words), is_ready, env)

    async def entries(self, router: int) -> dict[str, w.WorkerEntry]:
        return {x.info.worker_id: x for x in (await self._listed(router)).workers}

    async def _listed(self, router: int) -> w.ListWorkersResponse:
        registry = self._registries[router]
        return await registry.ListWorkers(w.ListWorkersRequest(), timeout=WAIT_S)

    async def until_state(self, name: str, state: str) -> None:
        """Wait until every router on another host reports this state of a worker."""
        others = [x for x, host in enumerate(self._routers) if host != self._workers[name]]
        async with asyncio.timeout(WAIT_S):
            for router in others:
                while (await self.entries(router))[name].state != state:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)

    async def until_whole(self) -> None:
        """Wait until every worker is ready at every router and holds nothing."""
        async with asyncio.timeout(START_S):
            while missing := await self._missing():
                self.missing = missing  # what a test that fails waited for
                await asyncio.sleep(_LOOK_S)

    async def _missing(self) -> list[str]:
        found = []
        for router in range(len(self._routers)):
            listed = await self._listed(router)
            ready = {x.info.worker_id for x in listed.workers if x.state == "ready"}
            found += [f"{name} at router {router}" for name in self._workers if name not in ready]
            found += [f"{x} is ejected" for x in listed.ejected_pairs]
            found += [
                f"{x.info.worker_id} is busy, says router {router}"
                for x in listed.workers
                if x.outstanding_requests or x.outstanding_tokens
            ]
        return found or await self._held()

    async def _held(self) -> list[str]:
        """Return what workers still hold of ended requests."""
        found = []
        for name, entry in (await self.entries(0)).items():
            host, port = self._workers[name], int(entry.info.address.rpartition(":")[2])
            async with (
                self.network.forward(host, port) as address,
                grpc.aio.insecure_channel(address) as channel,
            ):
                status = await WorkerStub(channel).GetStatus(w.GetStatusRequest(), timeout=WAIT_S)
            ledger = status.ledger
            if ledger.pinned_blocks or ledger.transfers or ledger.engine_requests:
                found.append(f"{name}: {ledger}")
        return found

    @asynccontextmanager
    async def reading(self, asked: list[Asked], *, router: int = 0) -> AsyncIterator[None]:
        """Start these answers before the body, and assert at the exit that they end without an
        error."""
        async with asyncio.timeout(2 * WAIT_S), asyncio.TaskGroup() as group:
            for each in asked:
                group.create_task(each.read(self.clients[router]))
            for each in asked:
                await each.begun.wait()
            yield
        pause_s = max(each.pause_s for each in asked)
        steps = [step for each in asked for step in fallbacks_of(each)]
        print(f"{len(asked)} answers, longest pause {pause_s:.2f} s, {steps}")  # noqa: T201

    @asynccontextmanager
    async def answers(
        self, count: int, *, router: int = 0, sampling: SamplingParams = LONG
    ) -> AsyncIterator[list[Asked]]:
        """As `reading`, for fake engines, whose tokens are compared."""
        asked = [Asked(self._prompt(), sampling) for _ in range(count)]
        async with self.reading(asked, router=router):
            yield asked
        (model,) = await self.clients[router].list_models()
        for each in asked:
            expected = fake_answer(each.prompt, each.sampling, model.vocab_size)
            assert each.token_ids == expected.token_ids

    async def ask(self, count: int = 4, *, router: int = 0) -> list[Asked]:
        """Request short answers and assert that they are complete."""
        async with self.answers(count, router=router, sampling=SHORT) as asked:
            pass
        return asked

    def _prompt(self) -> list[int]:
        """Return a prompt that differs from all others."""
        self._asked += 1
        return [20 + (self._asked * 37 + x * x) % 200 for x in range(200)]


def fallbacks_of(asked: Asked) -> tuple[str, ...]:
    assert asked.receipt is not None
    return asked.receipt.fallbacks


def workers_of(asked: list[Asked]) -> set[str]:
    """Return the workers that decoded."""
    return {each.receipt.decode_worker for each in asked if each.receipt is not None}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    service = Service(ROUTERS, WORKERS, tmp_path_factory.mktemp("network"))
    async with service.running(FAKE):
        yield service


@pytest_asyncio.fixture(loop_scope="module")
async def service(shared: Service) -> AsyncIterator[Service]:
    """After each test, heal the network and wait until workers are ready and hold nothing."""
    yield shared
    shared.network.heal()
    healed = time.monotonic()
    await shared.until_whole()
    print(f"whole {time.monotonic() - healed:.1f} s after healing")  # noqa: T201
    for asked in await asyncio.gather(*(shared.ask(2, router=x) for x in range(len(ROUTERS)))):
        assert not any(map(fallbacks_of, asked))


async def test_real_answers_go_on_without_a_link_and_then_without_a_host(tmp_path: Path) -> None:
    service = Service((0,), {"prefill-0": 1, "decode-0": 2}, tmp_path)
    network = service.network
    prompts = [[20 + (x * x + place) % 200 for x in range(200)] for place in range(3)]
    without_kv, whole = ([Asked(x, LONG) for x in prompts] for _ in range(2))
    without_decode = [Asked(x, LONG, first=True) for x in prompts]
    async with service.running(VLLM):
        network.change(CUT, [1], [2])
        async with service.reading(without_kv):
            pass
        network.heal()
        await service.until_whole()
        async with service.reading(whole):
            pass
        # Stopped, it does not end an answer before it is cut off, however fast the machine is.
        os.kill(service.parts["decode-0"].pid, signal.SIGSTOP)
        async with service.reading(without_decode):
            network.split(2)
        os.kill(service.parts["decode-0"].pid, signal.SIGCONT)
        network.heal()
        await service.until_whole()
    for asked in (without_kv, without_decode):
        assert [x.token_ids for x in asked] == [x.token_ids for x in whole]
    assert (workers_of(whole), {fallbacks_of(x) for x in whole}) == ({"decode-0"}, {()})
    assert {step for x in without_kv for step in fallbacks_of(x)} == {"aggregated:transfer_failed"}
    assert {fallbacks_of(x) for x in without_decode} == {("aggregated:worker_failed",)}


@pytest.mark.parametrize("split_by", ["tensor_parallel_size", "pipeline_parallel_size"])
async def test_a_prefill_worker_over_two_nodes_ends_on_both_when_one_is_cut_off(
    tmp_path: Path, split_by: str
) -> None:
    workers, followers = {"prefill-0": 1, "decode-0": 2}, {"prefill-0": 3}
    service = Service((0,), workers, tmp_path, followers=followers, split_by=split_by)
    prompts = [[20 + (x * x + place) % 200 for x in range(200)] for place in range(3)]
    handed_over, one_worker = ([Asked(x, FEW) for x in prompts] for _ in range(2))
    async with service.running(VLLM):
        async with service.reading(handed_over):
            pass
        service.network.split(3)
        await service.until_state("prefill-0", "lost")
        async with service.reading(one_worker):
            pass
        parts = [service.parts[f"prefill-0-node-{rank}"] for rank in range(2)]
        await wait_until(lambda: not any(part.is_alive for part in parts))
    assert [x.token_ids for x in handed_over] == [x.token_ids for x in one_worker]
    assert {fallbacks_of(x) for x in handed_over} == {()}
    assert workers_of(one_worker) == {"decode-0"}


async def test_a_data_parallel_group_over_two_hosts_hands_over_and_ends_as_one(
    tmp_path: Path,
) -> None:
    group = ("decode-0", "decode-1")
    service = Service((0,), {"prefill-0": 1, "decode-0": 2, "decode-1": 3}, tmp_path, group=group)
    prompts = [[20 + (x * x + place) % 200 for x in range(200)] for place in range(4)]
    handed_over, cut_off, one_worker = ([Asked(x, FEW) for x in prompts] for _ in range(3))
    model = await make_kind(tmp_path / "moe", "Qwen3-MoE")
    async with service.running({**VLLM, "model": str(model)}):
        async with service.reading(handed_over):
            pass
        async with service.reading(cut_off):
            service.network.split(3)
        await wait_until(lambda: not any(service.parts[name].is_alive for name in group))
        async with service.reading(one_worker):
            pass
    assert workers_of(handed_over) == set(group)
    assert workers_of(one_worker) == {"prefill-0"}
    right = [x.token_ids for x in one_worker]
    assert [x.token_ids for x in handed_over] == right
    assert [x.token_ids for x in cut_off] == right


async def test_answers_of_an_unreachable_decode_host_continue_at_another(service: Service) -> None:
    async with service.answers(8) as asked:
        service.network.split(WORKERS["decode-0"])
    moved = [each for each in asked if fallbacks_of(each)]
    assert moved
    assert workers_of(asked) == {"decode-1"} | workers_of([x for x in asked if x not in moved])
    assert workers_of(await service.ask()) == {"decode-1"}
    await service.until_state("decode-0", "lost")


async def test_no_open_answer_notices_that_the_prefill_host_is_cut_off(service: Service) -> None:
    async with service.answers(8) as asked:
        service.network.split(WORKERS["prefill-0"])
    assert not any(map(fallbacks_of, asked))
    await service.ask()
    await service.until_state("prefill-0", "lost")
    await service.ask()


async def test_prefill_cut_off_from_one_decode_host_hands_over_to_the_other(
    service: Service,
) -> None:
    one, other = WORKERS["prefill-0"], WORKERS["decode-0"]
    service.network.change(CUT, [one], [other])
    service.network.change(CUT, [other], [one])
    await service.ask(8)
    await service.ask(8)


@pytest.mark.parametrize(("source", "target"), [(2, 0), (0, 2)], ids=["to", "from"])
async def test_answers_go_on_when_a_link_between_worker_and_router_is_cut_one_way(
    service: Service, source: int, target: int
) -> None:
    async with service.answers(8):
        service.network.change(CUT, [source], [target])
    await service.ask()


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1)], ids=["to", "from"])
async def test_kv_takes_another_pair_when_a_link_is_cut_one_way(
    service: Service, source: int, target: int
) -> None:
    service.network.change(CUT, [source], [target])
    await service.ask(8)
    await service.ask(8)


async def test_delay_and_loss_cost_time_alone(service: Service) -> None:
    far = LinkQuality(delay_s=0.01, loss=0.01)
    service.network.change(far, service.network.hosts, service.network.hosts)
    await service.ask(8)
    async with service.answers(8):
        service.network.split(WORKERS["decode-0"])


async def test_a_slow_network_costs_time_alone(service: Service) -> None:
    slow = LinkQuality(mbit_per_s=100)
    service.network.change(slow, service.network.hosts, service.network.hosts)
    assert not any(map(fallbacks_of, await service.ask(16)))


async def test_each_side_of_a_split_serves_with_its_workers(service: Service) -> None:
    async with service.answers(4, router=0) as here, service.answers(4, router=1) as there:
        service.network.split(3)
    # One side has lost a decode worker, the other its prefill worker.
    assert workers_of(await service.ask(router=0)) <= {"prefill-0", "decode-0"}
    assert workers_of(await service.ask(router=1)) == {"decode-1"}
    assert len(here) == len(there)


async def test_a_client_that_cannot_reach_its_router_uses_another(service: Service) -> None:
    """The prefill host is on the side of the router."""
    both = len(ROUTERS)
    async with service.answers(4, router=both):
        service.network.split(0)
    await service.ask(router=both)


async def test_an_http_client_whose_host_vanished_frees_its_slot(service: Service) -> None:
    """The answer would take minutes more."""
    body = json.dumps({"prompt": [20] * 50, "max_tokens": 8000, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    head += "content-type: application/json\r\n\r\n"

    async def open_requests() -> int:
        return sum(x.outstanding_requests for x in (await service.entries(0)).values())

    async def cancelled() -> float:
        async with (
            service.network.forward(0, HTTP) as address,
            aiohttp.ClientSession() as session,
            session.get(f"http://{address}/metrics") as response,
        ):
            found = re.search(r'requests_total{.*outcome="cancelled"} (.+)', await response.text())
        return float(found[1]) if found else 0.0

    before = await cancelled()
    async with service.network.forward(0, HTTP, at=1) as address:
        host, _, port = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((head + body).encode())
        await reader.readuntil(b"data: ")
        assert await open_requests()
        service.network.change(CUT, [0], [1])
        service.network.change(CUT, [1], [0])
        cut = time.monotonic()
        async with asyncio.timeout(WAIT_S):
            while await open_requests():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
        print(f"free after {time.monotonic() - cut:.1f} s")  # noqa: T201
        writer.close()
    assert await cancelled() == before + 1


async def test_a_split_that_comes_and_goes_loses_nothing(service: Service) -> None:
    async with service.answers(8):
        for _ in range(3):
            service.network.split(WORKERS["decode-0"])
            await asyncio.sleep(0.5)
            service.network.heal()
            await asyncio.sleep(0.5)
